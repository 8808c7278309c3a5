"""The matrix product as a problem: operands, inputs, reference and tolerance, whatever computes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import special_values
from search_spaces.dtypes import did_you_mean
from search_spaces.matmul import epilogue, several_results
from search_spaces.problem import PROPORTIONAL, Arrays, Problem, TakeRows, Tolerance, nbytes, scaled

_FLOATS = ("bfloat16", "float16", "float32")
# Operands' dtype -> the dtypes that a result may have. Accumulators of 8-bit products exceed 8 bits: they are for the
# caller to scale, not for a product to round. Five products of int8 may exceed what float16 holds.
RESULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys((*_FLOATS, "float8_e4m3fn", "float8_e5m2"), _FLOATS) | {"int8": ("int32", "bfloat16", "float32")}
)
DTYPES = tuple(RESULTS)
PRECISIONS = ("default", "high", "highest")


class Operands(NamedTuple):
    """What belongs to each operand of a problem, by name; None for a bias or a residual that it does not have."""

    a: Any
    b: Any
    bias: Any = None
    residual: Any = None

    def added(self, result: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """The bias and the residual that are there, by name, with the shapes that a result of this shape wants."""
        shapes = {"bias": (self.bias, result[-1:] if self.b.ndim > 1 else ()), "residual": (self.residual, result)}
        return {name: (x, shape) for name, (x, shape) in shapes.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class MatmulProblem(Problem):
    """``c[batch, m, n] = activation(a[batch, m, k] @ b[batch, k, n] + bias[batch, 1, n]) + residual[batch, m, n]``.

    Accumulated in float32, in which the rest is computed too: only the result is rounded. Products of int8 are
    accumulated in int32; those of 8-bit operands have no epilogue.

    Attributes:
      m, n, k: extents, at least 1. The batch axis exists only where `batch` is above 1.
      dtype: of both operands.
      batch: independent products in one call.
      out_dtype: of the result, one of `RESULTS`; "" is `dtype`, for operands that are not 8-bit.
      transpose_a: `a` is stored ``[batch, k, m]``.
      transpose_b: `b` is stored ``[batch, n, k]``.
      precision: what float32 operands may be rounded to ("default" allows TF32 where the hardware has it, "high" three
        bfloat16 passes, "highest" nothing); always "default" for narrower ones, whose products are exact in float32.
      bias: dtype of the bias, stored ``[batch, n]``; "" is none.
      activation: a name in `epilogue.ACTIVATIONS`; "" is none.
      residual: dtype of the residual, stored as the result is; "" is none.
      split_sizes: columns of each result, "4096+1024+1024", where the columns come in several arrays side by side; ""
        is one array. It goes with no residual, which would have to come in several arrays, too.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    batch: int = 1
    out_dtype: str = ""
    transpose_a: bool = False
    transpose_b: bool = False
    precision: str = "default"
    bias: str = ""
    activation: str = ""
    residual: str = ""
    split_sizes: str = ""

    _dtype_fields = ("bias", "residual")

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name, allowed in (("dtype", DTYPES), ("precision", PRECISIONS)):
            self._require(name, allowed)
        if (self.out_dtype or self.dtype) not in RESULTS[self.dtype]:
            given = ", ".join(RESULTS[self.dtype])
            raise ValueError(
                f"out_dtype={self.out_dtype!r} is not one of {given}, which {self.dtype} operands give"
                f"{did_you_mean(self.out_dtype, RESULTS[self.dtype])}"
            )
        added, activations = epilogue.DTYPES, tuple(epilogue.ACTIVATIONS)
        for name, known in (("bias", added), ("activation", activations), ("residual", added)):
            self._require(name, ("", *known), "; leave it out for none")
        if self.fused and jnp.dtype(self.dtype).itemsize == 1:
            raise ValueError(
                f"{self.dtype} operands take no bias, activation or residual: their accumulators are to be scaled first"
            )
        if self.split_sizes and self.residual:
            raise ValueError(f"residual={self.residual} with split_sizes={self.split_sizes}: add it to the results")
        # One problem has one spelling, or a cache would hold it twice.
        if self.split_sizes:
            sizes = several_results.numbers(self.split_sizes)
            several_results.check(sizes, self.n)
            object.__setattr__(self, "split_sizes", several_results.spelled(sizes))
        if self.out_dtype == self.dtype:
            object.__setattr__(self, "out_dtype", "")
        if self.dtype != "float32" and self.precision != "default":
            object.__setattr__(self, "precision", "default")
        super().__post_init__()

    @classmethod
    def of(
        cls,
        a: Any,
        b: Any,
        *added: Any,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out_dtype: Any = "",
        precision: str = "default",
        activation: str | None = None,
        split_sizes: str = "",
    ) -> MatmulProblem:
        """From operands in the layout of `operands`; a bias, a residual or both follow `a` and `b`, in this order."""
        if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[:-2] != b.shape[:-2]:
            raise ValueError(f"a {a.shape} and b {b.shape} are not [m, k] and [k, n], nor batches of one size of these")
        m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
        k_of_b, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
        if k != k_of_b:
            raise ValueError(f"a {a.shape} and b {b.shape} do not multiply ({transpose_a=}, {transpose_b=})")
        if a.dtype != b.dtype:
            raise TypeError(f"a is {a.dtype} and b is {b.dtype}; one dtype is needed")
        shapes = {"bias": (*a.shape[:-2], n), "residual": (*a.shape[:-2], m, n)}
        left, dtypes = list(added), {}
        for name, shape in shapes.items():
            if left and left[0].shape == shape:
                dtypes[name] = str(left.pop(0).dtype)
        if left:
            wanted = ", then ".join(f"a {name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"after a and b may follow {wanted}, and not {left[0].shape}")
        batch = a.shape[0] if a.ndim == 3 else 1
        return cls(
            m=m,
            n=n,
            k=k,
            dtype=str(a.dtype),
            batch=batch,
            out_dtype=out_dtype and str(jnp.dtype(out_dtype)),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            precision=precision,
            activation=activation or "",
            split_sizes=split_sizes,
            **dtypes,
        )

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """`a` and `b`, then the bias and the residual, as far as the problem has them."""
        a = (self.k, self.m) if self.transpose_a else (self.m, self.k)
        b = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        shapes = ((self.dtype, a), (self.dtype, b), (self.bias, (self.n,)), (self.residual, (self.m, self.n)))
        lead = (self.batch,) if self.batch > 1 else ()
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(dtype)) for dtype, shape in shapes if dtype)

    def named(self, args: Sequence[Any]) -> Operands:
        """What belongs to the operands, in the order of `operands`, by name."""
        a, b, *rest = args
        return Operands(a, b, rest[0] if self.bias else None, rest[-1] if self.residual else None)

    @property
    def plain(self) -> MatmulProblem:
        """The product alone, without an epilogue."""
        return dataclasses.replace(self, bias="", activation="", residual="")

    @property
    def joined(self) -> MatmulProblem:
        """The same product with all columns in one array."""
        return dataclasses.replace(self, split_sizes="")

    @property
    def unrounded(self) -> MatmulProblem:
        """The accumulators in float32, in one array, for an epilogue that is applied elsewhere."""
        return dataclasses.replace(self.plain.joined, out_dtype="float32")

    @property
    def fused(self) -> bool:
        """Whether the product has an epilogue."""
        return bool(self.bias or self.activation or self.residual)

    @property
    def columns(self) -> tuple[int, ...]:
        """Of each result, as they lie side by side."""
        return several_results.numbers(self.split_sizes) if self.split_sizes else (self.n,)

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """All columns in one array."""
        lead = (self.batch,) if self.batch > 1 else ()
        return jax.ShapeDtypeStruct((*lead, self.m, self.n), jnp.dtype(self.out_dtype or self.dtype))

    @property
    def results_start(self) -> int:
        """The largest number of columns of which all results but the first start at a multiple; 0 of a single one."""
        return math.gcd(*self.columns[:-1])

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        if not self.split_sizes:
            return self.whole
        *rows, _ = self.whole.shape
        return tuple(jax.ShapeDtypeStruct((*rows, n), self.whole.dtype) for n in self.columns)

    def cut(self, whole: Any) -> Any:
        """The results, as `result` has them, of an array of all columns."""
        return several_results.cut(whole, self.columns) if self.split_sizes else whole

    @property
    def acc_dtype(self) -> Any:
        """Of accumulators."""
        return jnp.dtype(jnp.int32 if self.dtype == "int8" else jnp.float32)

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        """As `jax.lax.dot_general` wants them."""
        lead = 1 if self.batch > 1 else 0
        contract = ((lead + (0 if self.transpose_a else 1),), (lead + (1 if self.transpose_b else 0),))
        batch = (tuple(range(lead)), tuple(range(lead)))
        return contract, batch

    @property
    def lax_precision(self) -> lax.Precision:
        return lax.Precision(self.precision)

    def reference(self, *args: jax.Array) -> Arrays:
        """In float32, in which sums of integers are exact up to 2^24: those of `inputs` and `special_inputs` are."""
        a, b = (x.astype(jnp.float32) for x in args[:2])
        acc = lax.dot_general(a, b, self.dimension_numbers, precision=lax.Precision.HIGHEST)
        acc = acc.astype(jnp.int32) if self.out_dtype == "int32" else acc
        return self.cut(self.apply_epilogue(acc, args))

    def apply_epilogue(self, acc: jax.Array, args: Sequence[jax.Array]) -> jax.Array:
        """The epilogue of accumulators ``[batch, m, n]``, in their dtype, with what the whole operands `args` add."""
        _, _, bias, residual = self.named(args)
        rows = None if bias is None else as_rows(bias, acc.ndim)
        return epilogue.apply(acc, bias=rows, activation=self.activation, residual=residual)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Standard normal; with an epilogue `a` is scaled so that the accumulators are standard normal, too.

        It is near zero that activations differ, and that a bias and a residual of this size are not lost in them.
        """
        a, *others = super().inputs(seed)
        return (scaled(a, self.k**-0.5) if self.fused else a), *others

    def special(self) -> tuple[str, ...]:
        """All kinds, but no infinities in float32: kernels may multiply it as sums of narrower parts, which are NaN."""
        kinds = special_values.kinds_of([jnp.dtype(self.dtype)])
        return tuple(kind for kind in kinds if self.dtype != "float32" or not kind.endswith("inf"))

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Integers take their extremes; so that sums are exact, only one factor of a product does."""
        if self.dtype != "int8":
            return super().special_inputs(kind, seed)
        a, b = self.inputs(seed)
        return *special_values.altered((a,), kind), b

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Of errors that `tolerance` has beside results of several standard deviations, of which it names six.

        Sums of 8-bit floats are truncated at each step (0.67 % of the largest was measured on an H100, k = 1024), which
        adds up where all products have one sign.
        """
        exact = self.out_dtype == "int32"
        deviation = (1.0 if self.fused else self.k**0.5) * (1 if self.dtype.startswith("float8") else 4)
        one = self.tolerance() if exact else in_proportion(self.tolerance(), deviation)
        return (one,) * len(self.results())

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[MatmulProblem, TakeRows]:
        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            a, b, bias, residual = self.named(args)
            a = jnp.take(a, rows, axis=-1 if self.transpose_a else -2)
            residual = None if residual is None else jnp.take(residual, rows, axis=-2)
            return tuple(x for x in (a, b, bias, residual) if x is not None)

        return dataclasses.replace(self, m=len(rows)), take

    def neighbour(self) -> MatmulProblem | None:
        def odd_below(extent: int, less: int) -> int:
            return (extent - less) // 2 * 2 - 1 if extent > 8 else extent

        # Different steps down, so that no axis passes for another; of several results the last one's columns.
        *others, last = self.columns
        columns = (*others, odd_below(last, 2))
        below = dataclasses.replace(
            self,
            m=odd_below(self.m, 0),
            n=sum(columns),
            k=odd_below(self.k, 4),
            split_sizes=self.split_sizes and several_results.spelled(columns),
        )
        return None if below == self else below

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def library_bytes_moved(self) -> float:
        """One kernel writes accumulators for another, which does the epilogue; or a product, which is cut by copies.

        A residual alone cuBLAS may add itself (its beta).
        """
        if self.bias or self.activation:
            return self.bytes_moved + self._accumulators_moved
        return self.bytes_moved + 2.0 * (nbytes(self.whole) if self.split_sizes else 0)

    @property
    def library_bytes_unsure(self) -> float:
        """With a residual alone XLA took as long on an H200 as without, or longer by an epilogue of its own."""
        return self._accumulators_moved if self.residual and not (self.bias or self.activation) else 0.0

    @property
    def _accumulators_moved(self) -> float:
        """Bytes of all that are written by one kernel and read by the next."""
        return 2.0 * jnp.dtype(self.acc_dtype).itemsize * self.batch * self.m * self.n

    @property
    def arithmetic(self) -> str:
        return (
            {"default": "tf32", "high": "bf16_3x", "highest": "float32"}[self.precision]
            if self.dtype == "float32"
            else self.dtype
        )

    def tolerance(self) -> Tolerance:
        """Rounding of the result, plus that of products and of accumulation, which grows with k.

        Operands are standard normal, so the accumulators' standard deviation is sqrt(k), or 1 where `inputs` says so,
        and 16 M elements stay within 6 of them. A product of TF32 operands is off by up to 2^-10 of itself, and those
        errors add like a random walk. Tensor cores truncate: each of the k / 16 additions of an instruction drops up to
        2^-22 of the accumulator. An activation is nowhere steeper than 1.13, and the fast exponential and quotient of
        GPUs leave some 2^-21 of it. Hopper accumulates 8-bit floats with some 14 bits (DeepSeek-V3, arXiv:2412.19437,
        3.3.2), of 32 products each. Those of int8 are exact.
        """
        if self.out_dtype == "int32":
            return Tolerance(absolute=0.0, relative=0.0)
        out = float(jnp.finfo(self.whole.dtype).eps)
        product = {"tf32": 2.0**-10, "bf16_3x": 2.0**-16}.get(self.arithmetic, 0.0)
        accumulation = max(1.0, self.k / 16) * 2.0**-22
        if self.dtype.startswith("float8"):
            accumulation = max(1.0, self.k / 32) * 2.0**-14
        elif self.dtype == "int8":
            accumulation = 0.0
        deviation = 1.0 if self.fused else self.k**0.5
        slope, curve = (1.13, 2.0**-20) if self.activation else (1.0, 0.0)
        absolute = 6 * deviation * (slope * (product + accumulation) + curve)
        return Tolerance(absolute=absolute, relative=out)


def in_proportion(tolerance: Tolerance, largest: float) -> Tolerance:
    """What is allowed beside a largest element of `largest`, in proportion to that of special operands."""
    share = max(tolerance.absolute / largest, tolerance.relative)
    return dataclasses.replace(tolerance, absolute=share, scale=PROPORTIONAL)


def as_rows(bias: jax.Array, rank: int) -> jax.Array:
    """``[batch, n]`` as it is added to a result of so many axes, ``[batch, m, n]``: rows may have several."""
    return bias.reshape(*bias.shape[:-1], *(1,) * (rank - bias.ndim), bias.shape[-1])
