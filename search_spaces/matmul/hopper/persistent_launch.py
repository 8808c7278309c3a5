"""One launch of persistent CTAs: the number of clusters, the output arrays, and the Pallas call."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from search_spaces.jax_compat import plgpu
from search_spaces.kernel import Target
from search_spaces.matmul.hopper.factors import Gate
from search_spaces.matmul.hopper.kernel import kernel
from search_spaces.matmul.hopper.plan import plan
from search_spaces.matmul.hopper.scales import Scaling
from search_spaces.matmul.hopper.schedule import HopperSchedule
from search_spaces.matmul.hopper.tail_reduction import workspace
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Problem
from search_spaces.space import cdiv


def launched(
    problem: MatmulProblem,
    schedule: HopperSchedule,
    target: Target,
    operands: Sequence[jax.Array],
    *,
    posed: Problem,
    gate: Gate | None = None,
    scaling: Scaling | None = None,
) -> list[jax.Array]:
    """Runs the launch and returns the results ``[..., m, n]``.

    With split-K, returns the accumulators of each split and of each factor, along the first axis.

    Args:
      problem: the matmul that this launch computes: with split-K, that of `posed` without its epilogue.
      operands: in their device memory layout; with a `scaling`, followed by the scales of `a` and of `b`.

    Raises:
      ValueError: two CTAs share each tile along k, and there are more tiles than clusters; or the last wave is split,
        and there are too few clusters or steps for all parts.
    """
    launch = plan(problem, schedule, gate)
    t, reduction = launch.tiling, launch.reduction
    ctas = t.cluster_m * t.cluster_n * t.cluster_k
    clusters = max(1, min(target.cores // ctas, t.tiles))
    if reduction and clusters < t.tiles:
        raise ValueError(
            f"{schedule} shares a tile along k between two CTAs, for which {posed} has too many on {target}"
        )
    if (parts := schedule.tail_split_k) > 1:
        waves, tail = divmod(int(t.tiles), int(clusters))
        before_last_part = (parts - 1) * cdiv(t.steps, parts)
        if not (waves and tail and tail * parts <= clusters and before_last_part + schedule.delay_release < t.steps):
            raise ValueError(
                f"{schedule} splits the last wave of {posed} into {parts} parts on {target}: it has {tail} tiles of "
                f"{t.steps} steps beside {waves} waves of {clusters}"
            )
    dtype = problem.whole.dtype if schedule.split_k == 1 else problem.acc_dtype
    lead = (launch.outputs,) if launch.outputs > 1 else ()
    mailboxes = len(launch.factors) * reduction.mailbox(clusters) if reduction else ()
    run = plgpu.kernel(
        kernel(problem, schedule, gate, scaling),
        out_type=(
            *(jax.ShapeDtypeStruct((*lead, *map(int, each)), dtype) for each in t.c_extents),
            *mailboxes,
            *workspace(launch, clusters),
        ),
        grid=(clusters,),
        grid_names=("cluster_grid",),
        cluster=(ctas,),
        cluster_names=("cluster",),
        num_threads=t.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    # Indices are 32 bits wide, regardless of the user's default.
    with jax.enable_x64(False):
        stored: Sequence[jax.Array] = run(*operands)
    results = zip(stored, t.c_extents, problem.columns, strict=False)  # ignores mailboxes and workspaces
    return [c if extents == (problem.m, n) else c[..., : problem.m, :n] for c, extents, n in results]
