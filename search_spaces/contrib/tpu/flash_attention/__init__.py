"""The Mosaic TPU kernel: multiplies a block of queries with blocks of keys, with an online softmax.

Logits are ``[keys, queries]``, with one query per lane. Maxima and sums over keys therefore combine registers, and
statistics scale logits and results without a broadcast along lanes. The result is accumulated as
``[columns, queries]`` and transposed once, at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.attention.problem import SOFTCAP, Lengths
from search_spaces.contrib.tpu.flash_attention import space
from search_spaces.contrib.tpu.flash_attention.space import Rows, TpuFlashAttentionSchedule, footprint, quotient
from search_spaces.contrib.tpu.vmem import limit_or_none
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.space import Columns, Space, cdiv
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The blocks of keys that a block of queries sees, and the visible pairs within a block.


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Visibility of keys in one launch.

    Keys are counted in rows of the arrays of keys. `i` is the index of a block of rows of queries, `j` of keys.
    """

    rows: Rows
    s: TpuFlashAttentionSchedule

    @property
    def masked_everywhere(self) -> bool:
        """Whether each block must be masked, because it has keys of other heads or its end is an operand."""
        return self.rows.per_key > 1 or self.rows.p.kv_lengths

    @property
    def ragged(self) -> bool:
        """Whether the last block of keys reaches beyond the array, where values are undefined."""
        return self.rows.kv_rows % self.s.block_kv_compute != 0

    def first_query(self, i: Any) -> Any:
        return quotient(i * self.s.block_q, self.rows.per_query)

    def last_query(self, i: Any) -> Any:
        return jnp.minimum(quotient((i + 1) * self.s.block_q - 1, self.rows.per_query), self.rows.p.q_len - 1)

    def seen(self, i: Any) -> tuple[Any, Any]:
        """Returns the first row and the end of the rows of keys that any query of the block sees."""
        p, per_key = self.rows.p, self.rows.per_key
        first: Any = 0 if p.left is None else jnp.clip(self.first_query(i) - p.left, 0, p.kv_len) * per_key
        end: Any = p.kv_len if p.right is None else jnp.minimum(self.last_query(i) + p.right + 1, p.kv_len)
        return first, end * per_key

    def seen_by_all(self, i: Any) -> tuple[Any, Any]:
        """Returns the first row and the end of the rows of keys that every query of the block sees."""
        p, per_key = self.rows.p, self.rows.per_key
        first: Any = 0 if p.left is None else jnp.clip(self.last_query(i) - p.left, 0, p.kv_len) * per_key
        end: Any = p.kv_len if p.right is None else jnp.minimum(self.first_query(i) + p.right + 1, p.kv_len)
        return first, end * per_key

    def loops(self, i: Any, j: Any) -> list[tuple[Any, Any, bool]]:
        """Returns the loops over the products of block `j` of keys: first product, end, and whether they are masked.

        The bounds use only products, shifts, minima and maxima of grid indices. If a bound contains another operation
        or an operand, the compiler's cycle estimate assumes that the loop hardly runs.
        """
        p, s = self.rows.p, self.s
        size = s.block_kv_compute
        count, here = s.block_kv // size, j * (s.block_kv // size)

        def within(n: Any) -> Any:
            return jnp.clip(n - here, 0, count)

        first, end = self.seen(i)
        start, stop = within(quotient(first, size)), within(quotient(end + size - 1, size))
        if self.masked_everywhere:
            return [(start, stop, True)]
        if p.left is None and p.right is None and not self.ragged:
            whole = self.rows.kv_rows % s.block_kv == 0
            return [(0, count, False) if whole else (start, stop, False)]
        first, end = self.seen_by_all(i)
        from_all = jnp.clip(within(quotient(first + size - 1, size)), start, stop)
        to_all = jnp.clip(within(quotient(end, size)), from_all, stop)
        before = [] if p.left is None else [(start, from_all, True)]
        return [*before, (from_all, to_all, False), (to_all, stop, True)]

    def block_to_load(self, i: Any, j: Any, kv_length: Any) -> Any:
        """Returns `j`, or the nearest visible block if block `j` is not visible.

        A repeated index does not load the block again.
        """
        p, s = self.rows.p, self.s
        first, end = self.seen(i)
        if kv_length is not None:
            end = jnp.minimum(end, kv_length * self.rows.per_key)
        if p.left is None and p.right is None and kv_length is None:
            return j
        last = quotient(jnp.maximum(end - 1, 0), s.block_kv)
        return jnp.clip(j, jnp.minimum(quotient(first, s.block_kv), last), last)

    def mask(self, i: Any, c: Any, of: Lengths) -> jax.Array:
        """Returns the mask ``bool[block_kv_compute, block_q]`` of the rows of keys from `c` on.

        Bounds on keys are multiplied by `per_key`, and bounds on queries by `per_query`, to compare them with rows.
        """
        p, rows, s = self.rows.p, self.rows, self.s
        end = p.kv_len if of.kv is None else of.kv
        end = (jnp.minimum(end, p.right + 1) if p.right is not None and p.q_len == 1 else end) * rows.per_key
        key = c + lax.broadcasted_iota(jnp.int32, (s.block_kv_compute, 1), 0)
        row = i * s.block_q + lax.broadcasted_iota(jnp.int32, (1, s.block_q), 1)
        shape = (s.block_kv_compute, s.block_q)
        if rows.per_key > 1:
            query = _few(row, rows.per_query, p.q_len)
            head = _few(row - query * rows.per_query, p.group, p.kv_heads)
            # Keys beyond the end get head -1: this test runs once per key instead of once per pair.
            seen = jnp.where(key < end, key & (rows.per_key - 1), -1) == head
            if p.right is not None and p.q_len > 1:
                seen &= key < (query + p.right + 1) * rows.per_key
            if p.left is not None:
                seen &= key >= (query - p.left) * rows.per_key
            return seen
        if p.right is None or p.q_len == 1:
            seen = jnp.broadcast_to(key < end, shape)
        else:  # Keys beyond the end get a bound that no row reaches.
            beyond = jnp.iinfo(jnp.int32).max
            seen = jnp.where(key < end, (key - p.right) * rows.per_query, beyond) <= row
        if p.left is not None:
            seen &= row < (key + p.left + 1) * rows.per_query
        return seen


def _few(x: jax.Array, n: int, most: int) -> jax.Array:
    """Returns ``x // n``, if this is less than `most`."""
    if n & (n - 1) == 0:
        return x >> (n.bit_length() - 1)
    return sum(((x >= times * n).astype(jnp.int32) for times in range(1, most)), jnp.zeros_like(x))


# The value of a masked logit. It is finite, because the difference of two must not be NaN. A row that sees no key keeps
# it as its maximum. At the first visible logit of a row, the rescaling factor is 0 and discards the sum of masked ones.
UNSEEN = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Scaling of products to logits: ``factor * x``; x is the product, or ``tanh(inner * product)`` if capped."""

    factor: float
    inner: float | None = None

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Softmax:
        """Returns the scaling for a non-negative `scale`; maxima are taken before scaling."""
        return cls(scale) if softcap is None else cls(abs(softcap), scale / abs(softcap))

    def capped(self, products: jax.Array) -> jax.Array:
        return products if self.inner is None else jnp.tanh(products * self.inner)

    def exponential(self, difference: jax.Array) -> jax.Array:
        """Returns ``exp(factor * difference)``, for the difference of two x."""
        return jnp.exp2(difference * (self.factor * math.log2(math.e)))


def body(p: FlashAttentionProblem, v: Visibility, softmax: Softmax) -> Callable[..., None]:
    """Returns the kernel body.

    Its grid is (sequences, heads, blocks of queries, blocks of keys). Its references are lengths, operands, results and
    scratch, in this order.
    """
    rows, s = v.rows, v.s
    precision = lax.Precision.HIGHEST if p.dtype == "float32" else None

    def dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
        numbers = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)

    def kernel(*refs: Any) -> None:
        counts, refs = refs[: p.q_lengths + p.kv_lengths], refs[p.q_lengths + p.kv_lengths :]
        q_ref, k_ref, v_ref, out_ref, *lse_ref, most_ref, total_ref, sum_ref = refs
        b, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
        of = p.counted(p.lengths([ref[b] for ref in counts]) if counts else Lengths())

        @pl.when(j == 0)
        def _() -> None:
            most_ref[...] = jnp.full_like(most_ref, UNSEEN)
            total_ref[...] = jnp.zeros_like(total_ref)
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def step(n: Any, masked: bool, ends: bool) -> None:
            some = pl.ds(pl.multiple_of(n * s.block_kv_compute, s.block_kv_compute), s.block_kv_compute)
            first = j * s.block_kv + n * s.block_kv_compute
            x = softmax.capped(dot(k_ref[0, 0, some, :], q_ref[0, 0], (1, 1)))
            values = v_ref[0, 0, some, :]
            if masked:
                x = jnp.where(v.mask(i, first, of), x, UNSEEN)
                if ends:  # Values beyond the array or a length may be NaN, and 0 * NaN is NaN.
                    there = first + lax.broadcasted_iota(jnp.int32, values.shape, 0) < of.kv * rows.per_key
                    values = jnp.where(there, values.astype(jnp.float32), 0.0).astype(values.dtype)
            before = most_ref[...]
            most = jnp.maximum(before, x.max(axis=0, keepdims=True))
            e, rescale = softmax.exponential(x - most), softmax.exponential(before - most)
            most_ref[...] = most
            total_ref[...] = total_ref[...] * rescale + e.sum(axis=0, keepdims=True)
            sum_ref[...] = sum_ref[...] * rescale + dot(values, e.astype(values.dtype), (0, 0))

        def loop(first: Any, end: Any, masked: bool) -> None:
            def guarded(n: Any, _: None) -> None:
                if not p.kv_lengths:
                    step(n, masked, v.ragged or p.pads_keys)
                    return
                end, here = of.kv * rows.per_key, j * s.block_kv + n * s.block_kv_compute
                whole = here + s.block_kv_compute <= end
                pl.when(whole)(lambda: step(n, masked, False))
                # Only the body for a sequence's last block masks values.
                pl.when((here < end) & jnp.logical_not(whole))(lambda: step(n, masked, True))

            if isinstance(end, int) and end == 1:
                guarded(0, None)
            else:
                lax.fori_loop(first, end, guarded, None)

        def loops() -> None:
            for first, end, masked in v.loops(i, j):
                loop(first, end, masked)

        if not p.q_lengths:
            loops()
        else:
            pl.when(v.first_query(i) < of.q)(loops)

        @pl.when(j == pl.num_programs(3) - 1)
        def _() -> None:
            most, total = most_ref[...], total_ref[...]
            # NaN logits must give NaN results, even if the maximum ignores NaN.
            nothing = (most == UNSEEN) & jnp.logical_not(jnp.isnan(total))
            if not p.every_query_sees:
                row = i * s.block_q + lax.broadcasted_iota(jnp.int32, most.shape, 1)
                nothing |= row >= of.q * rows.per_query
            total = jnp.where(nothing, 1.0, total)
            out = jnp.where(nothing, 0.0, sum_ref[...] / total)
            out_ref[0, 0] = out.T.astype(out_ref.dtype)
            for ref in lse_ref:
                ref[0, 0] = jnp.where(nothing, -jnp.inf, most * softmax.factor + jnp.log(total))

    return kernel


# ------------------------------------------------------------------------------
# Flash attention forward on TPUs: the supported problems and the launch.

MOST_HEAD_DIM = 256
# The kernel transposes its result in registers of eight sublanes.
HEAD_DIM_STEP = 8


class MosaicTpuFlashAttention(Kernel[FlashAttentionProblem, TpuFlashAttentionSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if target.platform != "tpu":
            return f"runs on TPUs, not on {target.kind}"
        if p.dtype not in ("bfloat16", "float32"):
            return f"multiplies bfloat16 and float32, not {p.dtype}"
        for name, columns in (("head_dim", p.head_dim), ("head_dim_v", p.value_dim)):
            if columns % HEAD_DIM_STEP:
                return f"needs a {name} that is a multiple of {HEAD_DIM_STEP}, which {columns} is not"
            if columns > MOST_HEAD_DIM:
                return f"needs a {name} of at most {MOST_HEAD_DIM}, which {columns} is not"
        return None

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[TpuFlashAttentionSchedule]:
        return space.space(problem)

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: TpuFlashAttentionSchedule,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        p = problem
        scale = float(p.default_scale() if scale is None else scale)
        q, k, v, *lengths = args
        if scale <= 0:  # The kernel takes maxima before scaling, so the scale must be positive.
            q, scale = q * jnp.sign(jnp.asarray(scale, q.dtype)), abs(scale) or 1.0
        softmax = Softmax.of(scale, float(softcap) if p.softcap else None)
        # Indices must be 32 bits wide, even if the user enables x64.
        with jax.enable_x64(False):
            rows = Rows.of(p, schedule.heads).one()
            launch = jax.jit(functools.partial(_launch, Visibility(rows, schedule), softmax))
            out, *lse = launch(rows.queries(q), rows.keys(k), rows.keys(v), *lengths)
            out = rows.results(out)
            return (out, rows.statistics(lse[0])) if p.return_lse else out


def _launch(v: Visibility, softmax: Softmax, q: Any, keys: Any, values: Any, *lengths: Any) -> tuple[jax.Array, ...]:
    """Launches the kernel on operands and results in the layout of `Rows`, all constrained to HBM.

    Otherwise XLA keeps small arrays in VMEM, in addition to the blocks. The profiler of libtpu 0.0.50 also aborts if
    all operands of a kernel are in VMEM.
    """
    rows, s, p = v.rows, v.s, v.rows.p
    q, keys, values = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (q, keys, values))

    def of_queries(b: Any, n: Any, i: Any, j: Any, *refs: Any) -> Any:
        return b, n, i, 0

    def of_keys(b: Any, n: Any, i: Any, j: Any, *refs: Any) -> Any:
        length = refs[-1][b] if p.kv_lengths else None
        return b, rows.kv_head(n), v.block_to_load(i, j, length), 0

    def of_statistics(b: Any, n: Any, i: Any, j: Any, *refs: Any) -> Any:
        return b, n, 0, i

    shape = (p.batch, rows.heads)
    out = [pltpu.HBM((*shape, q.shape[2], p.value_dim), jnp.dtype(p.dtype))]
    out_specs = [pl.BlockSpec((1, 1, s.block_q, p.value_dim), of_queries)]
    if p.return_lse:
        out.append(pltpu.HBM((*shape, 1, q.shape[2]), jnp.dtype(jnp.float32)))
        out_specs.append(pl.BlockSpec((1, 1, 1, s.block_q), of_statistics))
    call = pl.pallas_call(
        body(p, v, softmax),
        name="flash_attention",
        out_shape=tuple(out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lengths),
            grid=(*shape, cdiv(rows.q_rows, s.block_q), cdiv(rows.kv_rows, s.block_kv)),
            in_specs=[
                pl.BlockSpec((1, 1, s.block_q, p.head_dim), of_queries),
                pl.BlockSpec((1, 1, s.block_kv, p.head_dim), of_keys),
                pl.BlockSpec((1, 1, s.block_kv, p.value_dim), of_keys),
            ],
            out_specs=tuple(out_specs),
            scratch_shapes=[
                pltpu.VMEM((1, s.block_q), jnp.float32),
                pltpu.VMEM((1, s.block_q), jnp.float32),
                pltpu.VMEM((p.value_dim, s.block_q), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=limit_or_none(s.vmem_limit_mib),
        ),
    )
    results: tuple[jax.Array, ...] = tuple(call(*lengths, q, keys, values))
    return results


__all__ = ["MosaicTpuFlashAttention", "TpuFlashAttentionSchedule"]
