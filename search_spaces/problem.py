"""One instance of an operation: its shapes and dtypes, operands and results, reference and tolerance."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.row_alignment import ROW_BYTES, row_alignment
from search_spaces.space import meant, unknown

# ------------------------------------------------------------------------------
# Dtypes as text: the short forms that users type, and the names that keys contain.

# Letters with bit counts, as in XLA, Triton and PyTorch; in NumPy's codes i8 has eight bytes.
_LONG = MappingProxyType(
    {
        **{f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("i", "int"), ("s", "int"), ("u", "uint"))
           for bits in (4, 8, 16, 32, 64)},
        **{f"{letters}{bits}": f"float{bits}" for letters in ("f", "fp") for bits in (16, 32, 64)},
        "bf16": "bfloat16", "half": "float16", "single": "float32", "double": "float64", "pred": "bool",
        "c64": "complex64", "c128": "complex128",
        **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "f8e4m3fn", "f8_e4m3fn", "e4m3", "e4m3fn"), "float8_e4m3fn"),
        **dict.fromkeys(("fp8_e5m2", "f8e5m2", "f8_e5m2", "e5m2"), "float8_e5m2"),
    }
)  # fmt: skip
NAMES = tuple(dict.fromkeys(_LONG.values()))
_ARRAY = re.compile(r"\s*([\w.]+)\s*\[([\d,\s]*)\]\s*")


def dtype_name(text: str) -> str:
    """Returns the name of the dtype that `text` means: "bfloat16" for "bf16" and "torch.bfloat16".

    Other text is returned unchanged.
    """
    short = text.strip().lower()
    package, _, last = short.rpartition(".")
    if package in ("jnp", "np", "torch", "jax.numpy", "numpy", "ml_dtypes"):
        short = last
    found = _LONG.get(short, short)
    return found if found in NAMES else text


def array_type(text: str) -> tuple[str, str] | None:
    """Returns the dtype name and the extents of an array type such as ``bf16[8, 128]``; None for other text."""
    found = _ARRAY.fullmatch(text)
    return None if found is None else (dtype_name(found[1]), found[2])


def canonical(text: str) -> str:
    """Returns a dtype or an array type as keys contain it; other text is returned unchanged."""
    if (found := array_type(text)) is None:
        return dtype_name(text)
    return f"{found[0]}[{','.join(found[1].replace(',', ' ').split())}]"


def did_you_mean(text: str, known: Sequence[str] = NAMES) -> str:
    """Returns the end of an error message about a dtype that is not among `known`; "" if none is close."""
    close = meant(dtype_name(text), known)
    return f"; did you mean {close!r}?" if close else ""


P = TypeVar("P", bound="Problem")
T = TypeVar("T")
# Takes the operands of part of a problem from those of the whole problem.
TakeRows = Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]
# One array where an operation has one result, a tuple of them where it has several.
Arrays = jax.Array | tuple[jax.Array, ...]
# Operands of more elements are drawn in slabs: random bits and float32 take six times a narrow operand's memory.
SLAB = 2**24


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """An element is correct if ``|actual - expected| <= absolute + relative * |expected|``.

    Attributes:
      scale: lower and upper bound of a factor of `absolute`. The factor is the largest finite element of the reference,
        clipped to these bounds. So an error that is small compared to 1 does not hide a result whose elements are all
        smaller. Errors of integers are never scaled.
    """

    absolute: float
    relative: float
    scale: tuple[float, float] = (1.0, 1.0)

    def wider(self, times: float) -> Tolerance:
        """Returns this tolerance multiplied by `times`."""
        return dataclasses.replace(self, absolute=times * self.absolute, relative=times * self.relative)

    def times(self, other: Tolerance) -> float:
        """Returns the ratio of this tolerance to `other`, at least 1."""
        pairs = (self.absolute, other.absolute), (self.relative, other.relative)
        return max([1.0, *(mine / theirs for mine, theirs in pairs if theirs)])


# Errors are known for reference elements of 1; if all are smaller, they scale with the largest.
DOWN = (0.0, 1.0)
# Errors are known for reference elements of 1, and always scale with the largest element.
PROPORTIONAL = (0.0, math.inf)


# With all extents below this, no array can be too large for its bytes to be counted.
_SMALL = 2**20


@dataclasses.dataclass(frozen=True)
class Problem(abc.ABC):
    """One instance of an operation: everything that changes which schedule is best, and nothing else.

    A subclass is a frozen dataclass with fields of type int, bool or str. A value that changes no schedule (an epsilon,
    a scale) is a parameter of the call instead.

    Raises:
      ValueError: an array would have 2^63 bytes or more. A `__post_init__` of a subclass must call this one last.
    """

    # Names of fields that hold a dtype, besides `dtype` and those that end in `_dtype`.
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
        """Replaces short names of dtypes ("bf16") by the names that keys contain."""
        for name, value in vars(self).items():
            if isinstance(value, str) and (name.endswith("dtype") or name in self._dtype_fields):
                object.__setattr__(self, name, dtype_name(value))

    def _require(self, name: str, known: Sequence[str], end: str = "") -> None:
        """Raises a ValueError if the value of a field, which may be a dtype, is not in `known`."""
        if (value := getattr(self, name)) not in known:
            words = ", ".join(map(str, filter(None, known)))
            raise ValueError(f"{name}={value!r} is not one of {words}{end}{did_you_mean(str(value), known)}")

    @classmethod
    @abc.abstractmethod
    def of(cls: type[P], *args: Any, **params: Any) -> P:
        """Returns the problem of a call. Reads shapes and dtypes only, so arrays and tracers both work.

        Raises:
          TypeError, ValueError: wrong operands, with a one-sentence message as JAX users expect.
        """

    @abc.abstractmethod
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and dtypes of the arrays that a kernel's `run` takes."""

    @abc.abstractmethod
    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shape and dtype of the result of a kernel's `run`; a tuple of them if it returns several arrays."""

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and dtypes of all results: `result`, always as a tuple."""
        return as_tuple(self.result())

    def pack(self, results: Sequence[T]) -> T | tuple[T, ...]:
        """Packs one value per result in the form of `result`: a tuple, or a single value if it is no tuple."""
        return tuple(results) if isinstance(self.result(), tuple) else results[0]

    @abc.abstractmethod
    def reference(self, *args: jax.Array) -> Arrays:
        """Computes the expected result by plain XLA at its highest precision; a tuple if `result` is one.

        The dtype is float32 or wider, float64 if the result's is, and the result's own if that is an integer type. If
        the reference is NaN or infinite, a correct result is, too.
        """

    def reference_text(self) -> str:
        """Returns what a process that has only `canonical` needs to compute the reference (`use_reference`).

        Default: "", nothing.
        """
        return ""

    def use_reference(self, text: str) -> None:
        """Makes this process compute the reference from a `reference_text` of another process, which is not empty."""
        raise NotImplementedError(f"{type(self).__name__} has no reference_text")

    @property
    @abc.abstractmethod
    def flops(self) -> float:
        """Floating-point operations that the result needs, without padding."""

    @property
    def bytes_moved(self) -> float:
        """Compulsory device-memory traffic in bytes: each operand read once, each result written once."""
        return float(sum(map(nbytes, (*self.operands(), *self.results()))))

    def library_flops(self, platform: str) -> float:
        """Returns the floating-point operations of XLA's implementation on a platform."""
        return self.flops

    @property
    def library_bytes_moved(self) -> float:
        """Traffic of XLA's implementation in bytes, including intermediate arrays between its kernels."""
        return self.bytes_moved

    @property
    def library_bytes_read_again(self) -> float:
        """Bytes of operands that the library reads again in later passes, in case the cache does not hold them."""
        return 0.0

    @property
    def library_bytes_unsure(self) -> float:
        """Uncertainty of `library_bytes_moved` in bytes: traffic that is only known after compilation."""
        return 0.0

    @property
    def matrices(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The operands that kernels load in tiles of rows: by default those with several axes."""
        return tuple(s for s in self.operands() if len(s.shape) > 1)

    @property
    def row_alignment(self) -> int:
        """The smallest `row_alignment` of its matrices and results, in bytes."""
        return min(map(row_alignment, (*self.matrices, *self.results())), default=ROW_BYTES)

    @property
    def arithmetic(self) -> str:
        """The type that determines the peak rate for this problem: a dtype name, or "tf32"."""
        return str(self.operands()[0].dtype)

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers | None:
        """Dimension numbers of `jax.lax.dot_general` if this is a product of the first two operands; None otherwise.

        Policies of `jax.checkpoint` treat such a problem as a dot: `dots_saveable` saves it, for example.
        """
        return None

    def tolerance(self) -> Tolerance | tuple[Tolerance, ...]:
        """Returns the allowed distance from `reference` for operands of `inputs`, by dtype and length of reductions.

        One for each result, or a single one for all of them. Default: 8 eps of the result's dtype, and zero for
        integers.
        """
        allowed = [8 * float(jnp.finfo(s.dtype).eps) if _inexact(s) else 0.0 for s in self.results()]
        return self.pack([Tolerance(absolute=x, relative=x, scale=DOWN) for x in allowed])

    def for_each(self, allowed: Tolerance | tuple[Tolerance, ...]) -> tuple[Tolerance, ...]:
        """Expands a tolerance in the form of `tolerance` to one for each result."""
        return allowed if isinstance(allowed, tuple) else (allowed,) * len(self.results())

    def special(self) -> tuple[str, ...]:
        """Returns the kinds of special operands (`checking.VALUE_KINDS`) for which results must be correct, too.

        Default: all kinds that apply to the operands' dtypes. None if `inputs` is overridden, because other operands
        may then be excluded.
        """
        if type(self).inputs is not Problem.inputs:
            return ()
        return checking.kinds_of([s.dtype for s in self.operands()])

    def disputed(self) -> frozenset[str]:
        """Returns the kinds of `special` for which a wrong result is a warning; a NaN out of place is still refused.

        Default: none.
        """
        return frozenset()

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Returns operands of a kind of `special`: those of `inputs` with other values."""
        return checking.with_special_values(self.inputs(seed), kind)

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Returns the allowed error for `special_inputs` of this kind, for each result.

        Default: that of `tolerance`, and the same fraction of the largest element of the reference.
        """
        each = self.for_each(self.tolerance())
        return tuple(
            dataclasses.replace(one, absolute=max(one.absolute, one.relative), scale=PROPORTIONAL)
            if _inexact(s)
            else one
            for one, s in zip(each, self.results(), strict=True)
        )

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Draws operands from a normal distribution: zeros and small integers run faster than real data.

        Both parts of complex numbers are drawn so. The standard deviation of integers is a quarter of their dtype's
        range, and all of their bits vary. Half of the booleans are true.
        """
        keys = jax.random.split(jax.random.key(seed), len(self.operands()))
        each = list(zip(keys, self.operands(), strict=True))
        for key, s in each:
            _draws(key, s)
        with checking.compile_turn():
            return tuple(_operand(key, s) for key, s in each)

    def variants(self, operands: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        """Returns operands that differ in values which determine the amount of work, such as the sizes of groups.

        A candidate is verified and timed with each variant, and its time is the mean. A variant shares with `operands`
        all arrays but those that it replaces, by NumPy arrays. Default: only `operands`.

        Args:
          operands: arrays, or their shapes.
        """
        return (tuple(operands),)

    @property
    def variant_count(self) -> int:
        """Number of `variants`."""
        return len(self.variants(self.operands()))

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        """Returns the problem whose results are these rows of this one's, and a function that takes its operands.

        With it, a result of gigabytes is compared with a reference of some of its rows. None, the default, if rows of
        the result do not follow from part of the operands: the reference is then as large as the result.

        Args:
          rows: indices along `row_axes`, in ascending order.
        """
        return None

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Axis of each result, from its end, along which the rows of `at_rows` lie; by default the second to last."""
        return (-2,) * len(self.results())

    def neighbour(self) -> Problem | None:
        """Returns a slightly smaller problem for which a winning schedule must be correct too.

        No tile divides its extents. It has the same dtypes and layouts. None, the default, if there is none or none is
        needed.
        """
        return None

    def coordinates(self) -> Mapping[str, int | bool | str]:
        """Returns the values by which problems are compared: near problems differ in a few of these numbers only."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def canonical(self) -> str:
        """Returns the cache key: JSON with sorted names, without fields at their defaults."""
        return json.dumps(self.non_default_fields(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_canonical(cls: type[P], text: str, reference: str = "") -> P:
        """The inverse of `canonical`; the problem has the `reference_text` that another process gave.

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
        problem = cls.parse(texts)
        if reference:
            problem.use_reference(reference)
        return problem

    @classmethod
    def parse(cls: type[P], texts: Mapping[str, str]) -> P:
        """Returns the problem with fields given as text, as on a command line: ``{"m": "4096", "dtype": "bfloat16"}``.

        Raises:
          ValueError: an unknown, missing or malformed field; the message lists the correct names.
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
        """Formats the problem as it is typed: fields without a default, `dtype`, and fields not at their default."""
        always = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name == "dtype"}
        told = always | self.non_default_fields()
        return " ".join(f"{field.name}={told[field.name]}" for field in dataclasses.fields(self) if field.name in told)

    def brief(self) -> str:
        """Formats the problem for a report."""
        return str(self)

    def non_default_fields(self) -> dict[str, int | bool | str]:
        """Returns the fields that differ from their defaults. 1, a NumPy bool and True become one value."""
        types = _types(type(self))
        given: dict[str, int | bool | str] = {}
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                kind = types[field.name]
                given[field.name] = kind(value) if kind in (int, bool) else value
        return given


def as_tuple(arrays: T | Sequence[T]) -> tuple[T, ...]:
    """Returns several arrays as a tuple, and a single one as a tuple of one."""
    return tuple(arrays) if isinstance(arrays, tuple | list) else (cast("T", arrays),)


def _inexact(s: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(s.dtype, jnp.inexact))


def _draws(key: jax.Array, s: jax.ShapeDtypeStruct) -> checking.Program:
    return checking.program_of(_in_slabs, key, shape=s.shape, dtype=s.dtype)


def _operand(key: jax.Array, s: jax.ShapeDtypeStruct) -> jax.Array:
    drawn: jax.Array = checking.run_program(_in_slabs, key, shape=s.shape, dtype=s.dtype)
    return drawn


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies a drawn operand by `factor`, in its dtype."""
    product: jax.Array = checking.run_program(_scaled, x, factor=factor)
    return product


@functools.partial(jax.jit, static_argnames="factor")
def _scaled(x: jax.Array, *, factor: float) -> jax.Array:
    return (x * factor).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _in_slabs(key: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Computes `_drawn` with temporary memory for one slab at a time."""
    if (count := math.prod(shape)) <= SLAB:
        return _drawn(key, shape, dtype)
    keys = jax.random.split(key, -(-count // SLAB))
    slabs = lax.map(lambda key: _drawn(key, (SLAB,), dtype), keys)
    return slabs.ravel()[:count].reshape(shape)


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):  # a standard deviation of 1 in each part, as for real numbers
        return (jax.random.normal(key, shape, dtype) * math.sqrt(2.0)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 4:  # in float32 the last bits would be 0
        return jax.random.normal(key, shape, dtype)
    normal = jax.random.normal(key, shape, jnp.float32)
    if jnp.issubdtype(dtype, jnp.bool_):
        return normal > 0
    if not jnp.issubdtype(dtype, jnp.integer):
        return normal.astype(dtype)
    info = jnp.iinfo(dtype)
    # In float32 the largest integer of 32 or more bits rounds up, out of range.
    most = float(np.nextafter(np.float32(info.max), np.float32(0))) if info.bits >= 32 else info.max
    drawn = jnp.clip(jnp.round(normal * (info.max / 4)), info.min, most).astype(dtype)
    if info.bits < 32:
        return drawn
    # The low bits, which float32 cannot hold, must vary as well: results differ in them, too.
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
    """Returns the bytes of an array of this shape and dtype."""
    return array.size * array.dtype.itemsize
