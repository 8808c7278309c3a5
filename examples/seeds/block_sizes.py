"""What block sizes cost: on-chip memory against iterations, of attention in blocks of Br queries and Bc keys.

    python examples/seeds/block_sizes.py [--hardware a100] [--plot sizes.svg] [--tiles tiles.svg]

The table is the footprint of the teaching kernel (`teaching_attention.py`) beside the row of a chip, with the time that
the cost model expects. Small blocks fit and repeat their loads; large ones do not fit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from example_options import arguments, save
from teaching_attention import SIZES, TEACHING_ATTENTION, AttentionBlocks, TeachingAttention

from scheduler.core.hardware import KIB, Hardware
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from scheduler.model.cost import CostModel
from scheduler.model.traffic import block_count
from search_spaces import Columns
from search_spaces.flash_attention import FlashAttentionProblem


def problem_of(length: int, head_dim: int = 64) -> FlashAttentionProblem:
    """One head of one sequence in float16, as the documents count."""
    return FlashAttentionProblem(1, length, length, 1, 1, head_dim, dtype="float16")


@dataclasses.dataclass(frozen=True)
class Size:
    """One pair of block sizes.

    Attributes:
      onchip_bytes: that one block names.
      fits: whether a block of the chip has so many.
      iterations: blocks of queries times blocks of keys.
      predicted_s: of a launch, by the model.
    """

    blocks: AttentionBlocks
    onchip_bytes: int
    fits: bool
    iterations: int
    predicted_s: float


def sizes(chip: Hardware, problem: FlashAttentionProblem, pairs: Sequence[tuple[int, int]]) -> list[Size]:
    blocks = [AttentionBlocks(*pair) for pair in pairs]
    demand = TeachingAttention().footprint(problem, Columns.of(blocks), chip.target)
    iterations, onchip = block_count(demand) * demand.steps, np.asarray(demand.onchip_bytes)
    predicted = CostModel(chip).seconds(demand)
    return [
        Size(one, int(onchip[i]), bool(onchip[i] <= chip.onchip_bytes), round(iterations[i]), float(predicted[i]))
        for i, one in enumerate(blocks)
    ]


def best(found: Sequence[Size]) -> Size:
    """The fastest that fits, by the model."""
    return min((size for size in found if size.fits), key=lambda size: size.predicted_s)


def main(argv: list[str] | None = None) -> None:
    told = arguments(__doc__, argv, drawings={"tiles": "how tiles lie on Q, K and V"})
    chip: Hardware = told.hardware
    problem = problem_of(1024)
    found = sizes(chip, problem, list(itertools.product(SIZES, SIZES)))
    print(f"{problem}; a block of {chip.kind} has {chip.onchip_bytes / KIB:.0f} KiB on chip")
    print("  Br   Bc   on chip, KiB   iterations   predicted, us")
    for size in found:
        time = f"{1e6 * size.predicted_s:15.1f}" if size.fits else "   does not fit"
        br, bc = size.blocks.block_q, size.blocks.block_kv
        print(f"{br:4} {bc:4} {size.onchip_bytes / KIB:14.1f} {size.iterations:12} {time}")
    chosen = best(found).blocks
    print(f"the model would take Br = {chosen.block_q}, Bc = {chosen.block_kv}")

    print("\nBr = Bc   on chip, KiB   iterations: N = 1024    N = 4096")
    square = [(size, size) for size in SIZES]
    for short, long in zip(sizes(chip, problem, square), sizes(chip, problem_of(4096), square), strict=True):
        print(f"{short.blocks.block_q:7} {short.onchip_bytes / KIB:14.1f} {short.iterations:23} {long.iterations:11}")
    case = Case(TEACHING_ATTENTION, problem, chip)
    if told.plot:
        save(plots.block_sizes(case, backend="teaching", dark=told.dark), told.plot)
    if told.tiles:
        save(plots.tiles(case, backend="teaching", dark=told.dark), told.tiles)


if __name__ == "__main__":
    main()
