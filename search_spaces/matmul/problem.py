"""The matmul problem: operands, inputs, reference and tolerance, independent of the kernel."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.matmul import epilogue
from search_spaces.problem import PROPORTIONAL, Arrays, Problem, TakeRows, Tolerance, did_you_mean, nbytes, scaled

# ------------------------------------------------------------------------------
# The column counts of a matmul with several results, as text and as numbers, and the split of the columns.


def format_sizes(sizes: Sequence[int] | str) -> str:
    """Formats column counts as in a problem or on a command line, ``"4096+1024+1024"``; returns text unchanged.

    Raises:
      TypeError: the sizes are not integers.
    """
    if isinstance(sizes, str):
        return sizes
    try:
        return "+".join(str(operator.index(size)) for size in sizes)
    except TypeError:
        raise TypeError(f"split_sizes={sizes!r} is no sequence of integers, such as (4096, 1024, 1024)") from None


def split_numbers(text: str) -> tuple[int, ...]:
    """Parses the text that `format_sizes` returns.

    Raises:
      ValueError: a number is not positive, or there is only one.
    """
    each = text.split("+")
    if not all(number.isascii() and number.isdecimal() and int(number) > 0 for number in each):
        raise ValueError(f"split_sizes={text!r} wants the columns of each result, 1 or more, such as 4096+1024+1024")
    if len(each) == 1:
        raise ValueError(f"split_sizes={text} is a single result: leave it out")
    return tuple(map(int, each))


def check_split(sizes: tuple[int, ...], n: int) -> None:
    """Raises a ValueError if the sizes do not add up to `n` columns."""
    if sum(sizes) != n:
        raise ValueError(f"split_sizes={format_sizes(sizes)} adds up to {sum(sizes)} columns, and the product has {n}")


def cut_columns(whole: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Splits the columns of an array into arrays of these sizes."""
    return tuple(lax.split(whole, sizes, axis=whole.ndim - 1))


_FLOATS = ("bfloat16", "float16", "float32")
# Operand dtype -> the dtypes that a result may have. Accumulators of 8-bit products exceed 8 bits: the caller scales
# them, so a matmul does not round them to 8 bits. A sum of five int8 products can exceed the range of float16.
RESULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys((*_FLOATS, "float8_e4m3fn", "float8_e5m2"), _FLOATS) | {"int8": ("int32", "bfloat16", "float32")}
)
DTYPES = tuple(RESULTS)
PRECISIONS: tuple[Literal["default", "high", "highest"], ...] = ("default", "high", "highest")


def rounding(precision: Any) -> Literal["default", "high", "highest"] | None:
    """Converts a precision of `jnp.matmul` to `MatmulProblem.precision`, or to None if only XLA supports it."""
    precision = precision_of(precision)
    if isinstance(precision, tuple | list) and len(precision) == 2 and precision[0] == precision[1]:
        precision = precision[0]
    if not isinstance(precision, str | lax.Precision):
        return None
    known = {lax.Precision(name): name for name in PRECISIONS}
    try:
        return known[lax.Precision(precision)]
    except ValueError:
        return None


def precision_of(precision: Any) -> Any:
    """Returns the precision of a call, or JAX's configured default if the call has none."""
    config: Any = jax.config  # these options are not attributes for a type checker in 0.10
    return (config.jax_default_matmul_precision or "default") if precision is None else precision


class Operands(NamedTuple):
    """One value per operand of a problem, by name; None for a bias or a residual that the problem does not have."""

    a: Any
    b: Any
    bias: Any = None
    residual: Any = None

    def added(self, result: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Returns the bias and the residual that are present, by name, with the shapes that `result` requires."""
        shapes = {"bias": (self.bias, result[-1:] if self.b.ndim > 1 else ()), "residual": (self.residual, result)}
        return {name: (x, shape) for name, (x, shape) in shapes.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class MatmulProblem(Problem):
    """``c[batch, m, n] = activation(a[batch, m, k] @ b[batch, k, n] + bias[batch, 1, n]) + residual[batch, m, n]``.

    The accumulators and the epilogue are in float32; only the result is rounded. Products of int8 are accumulated in
    int32. Products of 8-bit operands have no epilogue.

    Attributes:
      m, n, k: extents, at least 1. The batch axis exists only if `batch` is above 1.
      dtype: of both operands.
      batch: number of independent products in one call.
      out_dtype: of the result, one of `RESULTS`; "" means `dtype`, and is not allowed for 8-bit operands.
      transpose_a: `a` is stored ``[batch, k, m]``.
      transpose_b: `b` is stored ``[batch, n, k]``.
      precision: how far float32 operands may be rounded: "default" allows TF32 where the hardware has it, "high" three
        bfloat16 passes, "highest" no rounding. Always "default" for narrower operands: their products are exact in
        float32.
      bias: dtype of the bias, stored ``[batch, n]``; "" means none.
      activation: a name in `epilogue.ACTIVATIONS`; "" means none.
      residual: dtype of the residual, stored like the result; "" means none.
      split_sizes: number of columns of each result, such as "4096+1024+1024", if the columns are split into several
        arrays; "" means one array. It excludes a residual, which would have to be split as well.
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
    # Whether tiles start at any row of an array, as those of groups of rows do.
    starts_at_any_row: ClassVar[bool] = False

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
        # Each problem has one spelling; otherwise a cache would store it twice.
        if self.split_sizes:
            sizes = split_numbers(self.split_sizes)
            check_split(sizes, self.n)
            object.__setattr__(self, "split_sizes", format_sizes(sizes))
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
        """Builds the problem from operands in the layout of `operands`.

        A bias, a residual or both follow `a` and `b`, in this order.
        """
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
        """Returns `a` and `b`, then the bias and the residual if the problem has them."""
        a = (self.k, self.m) if self.transpose_a else (self.m, self.k)
        b = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        shapes = ((self.dtype, a), (self.dtype, b), (self.bias, (self.n,)), (self.residual, (self.m, self.n)))
        lead = (self.batch,) if self.batch > 1 else ()
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(dtype)) for dtype, shape in shapes if dtype)

    def named(self, args: Sequence[Any]) -> Operands:
        """Names values that are given in the order of `operands`."""
        a, b, *rest = args
        return Operands(a, b, rest[0] if self.bias else None, rest[-1] if self.residual else None)

    @property
    def batched(self) -> tuple[bool, bool]:
        """Whether `a` and `b` have a batch axis."""
        return self.batch > 1, self.batch > 1

    @property
    def plain(self) -> MatmulProblem:
        """The matmul without its epilogue."""
        return dataclasses.replace(self, bias="", activation="", residual="")

    @property
    def joined(self) -> MatmulProblem:
        """The same matmul with all columns in one array."""
        return dataclasses.replace(self, split_sizes="")

    @property
    def unrounded(self) -> MatmulProblem:
        """The matmul that returns its float32 accumulators in one array, for an epilogue that is applied elsewhere."""
        return dataclasses.replace(self.plain.joined, out_dtype="float32")

    @property
    def fused(self) -> bool:
        """Whether the matmul has an epilogue."""
        return bool(self.bias or self.activation or self.residual)

    @property
    def columns(self) -> tuple[int, ...]:
        """The number of columns of each result."""
        return split_numbers(self.split_sizes) if self.split_sizes else (self.n,)

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """The result with all columns in one array."""
        lead = (self.batch,) if self.batch > 1 else ()
        return jax.ShapeDtypeStruct((*lead, self.m, self.n), jnp.dtype(self.out_dtype or self.dtype))

    @property
    def results_start(self) -> int:
        """The largest number of columns that divides the start of every result but the first; 0 for a single result."""
        return math.gcd(*self.columns[:-1])

    def result(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        if not self.split_sizes:
            return self.whole
        *rows, _ = self.whole.shape
        return tuple(jax.ShapeDtypeStruct((*rows, n), self.whole.dtype) for n in self.columns)

    def cut(self, whole: Any) -> Any:
        """Splits an array of all columns into the results, as in `result`."""
        return cut_columns(whole, self.columns) if self.split_sizes else whole

    @property
    def matrices(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.operands()[:2]

    @property
    def acc_dtype(self) -> Any:
        """Dtype of the accumulators."""
        return jnp.dtype(jnp.int32 if self.dtype == "int8" else jnp.float32)

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        """The `dimension_numbers` of `jax.lax.dot_general`."""
        lead = 1 if self.batch > 1 else 0
        contract = ((lead + (0 if self.transpose_a else 1),), (lead + (1 if self.transpose_b else 0),))
        batch = (tuple(range(lead)), tuple(range(lead)))
        return contract, batch

    @property
    def lax_precision(self) -> lax.Precision:
        return lax.Precision(self.precision)

    def reference(self, *args: jax.Array) -> Arrays:
        """Computes in float32, where integer sums are exact up to 2^24.

        The sums of `inputs` and `special_inputs` stay below that.
        """
        a, b = map(checking.widened, args[:2])
        acc = lax.dot_general(a, b, self.dimension_numbers, precision=lax.Precision.HIGHEST)
        acc = acc.astype(jnp.int32) if self.out_dtype == "int32" else acc
        return self.cut(self.apply_epilogue(acc, args))

    def apply_epilogue(self, acc: jax.Array, args: Sequence[jax.Array]) -> jax.Array:
        """Applies the epilogue to accumulators ``[batch, m, n]``, in their dtype; `args` are all operands."""
        _, _, bias, residual = self.named(args)
        rows = None if bias is None else as_rows(bias, acc.ndim)
        return epilogue.apply(acc, bias=rows, activation=self.activation, residual=residual)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal inputs.

        With an epilogue `a` is scaled so that the accumulators are standard normal too.

        Activations differ from each other near zero, and a bias and a residual of this size are not lost in such
        accumulators.
        """
        a, *others = super().inputs(seed)
        return (scaled(a, self.k**-0.5) if self.fused else a), *others

    def special(self) -> tuple[str, ...]:
        """Returns all kinds for products, but no infinities for float32.

        Kernels may multiply float32 as a sum of narrower parts, which turns infinities into NaN.
        """
        kinds = checking.kinds_of([jnp.dtype(self.dtype)])
        kinds = tuple(kind for kind in kinds if kind in checking.PRODUCT_KINDS)
        return tuple(kind for kind in kinds if self.dtype != "float32" or not kind.endswith("inf"))

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Sets integers to their extremes, in one factor of each product only, so that sums are exact."""
        if self.dtype != "int8":
            return super().special_inputs(kind, seed)
        a, b = self.inputs(seed)
        return *checking.with_special_values((a,), kind), b

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Returns a tolerance in proportion to the results, for results that are several standard deviations large.

        `tolerance` allows its errors for results of up to six standard deviations. Sums of 8-bit floats are truncated
        at each step (0.67 % of the largest was measured on an H100, k = 1024), which accumulates if all products have
        the same sign.
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

        # Each axis shrinks by a different step, so that no two axes are confused. Of several results only the last one
        # shrinks.
        *others, last = self.columns
        columns = (*others, odd_below(last, 2))
        below = dataclasses.replace(
            self,
            m=odd_below(self.m, 0),
            n=sum(columns),
            k=odd_below(self.k, 4),
            split_sizes=self.split_sizes and format_sizes(columns),
        )
        return None if below == self else below

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def library_bytes_moved(self) -> float:
        """Counts the accumulators that one kernel writes for an epilogue kernel, or the copies that split a product.

        cuBLAS can add a residual alone itself (its beta). With ``precision="high"``, XLA writes both halves of each
        operand, and adds the accumulators of three products: five products on an H200 took 1.03 to 1.4 times as long as
        these bytes predict, and 1.3 to 2.8 times as long as is predicted without them.
        """
        if self.precision == "high":
            halves = sum(map(nbytes, self.operands()[:2]))
            return self.bytes_moved + 2.0 * halves + 3.0 * self._accumulators_moved
        if self.bias or self.activation:
            return self.bytes_moved + self._accumulators_moved
        return self.bytes_moved + 2.0 * (nbytes(self.whole) if self.split_sizes else 0)

    @property
    def library_bytes_unsure(self) -> float:
        """With a residual alone, XLA took as long on an H200 as without, or longer by a separate epilogue."""
        return self._accumulators_moved if self.residual and not (self.bias or self.activation) else 0.0

    @property
    def _accumulators_moved(self) -> float:
        """Bytes of accumulators that one kernel writes and the next one reads."""
        return 2.0 * jnp.dtype(self.acc_dtype).itemsize * self.batch * self.m * self.n

    @property
    def arithmetic(self) -> str:
        return (
            {"default": "tf32", "high": "bf16_3x", "highest": "float32"}[self.precision]
            if self.dtype == "float32"
            else self.dtype
        )

    def tolerance(self) -> Tolerance:
        """Returns the rounding error of the result, plus that of products and of accumulation, which grows with k.

        Operands are standard normal, so the accumulators have the standard deviation sqrt(k), or 1 if `inputs` scales
        `a`, and 16 M elements stay within 6 standard deviations. A product of TF32 operands has a relative error of up
        to 2^-10, and these errors add like a random walk. Tensor cores truncate: each of the k / 16 additions of an
        instruction drops up to 2^-22 of the accumulator. The slope of an activation is at most 1.13, and the fast
        exponential and quotient of GPUs have a relative error of about 2^-21. Hopper accumulates 8-bit floats with
        about 14 bits (DeepSeek-V3, arXiv:2412.19437, 3.3.2), 32 products at a time. Products of int8 are exact.
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
    """Scales a tolerance for results of up to `largest` in proportion to the results of special operands."""
    share = max(tolerance.absolute / largest, tolerance.relative)
    return dataclasses.replace(tolerance, absolute=share, scale=PROPORTIONAL)


def as_rows(bias: jax.Array, rank: int) -> jax.Array:
    """Reshapes a bias ``[batch, n]`` for addition to a result ``[batch, m, n]`` of this rank; m may be several axes."""
    return bias.reshape(*bias.shape[:-1], *(1,) * (rank - bias.ndim), bias.shape[-1])
