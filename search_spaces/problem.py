"""One instance of an operation: its shapes and dtypes, its operands and results, and what a right answer is."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import reference_programs, special_values
from search_spaces.dtypes import did_you_mean, dtype_name
from search_spaces.space import unknown

P = TypeVar("P", bound="Problem")
T = TypeVar("T")
# How the operands of part of a problem are taken from those of all of it.
TakeRows = Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]
# One array where an operation has one result, a tuple of them where it has several.
Arrays = jax.Array | tuple[jax.Array, ...]
# Operands above so many elements are drawn in slabs: random bits and float32 numbers take six times a narrow operand.
SLAB = 2**24


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """An element is right if ``|actual - expected| <= absolute + relative * |expected|``.

    Attributes:
      scale: `absolute` is multiplied by the largest right element that is finite, but by no less and no more than
        these. So an error that is small beside elements of 1 does not hide a result whose elements are all smaller.
        Errors of integers are never scaled.
    """

    absolute: float
    relative: float
    scale: tuple[float, float] = (1.0, 1.0)

    def wider(self, times: float) -> Tolerance:
        """So many times as much."""
        return dataclasses.replace(self, absolute=times * self.absolute, relative=times * self.relative)

    def times(self, other: Tolerance) -> float:
        """How many times as much as `other` this allows, at least once."""
        pairs = (self.absolute, other.absolute), (self.relative, other.relative)
        return max([1.0, *(mine / theirs for mine, theirs in pairs if theirs)])


# Errors are known for right elements of 1, or for the largest one where all are smaller.
DOWN = (0.0, 1.0)
# Errors are known for right elements of 1, and in proportion for the largest one, whatever it is.
PROPORTIONAL = (0.0, math.inf)


# Extents below this make no array that could be too large to count its bytes.
_SMALL = 2**20


@dataclasses.dataclass(frozen=True)
class Problem(abc.ABC):
    """One instance of an operation: everything that changes which schedule is best, and nothing else.

    A subclass is a frozen dataclass whose fields are int, bool or str. What changes no schedule (an epsilon, a scale)
    is a parameter of the call instead.

    Raises:
      ValueError: an array would have 2^63 bytes or more. A subclass with a `__post_init__` calls this one's last.
    """

    # Names of fields that have a dtype, beside `dtype` and what ends in `_dtype`.
    _dtype_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self._spell_dtypes()
        if all(value < _SMALL for value in vars(self).values() if isinstance(value, int)):
            return
        for array in (*self.operands(), *self.results()):
            if (size := nbytes(array)) >= 2**63:
                shape = ", ".join(map(str, array.shape))
                gib = f"{size / 2**30:.3g}" if size < 10**300 else "over 1e+290"
                raise ValueError(f"{array.dtype}[{shape}] would be {gib} GiB, which no memory holds")

    def _spell_dtypes(self) -> None:
        """Gives dtypes the names that keys have, where they were given in short: "bf16"."""
        for name, value in vars(self).items():
            if isinstance(value, str) and (name.endswith("dtype") or name in self._dtype_fields):
                object.__setattr__(self, name, dtype_name(value))

    def _require(self, name: str, known: Sequence[str], end: str = "") -> None:
        """Raises a ValueError where a field, which may be a dtype, has none of these values."""
        if (value := getattr(self, name)) not in known:
            words = ", ".join(map(str, filter(None, known)))
            raise ValueError(f"{name}={value!r} is not one of {words}{end}{did_you_mean(str(value), known)}")

    @classmethod
    @abc.abstractmethod
    def of(cls: type[P], *args: Any, **params: Any) -> P:
        """The problem that a call poses: reads shapes and dtypes only, so arrays and tracers alike.

        Raises:
          TypeError, ValueError: what a JAX user expects of wrong operands, in one sentence.
        """

    @abc.abstractmethod
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays that a kernel's `run` gets."""

    @abc.abstractmethod
    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of what a kernel's `run` returns; a tuple of them where it returns several arrays."""

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of all results: `result`, always as a tuple."""
        return as_tuple(self.result())

    def pack(self, results: Sequence[T]) -> T | tuple[T, ...]:
        """What belongs to each result, as `result` has it: in a tuple, or by itself where it is no tuple."""
        return tuple(results) if isinstance(self.result(), tuple) else results[0]

    @abc.abstractmethod
    def reference(self, *args: jax.Array) -> Arrays:
        """The right answer by plain XLA at its highest precision; a tuple where `result` is.

        In float32 or better, and in float64 where the result is; of the result's own dtype where that is of integers.
        It may be NaN or infinite: then right answers are, too.
        """

    @property
    @abc.abstractmethod
    def flops(self) -> float:
        """Floating-point operations that the answer needs, padding not counted."""

    @property
    def bytes_moved(self) -> float:
        """Compulsory device-memory traffic in bytes: each operand read once, each result written once."""
        arrays = (*self.operands(), *self.results())
        return float(sum(map(nbytes, arrays)))

    @property
    def library_bytes_moved(self) -> float:
        """Traffic of XLA's implementation, in bytes: what it writes between its kernels and reads again included."""
        return self.bytes_moved

    @property
    def library_bytes_unsure(self) -> float:
        """What XLA's implementation moves besides or does not, in bytes: nobody can tell before it was compiled."""
        return 0.0

    @property
    def arithmetic(self) -> str:
        """The type whose peak rate bounds this problem: a dtype name, or "tf32"."""
        return str(self.operands()[0].dtype)

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers | None:
        """As `jax.lax.dot_general` wants them, where this is a product of its first two operands; None elsewhere.

        What is one, policies of `jax.checkpoint` take for a dot: `dots_saveable` saves it, and so on.
        """
        return None

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        """How far from `reference` a right answer may be to operands of `inputs`: by dtype and length of reductions.

        One for each result where there are several; a single one holds for all of them. By default 8 eps of its dtype,
        and nothing for integers.
        """
        allowed = [8 * float(jnp.finfo(s.dtype).eps) if _inexact(s) else 0.0 for s in self.results()]
        return self.pack([Tolerance(absolute=x, relative=x, scale=DOWN) for x in allowed])

    def for_each(self, allowed: Tolerance | tuple[Tolerance, ...]) -> tuple[Tolerance, ...]:
        """A tolerance, as `tolerance` says it, of each result."""
        return allowed if isinstance(allowed, tuple) else (allowed,) * len(self.results())

    def special(self) -> tuple[str, ...]:
        """Kinds of special operands (`special_values.KINDS`) that answers must be right for, too.

        By default all that there are of the operands' dtypes; none where `inputs` is not that of `Problem`, as other
        operands may then be excluded.
        """
        if type(self).inputs is not Problem.inputs:
            return ()
        return special_values.kinds_of([s.dtype for s in self.operands()])

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Operands of a kind of `special`: those of `inputs`, with other values."""
        return special_values.altered(self.inputs(seed), kind)

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """How far off a right answer may be to `special_inputs` of this kind, for each result.

        By default what `tolerance` allows, and as a share of the largest right element.
        """
        each = self.for_each(self.tolerance())
        return tuple(
            dataclasses.replace(one, absolute=max(one.absolute, one.relative), scale=PROPORTIONAL)
            if _inexact(s)
            else one
            for one, s in zip(each, self.results(), strict=True)
        )

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Operands drawn from a normal distribution: zeros and small integers run faster than real data.

        Both parts of complex numbers are. Integers have a quarter of their dtype's range for a standard deviation, and
        each of their bits counts; half of the truth values hold.
        """
        keys = jax.random.split(jax.random.key(seed), len(self.operands()))
        each = list(zip(keys, self.operands(), strict=True))
        for key, s in each:
            _draws(key, s)
        with reference_programs.turn():
            return tuple(_operand(key, s) for key, s in each)

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        """The problem whose results are these rows of this one's, and what takes its operands from these.

        So that a result of gigabytes is compared with a reference of some of its rows. None, the default, where rows of
        the result do not follow from part of the operands: the reference is then as large as the result.

        Args:
          rows: which, along `row_axes`, in ascending order.
        """
        return None

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axis of each result, from its end, along which the rows of `at_rows` lie: by default the last but one."""
        return (-2,) * len(self.results())

    def neighbour(self) -> Problem | None:
        """A slightly smaller problem whose extents no tile divides, on which a schedule that wins must be right too.

        Of the same dtypes and layouts. None, the default, where there is none, or none is wanted.
        """
        return None

    def coordinates(self) -> Mapping[str, int | bool | str]:
        """By what problems are compared: near are those that differ in a few of these numbers, and in nothing else."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def canonical(self) -> str:
        """The problem as JSON with sorted names, fields at their defaults left out: what a cache is keyed by."""
        return json.dumps(self.told(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_canonical(cls: type[P], text: str) -> P:
        """The inverse of `canonical`.

        Raises:
          ValueError: `text` is no problem of this type.
        """
        try:
            values = json.loads(text)
            texts = {name: str(value) for name, value in values.items()} if isinstance(values, dict) else None
        except RecursionError:
            raise ValueError("JSON nested too deeply to be a problem") from None
        if texts is None:
            raise ValueError(f"a problem is a JSON object, not {text!r}")
        return cls.parse(texts)

    @classmethod
    def parse(cls: type[P], texts: Mapping[str, str]) -> P:
        """The problem with fields given as text, as on a command line: ``{"m": "4096", "dtype": "bfloat16"}``.

        Raises:
          ValueError: an unknown, missing or malformed field, with the right names in the message.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        types = _types(cls)
        values: dict[str, int | bool | str] = {}
        for name, text in texts.items():
            if name not in fields:
                raise ValueError(f"no field {unknown(name, fields)}")
            values[name] = _parse_value(name, text, types[name])
        required = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"missing {', '.join(missing)} (the fields are: {', '.join(fields)})")
        return cls(**values)

    def __str__(self) -> str:
        """As it is typed: fields without a default, `dtype`, and what else is not at its default, in their order."""
        always = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name == "dtype"}
        told = always | self.told()
        return " ".join(f"{field.name}={told[field.name]}" for field in dataclasses.fields(self) if field.name in told)

    def told(self) -> dict[str, int | bool | str]:
        """The fields that differ from their defaults; one problem has one spelling, whether 1, a NumPy bool or True."""
        types = _types(type(self))
        told: dict[str, int | bool | str] = {}
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                kind = types[field.name]
                told[field.name] = kind(value) if kind in (int, bool) else value
        return told


def as_tuple(arrays: T | Sequence[T]) -> tuple[T, ...]:
    """Several arrays as a tuple, and a single one as a tuple of one."""
    return tuple(arrays) if isinstance(arrays, tuple | list) else (cast("T", arrays),)


def _inexact(s: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(s.dtype, jnp.inexact))


def _draws(key: jax.Array, s: jax.ShapeDtypeStruct) -> reference_programs.Program:
    return reference_programs.program(_in_slabs, key, shape=s.shape, dtype=s.dtype)


def _operand(key: jax.Array, s: jax.ShapeDtypeStruct) -> jax.Array:
    drawn: jax.Array = reference_programs.run(_in_slabs, key, shape=s.shape, dtype=s.dtype)
    return drawn


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """An operand that was drawn, times `factor`, in its dtype."""
    product: jax.Array = reference_programs.run(_scaled, x, factor=factor)
    return product


@functools.partial(jax.jit, static_argnames="factor")
def _scaled(x: jax.Array, *, factor: float) -> jax.Array:
    return (x * factor).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _in_slabs(key: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`_drawn` with the temporary memory of one slab at a time."""
    if math.prod(shape) <= SLAB:
        return _drawn(key, shape, dtype)
    count = math.prod(shape)
    keys = jax.random.split(key, -(-count // SLAB))
    slabs = lax.map(lambda key: _drawn(key, (SLAB,), dtype), keys)
    return slabs.ravel()[:count].reshape(shape)


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):  # of a standard deviation of 1 in each part, as real numbers
        return (jax.random.normal(key, shape, dtype) * math.sqrt(2.0)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 4:  # in float32 their last bits would be 0
        return jax.random.normal(key, shape, dtype)
    normal = jax.random.normal(key, shape, jnp.float32)
    if jnp.issubdtype(dtype, jnp.bool_):
        return normal > 0
    if not jnp.issubdtype(dtype, jnp.integer):
        return normal.astype(dtype)
    info = jnp.iinfo(dtype)
    # In float32 the largest integer of 32 bits and more rounds to one beyond.
    most = float(np.nextafter(np.float32(info.max), np.float32(0))) if info.bits >= 32 else info.max
    drawn = jnp.clip(jnp.round(normal * (info.max / 4)), info.min, most).astype(dtype)
    if info.bits < 32:
        return drawn
    # What float32 has no bits for, in which answers differ as well.
    last = jax.random.bits(jax.random.fold_in(key, 1), shape, f"uint{info.bits}") >> np.array(16, f"uint{info.bits}")
    return drawn ^ last.astype(dtype)


@functools.cache
def _types(problem: type[Problem]) -> dict[str, Any]:
    return typing.get_type_hints(problem)


def _parse_value(name: str, text: str, kind: type) -> int | bool | str:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{name}={text} is not true or false")
        return text.lower() in ("true", "1")
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text} is not an integer") from None
    return text


def nbytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of this shape and dtype."""
    return array.size * array.dtype.itemsize
