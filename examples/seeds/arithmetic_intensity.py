"""Arithmetic intensity: what tiles buy, why BK buys nothing, and why blocks are walked in groups.

    python examples/seeds/arithmetic_intensity.py [--hardware a100] [--plot order.svg]

Every figure is asked of the teaching kernel's footprint (`teaching_matmul.py`) by the cost model; no formula is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from example_options import arguments, save
from teaching_matmul import Blocks, TeachingMatmul

from scheduler.core.hardware import Hardware
from scheduler.inspect.plots import style
from scheduler.model.cost import Constants, arithmetic_intensity
from scheduler.model.traffic import Traffic, block_loads, traffic
from search_spaces import Columns, Footprint
from search_spaces.matmul import MatmulProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBLEM = MatmulProblem(m=1024, n=1024, k=2048)
SIDES = (1, 16, 32, 64, 128, 256)
# Blocks of the result along each axis, as in the drawing of the documents: each needs as many steps of k.
NINE = MatmulProblem(m=9 * 128, n=9 * 128, k=9 * 64)


def footprint(problem: MatmulProblem, chip: Hardware, blocks: Sequence[Blocks]) -> Footprint:
    """What a launch of each of `blocks` demands, also of those that no space would offer (a block of one result)."""
    return TeachingMatmul().footprint(problem, Columns.of(list(blocks)), chip.target)


@dataclasses.dataclass(frozen=True)
class Intensity:
    """One block size.

    Attributes:
      flops_per_byte: arithmetic intensity of a step.
      peak_share: of the chip's peak that loads from device memory alone allow (roofline).
      onchip_bytes: of one block.
      reuse: how often a loaded number is used, over a block of one result.
    """

    blocks: Blocks
    flops_per_byte: float
    peak_share: float
    onchip_bytes: int
    reuse: float


def intensities(chip: Hardware, blocks: Sequence[Blocks], problem: MatmulProblem = PROBLEM) -> list[Intensity]:
    demand = footprint(problem, chip, [Blocks(1, 1, 1), *blocks])
    ai, loaded = arithmetic_intensity(demand), loads_of(demand, chip).cache_bytes
    onchip = np.broadcast_to(demand.onchip_bytes, ai.shape)
    return [
        Intensity(
            one,
            float(ai[i]),
            min(1.0, float(ai[i]) / chip.ridge(problem.arithmetic)),
            int(onchip[i]),
            float(loaded[0] / loaded[i]),
        )
        for i, one in enumerate(blocks, start=1)
    ]


def loads_of(demand: Footprint, chip: Hardware) -> Traffic:
    return traffic(demand, chip, Constants().l2_share)


def blocks_loaded(chip: Hardware, group: int, results: int = 9) -> int:
    """Blocks of A and B that the first `results` blocks of 9 x 9 need, those that several of them need counted once."""
    demand = footprint(NINE, chip, [Blocks(128, 128, 64, group)])
    steps = float(np.asarray(demand.steps).item())
    return round(steps * sum(float(distinct[0]) for distinct in block_loads(demand, results)))


def main(argv: list[str] | None = None) -> None:
    told = arguments(__doc__, argv)
    chip: Hardware = told.hardware
    print(f"{chip.kind}: {chip.ridge(PROBLEM.arithmetic):.0f} FLOP for each byte of device memory, in {PROBLEM.dtype}")

    print("\nBM = BN     FLOP/B   of the peak   each number is used")
    for row in intensities(chip, [Blocks(side, side, min(side, 64)) for side in SIDES]):
        print(f"{row.blocks.block_m:7} {row.flops_per_byte:10.1f} {row.peak_share:13.1%} {row.reuse:13.0f} times")

    print("\nBK of blocks of 128 x 128: the intensity stays, on-chip memory grows")
    for row in intensities(chip, [Blocks(128, 128, block_k) for block_k in (16, 32, 64, 128)]):
        print(f"{row.blocks.block_k:7} {row.flops_per_byte:10.1f} FLOP/B {row.onchip_bytes / 1024:8.0f} KiB")

    rows, grouped = blocks_loaded(chip, group=1), blocks_loaded(chip, group=3)
    print(f"\nthe first 9 of 9 x 9 results load {rows} blocks row by row, {grouped} in groups of 3 rows")

    large = MatmulProblem(m=16384, n=16384, k=4096)
    moved = loads_of(footprint(large, chip, [Blocks(128, 128, 64, group) for group in (1, 8)]), chip)
    by_rows, by_groups = (moved.memory_bytes / 1e9).tolist()
    print(f"of {large} device memory delivers {by_rows:.1f} GB row by row, {by_groups:.1f} GB in groups of 8 rows")
    if told.plot:
        save(drawn(chip, dark=told.dark), told.plot)


def drawn(chip: Hardware, *, dark: bool = False) -> Figure:
    """Which blocks of A and B the first nine results need, row by row and in groups."""
    with style.drawing(dark) as look:
        from matplotlib.patches import Rectangle

        figure = style.figure("Nine results of 9 x 9: blocks that must be loaded", look)
        axes = figure.subplots(2, 3)
        for row, group in zip(axes, (1, 3), strict=True):
            demand = footprint(NINE, chip, [Blocks(128, 128, 64, group)])
            a_rows, b_columns = (round(float(distinct[0])) for distinct in block_loads(demand, 9))
            order = "row by row" if group == 1 else f"in groups of {group} rows"
            needed = np.zeros((3, 9, 9))
            needed[0, :a_rows], needed[1, :, :b_columns], needed[2, :a_rows, :b_columns] = 1, 1, 2
            counts = (f"A: {int(needed[0].sum())} blocks", f"B: {int(needed[1].sum())} blocks", f"C {order}")
            for axis, blocks, title in zip(row, needed, counts, strict=True):
                for (i, j), kind in np.ndenumerate(blocks):
                    colour = (look.grid, look.xla, look.ours)[int(kind)]
                    axis.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor=look.ground, linewidth=1.5))
                axis.set(xlim=(0, 9), ylim=(9, 0), aspect="equal", xticks=[], yticks=[])
                axis.set_title(title)
                for spine in axis.spines.values():
                    spine.set_visible(False)
            row[1].set_xlabel(f"together {blocks_loaded(chip, group)} blocks", color=look.faint)
    return figure


if __name__ == "__main__":
    main()
