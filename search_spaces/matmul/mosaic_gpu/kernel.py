"""The matrix product on Hopper: what it supports, and how one product is launched.

**Split of k.** Where the tiles of a result leave cores idle, blocks share a tile. Two of them, a cluster along k, add
their sums up on chip (exchange.py). For more parts, `split_k` blocks write theirs to places of their own in device
memory, and a second launch adds the parts up, first to last, and finishes the result. Either way the bits are the same
each time. For results of m x n and s parts the latter costs ``4 s m n`` bytes written and as many read (from the
last-level cache, where they fit), and one small launch, in which XLA fuses the sums with what follows: 3 us more than
the exchange for 2048 x 576 x 7168 on an H200. The alternatives:

- Whoever comes last adds up, in the same launch: as many bytes, no second launch; but it needs a counter that tells
  who came last, which Pallas does not offer (its semaphores signal and wait), zeroed before each call.
- Each part waits for the one before it and adds to its sums, by semaphores: half of the bytes, no second launch; but
  the parts finish one after the other, and blocks that wait must all run at once, or none ends.
- Copies that add in device memory (TMA reductions): half of the bytes, but the order is that of arrival, so the bits
  differ from run to run as soon as there are three addends, and a launch must zero the array before.
- Stream-k, where parts end anywhere in k: evens out a last wave, too, at the price of one of the above.

**What follows.** Bias, activation and residual join the sums where these are complete, and before their one rounding:
in the kernel (following.py), or in the launch that adds parts up.

**Ragged rows.** A copy reaches beyond an array's edge at no cost, but Mosaic GPU lays tiles of 8 rows over arrays in
device memory, and its wgmma takes no operand without a swizzle, which has rows of 32 bytes at least. Where an array has
more than 8 rows that are no multiple of 8, or rows that are over 128 bytes long and no multiple of 32, all parts of
arrays lie on chip in another order (parts.py), which copies fill from any rows that start at multiples of 16 bytes.
Operands whose rows do not are copied into padded ones; a result's are written by threads (groups.py), and where parts
of k are added up, that launch cuts the result out of the sums.

JAX 0.10 does not know that order: there each such array is copied into a padded one, and the result out of one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.jax_compat import plgpu
from search_spaces.kernel import Footprint, Kernel, Target
from search_spaces.matmul.mosaic_gpu.exchange import exchange
from search_spaces.matmul.mosaic_gpu.footprint import footprint
from search_spaces.matmul.mosaic_gpu.geometry import Geometry
from search_spaces.matmul.mosaic_gpu.product import product
from search_spaces.matmul.mosaic_gpu.schedule import HopperSchedule
from search_spaces.matmul.mosaic_gpu.space import space
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.space import Columns, Space


class MosaicGpuMatmul(Kernel[MatmulProblem, HopperSchedule]):
    backend = "mosaic_gpu"
    version = 2
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"
        if problem.dtype == "float32" and problem.precision != "default":
            return f"multiplies float32 as TF32, not at precision {problem.precision!r}"
        # wgmma reads other than 16-bit operands in one order only (PTX ISA, asynchronous warpgroup level matrix).
        if jnp.dtype(problem.dtype).itemsize != 2 and (problem.transpose_a or not problem.transpose_b):
            return f"multiplies {problem.dtype} only where k is the last axis of both operands (transpose_b alone)"
        return None

    def space(self, problem: MatmulProblem, target: Target) -> Space[HopperSchedule]:
        return space(problem, target.cores)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules)

    def run(
        self, problem: MatmulProblem, schedule: HopperSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        inside = p if s.split_k == 1 else p.plain  # What follows incomplete sums follows when they are added up.
        g = Geometry(inside, s)
        operands = [_pad(x, extents) for x, extents in zip(args, g.extents, strict=False)]  # in parts: a and b
        pairs = g.pair_m * g.pair_n * g.pair_k
        workers = max(1, min(target.cores // pairs, g.parts * g.rows * g.columns))
        dtype = p.result().dtype if s.split_k == 1 else p.sums_dtype
        lead = (g.parts,) if g.parts > 1 else ()
        shared = exchange(inside, s)
        if shared and workers < g.parts * g.rows * g.columns:
            raise ValueError(f"{s} shares a tile along k between two blocks, for which {p} has too many on {target}")
        mail = shared.in_device_memory(workers) if shared else ()
        kernel = plgpu.kernel(
            product(inside, s),
            out_type=(jax.ShapeDtypeStruct((*lead, *map(int, g.c_extents)), dtype), *mail),
            grid=(workers,),
            grid_names=("worker",),
            cluster=(pairs,),
            cluster_names=("pair",),
            num_threads=g.warpgroups + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            c: jax.Array = kernel(*operands)[0]
        whole = c if g.c_extents == (p.m, p.n) else c[..., : p.m, : p.n]
        return whole if s.split_k == 1 else _sum(p, s, whole, args)


def _sum(p: MatmulProblem, s: HopperSchedule, parts: jax.Array, args: Sequence[jax.Array]) -> jax.Array:
    """The result from the sums ``[split_k * batch, m, n]`` of all parts of k, added up first to last, rounded once."""
    parts = parts.reshape(s.split_k, *p.result().shape)
    total = functools.reduce(operator.add, (parts[part] for part in range(s.split_k)))
    return p.finish(total, args).astype(p.result().dtype)


def _pad(x: jax.Array, extents: tuple[Any, ...]) -> jax.Array:
    """`x` with zeros behind its last axes, up to `extents`."""
    lead = x.ndim - len(extents)
    pads = [(0, 0)] * lead + [(0, int(extent) - size) for extent, size in zip(extents, x.shape[lead:], strict=True)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x
