"""The matrix product as a problem: operands, inputs, reference and tolerance, whatever computes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.kernel import Problem, Tolerance

DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("default", "high", "highest")


@dataclasses.dataclass(frozen=True)
class MatmulProblem(Problem):
    """``c[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``, accumulated in float32.

    Attributes:
      m, n, k: extents, at least 1. The batch axis exists only where `batch` is above 1.
      dtype: of both operands.
      batch: independent products in one call.
      out_dtype: of the result; "" is `dtype`.
      transpose_a: `a` is stored ``[batch, k, m]``.
      transpose_b: `b` is stored ``[batch, n, k]``.
      precision: what float32 operands may be rounded to ("default" allows TF32 where the hardware has it, "high" three
        bfloat16 passes, "highest" nothing); always "default" for 16-bit operands, whose products are exact in float32.
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

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name, allowed in (("dtype", DTYPES), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.out_dtype not in ("", *DTYPES):
            raise ValueError(f"out_dtype={self.out_dtype!r} is not one of {', '.join(DTYPES)}")
        # One problem has one spelling, or a cache would hold it twice.
        if self.out_dtype == self.dtype:
            object.__setattr__(self, "out_dtype", "")
        if self.dtype != "float32" and self.precision != "default":
            object.__setattr__(self, "precision", "default")

    @classmethod
    def of(
        cls,
        a: Any,
        b: Any,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        out_dtype: Any = "",
        precision: str = "default",
    ) -> MatmulProblem:
        """From operands in the layout of `operands`."""
        if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[:-2] != b.shape[:-2]:
            raise ValueError(f"a {a.shape} and b {b.shape} are not [m, k] and [k, n], nor batches of one size of these")
        m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
        k_of_b, n = b.shape[-2:][::-1] if transpose_b else b.shape[-2:]
        if k != k_of_b:
            raise ValueError(f"a {a.shape} and b {b.shape} do not multiply ({transpose_a=}, {transpose_b=})")
        if a.dtype != b.dtype:
            raise TypeError(f"a is {a.dtype} and b is {b.dtype}; one dtype is needed")
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
        )

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        lead = (self.batch,) if self.batch > 1 else ()
        a = (self.k, self.m) if self.transpose_a else (self.m, self.k)
        b = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        dtype = jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct((*lead, *a), dtype), jax.ShapeDtypeStruct((*lead, *b), dtype)

    def result(self) -> jax.ShapeDtypeStruct:
        lead = (self.batch,) if self.batch > 1 else ()
        return jax.ShapeDtypeStruct((*lead, self.m, self.n), jnp.dtype(self.out_dtype or self.dtype))

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

    def reference(self, *args: jax.Array) -> jax.Array:
        a, b = (x.astype(jnp.float32) for x in args)
        return lax.dot_general(a, b, self.dimension_numbers, precision=lax.Precision.HIGHEST)

    def neighbour(self) -> MatmulProblem | None:
        def odd_below(extent: int, less: int) -> int:
            return (extent - less) // 2 * 2 - 1 if extent > 8 else extent

        # Different steps down, so that no axis passes for another.
        below = dataclasses.replace(self, m=odd_below(self.m, 0), n=odd_below(self.n, 2), k=odd_below(self.k, 4))
        return None if below == self else below

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def arithmetic(self) -> str:
        return (
            {"default": "tf32", "high": "bf16_3x", "highest": "float32"}[self.precision]
            if self.dtype == "float32"
            else self.dtype
        )

    def tolerance(self) -> Tolerance:
        """Rounding of the result, plus rounding of products and sums that grows with k.

        Operands are standard normal, so the result's standard deviation is sqrt(k) and 16 M elements stay within 6
        of them. A product of TF32 operands is off by up to 2^-10 of itself, and those errors add like a random walk.
        Tensor cores truncate: each of the k / 16 sums of an instruction drops up to 2^-22 of the running sum.
        """
        out = float(jnp.finfo(jnp.dtype(self.out_dtype or self.dtype)).eps)
        product = {"tf32": 2.0**-10, "bf16_3x": 2.0**-16}.get(self.arithmetic, 0.0)
        sums = max(1.0, self.k / 16) * 2.0**-22
        absolute = 6 * self.k**0.5 * (product + sums)
        return Tolerance(absolute=absolute, relative=out)
