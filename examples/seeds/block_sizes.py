"""What block sizes cost: on-chip memory against iterations, of attention in blocks of Br queries and Bc keys.

    python examples/seeds/block_sizes.py [--hardware a100] [--plot sizes.svg] [--tiles tiles.svg]

The table is the footprint of the teaching kernel (`teaching_attention.py`) beside the row of a chip, with the time that
the cost model expects. Small blocks fit and repeat their loads; large ones run out of on-chip memory or registers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from example_options import arguments, save
from teaching_attention import SIZES, TEACHING_ATTENTION, AttentionBlocks, TeachingAttention

from scheduler.core.hardware import CPU, KIB, Hardware
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from scheduler.inspect.plots import style
from scheduler.model.cost import CostModel
from scheduler.model.traffic import block_count
from search_spaces import Columns
from search_spaces.flash_attention import FlashAttentionProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def problem_of(length: int, heads: int = 1, head_dim: int = 64) -> FlashAttentionProblem:
    """Some heads of one sequence in float16, as the documents count."""
    return FlashAttentionProblem(1, length, length, heads, heads, head_dim, dtype="float16")


@dataclasses.dataclass(frozen=True)
class Size:
    """One pair of block sizes.

    Attributes:
      named_bytes: of all that a block names, as the documents count on-chip memory and the interpreter takes it.
      onchip_bytes, registers: that one block, and one of its threads, ask the chip for: S and O are in registers.
      limit: what of these the chip does not have, in words; "" where it fits.
      iterations: blocks of queries times blocks of keys.
      predicted_s: of a launch, by the model.
    """

    blocks: AttentionBlocks
    named_bytes: int
    onchip_bytes: int
    registers: int
    limit: str
    iterations: int
    predicted_s: float


def sizes(chip: Hardware, problem: FlashAttentionProblem, pairs: Sequence[tuple[int, int]]) -> list[Size]:
    blocks = [AttentionBlocks(*pair) for pair in pairs]
    named, demand = (TeachingAttention().footprint(problem, Columns.of(blocks), of.target) for of in (CPU, chip))
    iterations, predicted = block_count(demand) * demand.steps, CostModel(chip).seconds(demand)
    columns = (np.asarray(column).tolist() for column in (named.onchip_bytes, demand.onchip_bytes, demand.registers))
    return [
        Size(one, *asked, _limit(chip, *asked[1:]), round(iterations[i]), float(predicted[i]))
        for i, (one, *asked) in enumerate(zip(blocks, *columns, strict=True))
    ]


def _limit(chip: Hardware, onchip_bytes: int, registers: int) -> str:
    if onchip_bytes > chip.onchip_bytes:
        return "does not fit on chip"
    return "spills registers" if registers > chip.registers_per_thread else ""


def best(found: Sequence[Size]) -> Size:
    """The fastest that fits, by the model."""
    return min((size for size in found if not size.limit), key=lambda size: size.predicted_s)


def main(argv: list[str] | None = None) -> None:
    told = arguments(__doc__, argv, drawings={"tiles": "how tiles lie on Q, K and V"})
    chip: Hardware = told.hardware
    problem = problem_of(1024)
    pairs = list(itertools.product(SIZES, SIZES))
    found = sizes(chip, problem, pairs)
    print(f"{problem}; a block of {chip.kind} has {chip.onchip_bytes / KIB:.0f} KiB on chip")
    print("  Br   Bc   named, KiB   on chip, KiB   registers   iterations   predicted, us")
    for size in found:
        br, bc = size.blocks.block_q, size.blocks.block_kv
        memory = f"{size.named_bytes / KIB:12.1f} {size.onchip_bytes / KIB:14.1f}"
        time = size.limit or f"{1e6 * size.predicted_s:.1f}"
        print(f"{br:4} {bc:4} {memory} {size.registers:11} {size.iterations:12} {time:>15}")
    for heads in (1, 12, 96):
        chosen = best(sizes(chip, problem_of(1024, heads), pairs)).blocks
        many = f"{heads} head{'s' * (heads > 1)}"
        print(f"for {many} the model would take Br = {chosen.block_q}, Bc = {chosen.block_kv}")

    print("\nBr = Bc   named, KiB   iterations: N = 1024    N = 4096")
    square = [(size, size) for size in SIZES]
    for short, long in zip(sizes(chip, problem, square), sizes(chip, problem_of(4096), square), strict=True):
        print(f"{short.blocks.block_q:7} {short.named_bytes / KIB:12.1f} {short.iterations:23} {long.iterations:11}")
    if told.plot:
        case = Case(TEACHING_ATTENTION, problem_of(1024, heads=96), chip)
        save(plots.block_sizes(case, backend="teaching", dark=told.dark), told.plot)
    if told.tiles:
        save(tiling(problem_of(256), AttentionBlocks(64, 64), chip, dark=told.dark), told.tiles)


def tiling(problem: FlashAttentionProblem, blocks: AttentionBlocks, chip: Hardware, *, dark: bool = False) -> Figure:
    """The blocks of Q, of K transposed and of S = Q K^T, and which of them one step of the inner loop meets."""
    demand = TeachingAttention().footprint(problem, Columns.of([blocks]), chip.target)
    rows, columns = int(block_count(demand).item()), int(np.asarray(demand.steps).item())
    panels = (
        ("Q", rows, 1, blocks.block_q, problem.head_dim, "outer loop:\none row of\nblocks each"),
        ("K^T", 1, columns, problem.head_dim, blocks.block_kv, "inner loop:\none column of blocks a step"),
        ("S = Q K^T", rows, columns, blocks.block_q, blocks.block_kv, "on chip:\none block at a time"),
    )
    ratios = [max(across * width, 96) for _, _, across, _, width, _ in panels]
    with style.drawing(dark) as look:
        from matplotlib.patches import Rectangle

        figure = style.figure(f"Q, K and S in blocks of {blocks.block_q} x {blocks.block_kv}", look)
        for axes, (name, down, across, height, width, how) in zip(
            figure.subplots(1, 3, width_ratios=ratios), panels, strict=True
        ):
            for i, j in np.ndindex(down, across):
                met = i == min(1, down - 1) and j == min(2, across - 1)  # in one step: the second row, the third column
                corner = (j * width, i * height)
                face = look.ours if met else look.grid
                axes.add_patch(Rectangle(corner, width, height, facecolor=face, edgecolor=look.ground, linewidth=2))
                label = "".join(str(n + 1) for n, many in ((i, down), (j, across)) if many > 1)
                axes.text(
                    corner[0] + width / 2,
                    corner[1] + height / 2,
                    f"{name[0]}{label}",
                    ha="center",
                    va="center",
                    color=look.ground if met else look.ink,
                )
            axes.set(xlim=(0, across * width), ylim=(down * height, 0), aspect="equal", xlabel=how)
            axes.set(xticks=[0, across * width], yticks=[0, down * height])
            axes.set_anchor("N")
            axes.set_title(f"{name}: {down * height} x {across * width}")
    return figure


if __name__ == "__main__":
    main()
