"""The scaled matmul problem: narrow operands with scales by rows, or by blocks of 128."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.matmul.problem import MatmulProblem, in_proportion
from search_spaces.problem import Problem, TakeRows, Tolerance

DTYPES = ("float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float16", "float32")
SCALES = ("blocks", "rows")
# Extent of k, and of rows of b^T, that shares a scale.
BLOCK = 128
# The largest scale that `inputs` draws, and the inverse of the smallest.
LARGEST_SCALE = 2.0


@dataclasses.dataclass(frozen=True)
class ScaledMatmulProblem(Problem):
    """``c[m, n] = (a * scale of a)[m, k] @ (b * scale of b)[k, n]``, accumulated in float32 and rounded once.

    Attributes:
      m, n, k: extents, at least 1.
      dtype: of both operands. Their scales are float32.
      out_dtype: of the result.
      transpose_b: `b` is stored ``[n, k]``, and its scales likewise.
      a_scales: "blocks", one for each row and block of 128 along k, ``[m, ceil(k / 128)]``; or "rows", ``[m]``.
      b_scales: "blocks", one for each block of 128 x 128, ``[ceil(k / 128), ceil(n / 128)]``; or "rows", one for each
        column of the result, ``[n]``.
    """

    m: int
    n: int
    k: int
    dtype: str = "float8_e4m3fn"
    out_dtype: str = "bfloat16"
    transpose_b: bool = False
    a_scales: Literal["blocks", "rows"] = "blocks"
    b_scales: Literal["blocks", "rows"] = "blocks"

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        allowed = {"dtype": DTYPES, "out_dtype": RESULTS, "a_scales": SCALES, "b_scales": SCALES}
        for name, values in allowed.items():
            self._require(name, values)
        super().__post_init__()

    @classmethod
    def of(
        cls, a: Any, b: Any, a_scale: Any, b_scale: Any, *, transpose_b: bool = False, out_dtype: Any = "bfloat16"
    ) -> ScaledMatmulProblem:
        """Builds the problem from operands in the layout of `operands`."""
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1 if transpose_b else 0]:
            raise ValueError(f"a {a.shape} and b {b.shape} are not [m, k] and [k, n] ({transpose_b=})")
        if a.dtype != b.dtype:
            raise TypeError(f"a is {a.dtype} and b is {b.dtype}; one dtype is needed")
        for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
            if scale.dtype != jnp.float32:
                raise TypeError(f"{name} is {scale.dtype}; scales are float32")
        m, k = a.shape
        n = b.shape[0 if transpose_b else 1]
        whole = cls(m, n, k, str(a.dtype), str(jnp.dtype(out_dtype)), transpose_b)
        by_rows = dataclasses.replace(whole, a_scales="rows", b_scales="rows")
        kinds: dict[str, Any] = {}
        for name, scale, index in (("a", a_scale, 2), ("b", b_scale, 3)):
            blocks, rows = whole.operands()[index].shape, by_rows.operands()[index].shape
            if scale.shape not in (blocks, rows):
                raise ValueError(
                    f"{name}_scale {scale.shape} of {name} {(a if name == 'a' else b).shape} is neither {blocks}, one "
                    f"for each block of {BLOCK}, nor {rows}"
                )
            kinds[f"{name}_scales"] = "rows" if scale.shape == rows else "blocks"
        return dataclasses.replace(whole, **kinds)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `a` and `b`, and then their scales."""
        blocks_n, blocks_k = -(-self.n // BLOCK), -(-self.k // BLOCK)
        b, b_blocks = (self.k, self.n), (blocks_k, blocks_n)
        if self.transpose_b:
            b, b_blocks = b[::-1], b_blocks[::-1]
        return (
            jax.ShapeDtypeStruct((self.m, self.k), jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct(b, jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct((self.m, blocks_k) if self.a_scales == "blocks" else (self.m,), jnp.float32),
            jax.ShapeDtypeStruct(b_blocks if self.b_scales == "blocks" else (self.n,), jnp.float32),
        )

    @property
    def matrices(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.operands()[:2]

    @property
    def product(self) -> MatmulProblem:
        """The matmul without scales."""
        return MatmulProblem(self.m, self.n, self.k, self.dtype, out_dtype=self.out_dtype, transpose_b=self.transpose_b)

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), jnp.dtype(self.out_dtype))

    def reference(self, *args: jax.Array) -> jax.Array:
        a, b = self.dequantized((*map(checking.widened, args[:2]), *args[2:]))
        return lax.dot_general(a, b, self.product.dimension_numbers, precision=lax.Precision.HIGHEST)

    def dequantized(self, args: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return dequantized(*args, transpose_b=self.transpose_b)

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal operands, and scales between ``1 / LARGEST_SCALE`` and `LARGEST_SCALE`."""
        a, b, *scales = super().inputs(seed)
        return a, b, *(checking.run_program(_as_scale, x) for x in scales)

    def special(self) -> tuple[str, ...]:
        return checking.PRODUCT_KINDS

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Alters the operands only: scales that map operands to their dtype's range are finite and nonzero."""
        a, b, *scales = self.inputs(seed)
        return *checking.with_special_values((a, b), kind), *scales

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Returns the tolerance of a product of 8-bit floats (see `MatmulProblem.special_tolerance`)."""
        return (in_proportion(self.tolerance(), self.k**0.5),)

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[ScaledMatmulProblem, TakeRows]:
        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            a, b, a_scale, b_scale = args
            return jnp.take(a, rows, axis=0), b, jnp.take(a_scale, rows, axis=0), b_scale

        return dataclasses.replace(self, m=len(rows)), take

    def neighbour(self) -> ScaledMatmulProblem | None:
        below = self.product.neighbour()
        return None if below is None else dataclasses.replace(self, m=below.m, n=below.n, k=below.k)

    @property
    def flops(self) -> float:
        return self.product.flops

    def tolerance(self) -> Tolerance:
        """Returns the rounding error of the result, plus that of accumulation (see `MatmulProblem.tolerance`).

        With scales by blocks, at most one block of products is accumulated with less precision than float32. The
        standard deviation of the sums is at most sqrt(k) times the scales.
        """
        summed = BLOCK if "blocks" in (self.a_scales, self.b_scales) else self.k
        accumulation = max(1.0, summed / 32) * 2.0**-14 + max(1.0, self.k / 16) * 2.0**-22
        deviation = self.k**0.5 * LARGEST_SCALE**2
        return Tolerance(absolute=6 * deviation * accumulation, relative=float(jnp.finfo(self.result().dtype).eps))


def dequantized(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, *, transpose_b: bool
) -> tuple[jax.Array, jax.Array]:
    """Multiplies `a` and `b` by their scales, in float32.

    Args:
      a: ``[..., k]``, with any leading axes. Its scales have the same leading axes, and may have an axis of blocks.
      b, b_scale: as in a problem.
    """
    a, b, a_scale, b_scale = (x.astype(jnp.float32) for x in (a, b, a_scale, b_scale))
    a_factors = a_scale[..., None] if a_scale.ndim < a.ndim else jnp.repeat(a_scale, BLOCK, axis=-1)[..., : a.shape[-1]]
    if b_scale.ndim < b.ndim:
        return a * a_factors, b * (b_scale[:, None] if transpose_b else b_scale)
    rows, columns = b.shape
    return a * a_factors, b * jnp.repeat(jnp.repeat(b_scale, BLOCK, axis=0), BLOCK, axis=1)[:rows, :columns]


@jax.jit
def _as_scale(x: jax.Array) -> jax.Array:
    return jnp.exp2(jnp.clip(x, -1.0, 1.0) * np.log2(LARGEST_SCALE))
