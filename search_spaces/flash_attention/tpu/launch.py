"""Flash attention forward on TPUs: the supported problems and the launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention.tpu.footprint import footprint
from search_spaces.flash_attention.tpu.kernel import Softmax, body
from search_spaces.flash_attention.tpu.rows import Rows
from search_spaces.flash_attention.tpu.schedule import TpuFlashAttentionSchedule
from search_spaces.flash_attention.tpu.space import space
from search_spaces.flash_attention.tpu.visibility import Visibility
from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target
from search_spaces.space import Columns, Space, cdiv
from search_spaces.tpu.vmem import limit_or_none

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
        return space(problem)

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
