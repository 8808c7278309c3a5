"""What a tuner may ask of an operation: its problems, its kernels, and what one launch of a schedule demands."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import aliases
from search_spaces.errors import DeclarationError
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.space import Column, Columns, Space, one_truth_value, unknown

P = TypeVar("P", bound="Problem")
S = TypeVar("S")
T = TypeVar("T")
# How the operands of part of a problem are taken from those of all of it.
TakeRows = Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]
# What a kernel gets besides arrays, and changes no schedule: names and values.
Params = tuple[tuple[str, Any], ...]
# One array where an operation has one result, a tuple of them where it has several.
Arrays = jax.Array | tuple[jax.Array, ...]
# Operands above so many elements are drawn in slabs: random bits and float32 numbers take six times a narrow operand.
SLAB = 2**24


@dataclasses.dataclass(frozen=True)
class Target:
    """The chip a kernel is asked about: what changes which code can run, and nothing about how much of it fits.

    Attributes:
      platform: JAX's name of the backend: "cpu", "cuda", "tpu".
      kind: the device's own name, such as "NVIDIA H200".
      architecture: "sm_90", "cpu": what machine code it runs.
      cores: streaming multiprocessors, tensor cores: how many blocks a persistent grid starts.
    """

    platform: str
    kind: str
    architecture: str
    cores: int


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """An element is right if ``|actual - expected| <= absolute + relative * |expected|``."""

    absolute: float
    relative: float


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

    def __post_init__(self) -> None:
        if all(value < _SMALL for value in vars(self).values() if isinstance(value, int)):
            return
        for array in (*self.operands(), *self.results()):
            if (size := nbytes(array)) >= 2**63:
                shape = ", ".join(map(str, array.shape))
                raise ValueError(f"{array.dtype}[{shape}] would be {size / 2**30:.3g} GiB, which no memory holds")

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
        """The right answer in float32 or better, by plain XLA at its highest precision; a tuple where `result` is."""

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
        """How far from `reference` a right answer may be; follows from dtype and length of reductions.

        One for each result where there are several; a single one holds for all of them.
        """
        allowed = [8 * float(jnp.finfo(s.dtype).eps) if _floats(s) else 0.0 for s in self.results()]
        return self.pack([Tolerance(absolute=x, relative=x) for x in allowed])

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Operands drawn from a normal distribution: zeros and small integers run faster than real data.

        Integers have a quarter of their dtype's range for a standard deviation.
        """
        keys = jax.random.split(jax.random.key(seed), len(self.operands()))
        return tuple(_operand(key, s) for key, s in zip(keys, self.operands(), strict=True))

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

    def canonical(self) -> str:
        """The problem as JSON with sorted names, fields at their defaults left out: what a cache is keyed by."""
        return json.dumps(self.told(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_canonical(cls: type[P], text: str) -> P:
        """The inverse of `canonical`.

        Raises:
          ValueError: `text` is no problem of this type.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a problem is a JSON object, not {text!r}")
        return cls.parse({name: str(value) for name, value in values.items()})

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


def _floats(s: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(s.dtype, jnp.floating))


def _operand(key: jax.Array, s: jax.ShapeDtypeStruct) -> jax.Array:
    return (_drawn if s.size <= SLAB else _in_slabs)(key, s.shape, s.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_slabs(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`_drawn` with the temporary memory of one slab at a time."""
    count = math.prod(shape)
    keys = jax.random.split(key, -(-count // SLAB))
    slabs = lax.map(lambda key: _drawn(key, (SLAB,), dtype), keys)
    return slabs.ravel()[:count].reshape(shape)


def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    normal = jax.random.normal(key, shape, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.integer):
        return normal.astype(dtype)
    least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    return jnp.clip(jnp.round(normal * (most / 4)), least, most).astype(dtype)


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


class Kernel(abc.ABC, Generic[P, S]):
    """One operation on one backend.

    Attributes:
      backend: what JAX calls it: "mosaic_gpu", "xla", ...
      version: raise it when the code changes what it computes or how fast; older answers are then forgotten.
      library: this is the XLA implementation, the answer to beat: a program or two, nothing to prune.
      verified_on: architectures on which this version has been checked on a device; elsewhere an answer that was
        not measured is never taken from it (see `verified`).
    """

    backend: ClassVar[str]
    version: ClassVar[int] = 1
    library: ClassVar[bool] = False
    verified_on: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backend" in vars(cls):
            cls.backend = aliases.backend(cls.backend)
        # What a kernel says is checked where it is said: it is asked in many places.
        for name, checked in (("supports", _in_words), ("footprint", _of_many), ("verified", _of_many)):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    def supports(self, problem: P, target: Target) -> str | None:
        """None, or the reason in words why this kernel cannot do `problem` on `target`.

        Whoever asks gets a `DeclarationError` where it is anything else.
        """
        return None

    @abc.abstractmethod
    def space(self, problem: P, target: Target) -> Space[S]:
        """The schedules worth considering. Names no capacity of a chip: what fits is the footprint's matter."""

    @abc.abstractmethod
    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        """What one launch of each of `schedules` demands."""

    def verified(self, problem: P, schedules: Columns, target: Target) -> Column | bool:
        """Which of `schedules` were among those checked on a device of this architecture; by default all or none.

        A part of the space that is newer than the check is left out here: a search, which verifies each candidate
        itself, tries it, and an answer that was not measured is not taken from it.
        """
        return target.architecture in self.verified_on

    def tolerance(self, problem: P, schedule: S) -> Tolerance | tuple[Tolerance, ...]:
        """How far from the reference the answer of `schedule` may be: the problem's tolerance, whoever computes it.

        A library kernel has a wider one for a program that users would otherwise run themselves.
        """
        return problem.tolerance()

    @abc.abstractmethod
    def run(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> Any:
        """Compute: traceable, arguments as in `problem.operands()`. `schedule` is a legal point of `space`.

        Returns:
          An array, or a tuple of them, as in `problem.result()`.
        """

    def results(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> tuple[jax.Array, ...]:
        """What `run` returns, always as a tuple."""
        return as_tuple(self.run(problem, schedule, target, *args, **params))


def _in_words(supports: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(supports)
    def checked(self: Kernel[Any, Any], *args: Any, **kwargs: Any) -> str | None:
        answer = supports(self, *args, **kwargs)
        if answer is None or (isinstance(answer, str) and answer):
            return answer
        raise DeclarationError(
            f"{type(self).__name__}.supports returned {answer!r}: it returns None where the kernel can do the problem, "
            "and else the reason in words"
        )

    return checked


def _of_many(declared: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(declared)
    def checked(self: Kernel[Any, Any], *args: Any, **kwargs: Any) -> Any:
        with one_truth_value(f"{type(self).__name__}.{declared.__name__}"):
            return declared(self, *args, **kwargs)

    return checked


@dataclasses.dataclass(frozen=True)
class Library:
    """The schedule of a library kernel: which program XLA compiles.

    Attributes:
      program: "float32", where accumulators and epilogue are rounded once; or "plain", what users write, in the dtype
        of the operands.
    """

    program: str = "float32"


class LibraryKernel(Kernel[P, Library]):
    """The XLA implementation as one more backend, whose schedules are its programs."""

    backend = "xla"
    library = True

    def programs(self, problem: P) -> tuple[str, ...]:
        """Those there are for `problem`; `Library`'s default, the first, answers where nothing was measured.

        A search tries them all before anything else.
        """
        return (Library.program,)

    def space(self, problem: P, target: Target) -> Space[Library]:
        return Space(Library, {"program": self.programs(problem)})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        """What is visible from outside: the whole problem as one block that moves only the compulsory bytes."""
        one, written = np.ones(len(schedules)), sum(map(nbytes, problem.results()))
        return Footprint(
            arithmetic=problem.arithmetic,
            grid=(one,),
            step=Phase(
                loads=(Operand(bytes=one * (problem.bytes_moved - written), axes=(0,)),),
                flops=one * problem.flops,
            ),
            tile=Phase(bytes_written=one * written),
            onchip_bytes=np.zeros(len(schedules), dtype=np.int64),
        )


def nbytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of this shape and dtype."""
    return array.size * array.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Bound(Generic[P]):
    """A call as kernels take it.

    Attributes:
      problem: what the call poses.
      operands: arrays or tracers, shaped as ``problem.operands()``.
      restore: ``restore(*results)`` is what the caller gets; None is `Problem.pack`, the results as they are.
      params: what reaches `Kernel.run` besides arrays.
    """

    problem: P
    operands: tuple[Any, ...]
    restore: Callable[..., Any] | None = None
    params: Params = ()


@dataclasses.dataclass(frozen=True)
class Unbound:
    """A call that no problem describes, which only the library answers.

    Attributes:
      reason: why, in words.
      answer: computes it by plain XLA; what JAX refuses is refused there, in JAX's words.
    """

    reason: str
    answer: Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Generic[P]):
    """A named operation: its problems, and the kernels that compete to solve them.

    The rules that follow are in terms of `call`, which makes a tuned call: ``call(problem, *args)`` of this operation,
    ``call(operation, problem, *args, **params)`` of another, tuned and cached under that one's name. What belongs to
    the results (they themselves, tangents, cotangents) is one array, or a tuple where `Problem.result` is a tuple.
    A tangent or cotangent that is zero is None, given or returned.

    Attributes:
      name: as a cache and a command line spell it.
      problem: the type of its problems.
      kernels: one per backend, exactly one of them a library kernel.
      params: names of what `Kernel.run` takes besides arrays and changes no schedule (an epsilon, a scale).
      jvp: ``jvp(call, problem, primals, tangents) -> (result, tangent)``. Default: the library kernel's derivative.
      transpose: ``transpose(call, problem, cotangent, args) -> cotangents``: where the operation is linear in the
        arguments given as None. Default: not transposable (its `jvp` then must not need it).
      batch: ``batch(call, problem, args, dims) -> (result, dim)``: one call for a vmapped one; a dim that is None is
        not batched. Default: one call for each element of the batch, in sequence.
      vjp_fwd: ``vjp_fwd(call, problem, args) -> (result, residuals)``: the result, and any pytree of arrays that the
        backward pass needs. With `vjp_bwd`, and in place of `jvp` and `transpose`.
      vjp_bwd: ``vjp_bwd(call, problem, residuals, cotangent) -> cotangents``, one for each argument. These two are
        a `jax.custom_vjp`: forward mode raises that one's TypeError, zero cotangents are given as arrays of zeros, and
        what `vjp_fwd` calls of its own operation has the library kernel's derivative (for a Hessian).
      front_end: ``front_end(*args, **options)`` -> `Bound` or `Unbound`: a call as users write it; options are
        keyword-only. Default: see `bind`.

    Raises:
      ValueError: no library kernel or two, two kernels of one backend, or rules that exclude each other.
    """

    name: str
    problem: type[P]
    kernels: tuple[Kernel[P, Any], ...]
    params: tuple[str, ...] = ()
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    vjp_fwd: Callable[..., Any] | None = None
    vjp_bwd: Callable[..., Any] | None = None
    front_end: Callable[..., Bound[P] | Unbound] | None = None

    def __post_init__(self) -> None:
        libraries = [kernel.backend for kernel in self.kernels if kernel.library]
        if len(libraries) != 1:
            raise ValueError(f"operation {self.name!r} needs exactly one library kernel, found {libraries or 'none'}")
        if len(set(self.backends)) != len(self.kernels):
            raise ValueError(f"operation {self.name!r} has two kernels of one backend: {', '.join(self.backends)}")
        if (self.vjp_fwd is None) != (self.vjp_bwd is None):
            raise ValueError(f"operation {self.name!r} has one of vjp_fwd and vjp_bwd, which belong together")
        if self.vjp_fwd is not None and (self.jvp is not None or self.transpose is not None):
            raise ValueError(f"operation {self.name!r} has a vjp, which takes the place of jvp and transpose")

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(kernel.backend for kernel in self.kernels)

    @functools.cached_property
    def library(self) -> Kernel[P, Any]:
        return next(kernel for kernel in self.kernels if kernel.library)

    def kernel(self, backend: str) -> Kernel[P, Any]:
        """The kernel of `backend`, which may be spelled as it once was (`aliases`).

        Raises:
          ValueError: there is none; the message names those there are.
        """
        for kernel in self.kernels:
            if kernel.backend == aliases.backend(backend):
                return kernel
        raise ValueError(f"{self.name} has no backend {backend!r} (it has: {', '.join(self.backends)})")

    def bind(self, *args: Any, **options: Any) -> Bound[P] | Unbound:
        """A call as users write it: the problem that it poses, its operands, and how the result is restored.

        By `front_end`, or without one: `args` are the operands as `Problem.operands` has them, and `options` are
        fields of the problem that shapes do not tell, and `params`.

        Raises:
          TypeError, ValueError: what a JAX user expects of wrong arguments, in one sentence.
        """
        if (wrong := next((name for name in options if name not in self._options), None)) is not None:
            raise TypeError(f"{self.name} has no parameter {wrong!r} (it has: {', '.join(self._options)})")
        if self.front_end is not None:
            return self.front_end(*args, **options)
        operands = tuple(jnp.asarray(x) for x in args)
        told = {name: x for name, x in options.items() if name not in self.params}
        params = tuple((name, x) for name, x in options.items() if name in self.params)
        return Bound(self.problem.of(*operands, **told), operands, params=params)

    @functools.cached_property
    def _options(self) -> tuple[str, ...]:
        """What `bind` takes by name."""
        if self.front_end is None:
            return *(field.name for field in dataclasses.fields(self.problem)), *self.params
        parameters = inspect.signature(self.front_end).parameters.values()
        return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
