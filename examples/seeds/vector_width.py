"""Vector width and bandwidth: SiLU-and-mul over d, rows that vectors do not divide, and what coalescing is worth.

    python examples/seeds/vector_width.py [--hardware h200] [--plot bandwidth.svg]

Widths, sectors and times are those of the shipped kernel (`search_spaces/rows/hopper/registers.py`) by its footprint
and the cost model; where a Hopper GPU is here, times are measured as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np
import numpy.typing as npt
from example_options import arguments, is_here, require, save

from scheduler import tuned_silu_and_mul
from scheduler.core.hardware import Hardware, detect
from scheduler.inspect.explain import explain
from scheduler.inspect.plots import style
from scheduler.measure import timer
from scheduler.model.constants import model_of
from scheduler.model.traffic import block_count
from search_spaces import Columns
from search_spaces.rows.formulas import SILU_AND_MUL, SiluAndMulProblem
from search_spaces.rows.hopper import RowSchedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (512, 1024, 2048, 4096)
ODD_WIDTHS = (1000, 1002, 1003, 24, 1)
TOKENS = (32, 16384)
WARP = 32


def problem_of(tokens: int, d: int) -> SiluAndMulProblem:
    """``[tokens, 2 d]`` in float16, as the document measures."""
    return SiluAndMulProblem(rows=tokens, columns=d, dtype="float16")


@dataclasses.dataclass(frozen=True)
class Row:
    """One d.

    Attributes:
      refused: why the kernel cannot, and XLA answers; "" where it can.
      access_bytes: of one access of one thread.
      wanted: share of the sectors moved that is wanted.
      transactions: accesses of warps, of the whole launch.
      predicted_s: by the model; `measured_s` by the device, None where none is here.
      bytes_moved: both halves read once and the result written once.
    """

    problem: SiluAndMulProblem
    refused: str = ""
    access_bytes: int = 0
    wanted: float = 0.0
    transactions: int = 0
    predicted_s: float = 0.0
    measured_s: float | None = None

    @property
    def bytes_moved(self) -> float:
        return self.problem.bytes_moved

    @property
    def bytes_per_s(self) -> float:
        """As measured, else as predicted."""
        return self.bytes_moved / (self.measured_s or self.predicted_s)


def row(chip: Hardware, problem: SiluAndMulProblem, *, measure: bool = False) -> Row:
    """What the model would run for one problem."""
    account = next(one for one in explain(SILU_AND_MUL, problem, chip, (), top=1) if one.backend == "mosaic_gpu")
    if account.refused:
        return Row(problem, refused=account.refused)
    (first,) = account.first
    assert first.access is not None, "the kernel tells how it reaches memory"
    run = functools.partial(tuned_silu_and_mul, backends="mosaic_gpu", schedule=first.schedule)
    return Row(
        problem,
        access_bytes=round(first.access.bytes),
        wanted=first.access.coalescing,
        transactions=round(first.access.transactions),
        predicted_s=first.predicted_s,
        measured_s=timed(chip, problem, run) if measure else None,
    )


@dataclasses.dataclass(frozen=True)
class Width:
    """The same elements a thread in accesses of one width.

    Attributes:
      transactions: accesses of warps, of the whole launch.
      predicted_s, measured_s: as in `Row`.
    """

    access_bytes: int
    transactions: int
    predicted_s: float
    measured_s: float | None = None


def schedules_of_widths(elements: int = 8) -> list[RowSchedule]:
    """Of so many elements of each half a thread, from one access to as many as there are elements."""
    vectors = [elements >> halving for halving in range(elements.bit_length())]
    return [RowSchedule("span", warps=4, vector=vector, accesses=elements // vector) for vector in vectors]


def widths(chip: Hardware, problem: SiluAndMulProblem, *, measure: bool = False) -> list[Width]:
    """What accesses of 16, 8, 4 and 2 bytes cost; no space offers the narrower ones where the widest fit."""
    kernel, schedules = SILU_AND_MUL.kernel("mosaic_gpu"), schedules_of_widths()
    demand = kernel.footprint(problem, Columns.of(schedules), chip.target)
    predicted = model_of(SILU_AND_MUL, kernel, chip).seconds(demand)
    transactions = demand.step.transactions * block_count(demand)
    return [
        Width(
            int(demand.access_bytes[i]),
            int(transactions[i]),
            float(predicted[i]),
            timed(chip, problem, lambda x, one=one: kernel.run(problem, one, chip.target, x)) if measure else None,
        )
        for i, one in enumerate(schedules)
    ]


def timed(chip: Hardware, problem: SiluAndMulProblem, run: Callable[[jax.Array], jax.Array]) -> float:
    """Seconds of one way to compute it on the chip that is here."""
    (x,) = problem.inputs(seed=0)
    call = jax.jit(run)
    return timer.measure(lambda: call(x), repetitions=20, clock=chip.abilities.clock, l2="warm").median_s


def wanted_share(first_bytes: npt.NDArray[np.int64], access_bytes: int, sector_bytes: int) -> float:
    """Share of the sectors touched by accesses that start at these bytes which the accesses want."""
    touched = {s for at in first_bytes for s in range(at // sector_bytes, (at + access_bytes - 1) // sector_bytes + 1)}
    return len(first_bytes) * access_bytes / (len(touched) * sector_bytes)


def warp(stride: int, access_bytes: int, start: int = 0) -> npt.NDArray[np.int64]:
    """Where the accesses of a warp's threads start, so many of them apart."""
    return start + np.arange(WARP, dtype=np.int64) * stride * access_bytes


def right(d: int, tokens: int = 8) -> bool:
    """Whether the first kernel that can do so here, XLA the last, computes that d as the formula has it."""
    problem = problem_of(tokens, d)
    (x,) = problem.inputs(seed=0)
    allowed = problem.tolerance()
    exact = np.asarray(problem.reference(x), np.float64)
    target = detect().target
    kernel = next(kernel for kernel in SILU_AND_MUL.kernels if kernel.supports(problem, target) is None)
    ours = np.asarray(tuned_silu_and_mul(x, backends=kernel.backend), np.float64)
    return bool((np.abs(ours - exact) <= allowed.absolute + allowed.relative * np.abs(exact)).all())


def main(argv: list[str] | None = None) -> None:
    told = arguments(__doc__, argv)
    chip: Hardware = told.hardware
    require(SILU_AND_MUL.kernel("mosaic_gpu"), problem_of(TOKENS[0], WIDTHS[0]), chip)
    here = is_here(chip)
    memory, l2 = (round(s * chip.clock_hz) for s in (chip.memory_latency_s, chip.l2_latency_s))
    print(f"{chip.kind}, busy: {memory} cycles until device memory answers, {l2} until its L2 cache does")

    sector = chip.sector_bytes
    print(f"\na warp's accesses, in sectors of {sector} bytes: share of what moves that is wanted")
    cases = {
        "4 bytes each, side by side": (warp(1, 4), 4),
        "the same, 4 bytes further": (warp(1, 4, start=4), 4),
        "16 bytes each, side by side": (warp(1, 16), 16),
        "4 bytes each, 137 apart": (warp(137, 4), 4),
    }
    for name, (starts, size) in cases.items():
        print(f"  {name:28} {wanted_share(starts, size, sector):6.1%}")

    most = problem_of(TOKENS[-1], WIDTHS[-1])
    print(f"\none access of a thread: {most}")
    for width in widths(chip, most, measure=here):
        measured = f", {1e6 * width.measured_s:.1f} measured" if width.measured_s else ""
        predicted = f"{1e6 * width.predicted_s:6.1f} us predicted"
        print(f"  {width.access_bytes:3} bytes: {width.transactions:9} accesses of warps, {predicted}{measured}")

    rows = [row(chip, problem_of(tokens, d), measure=here) for tokens in TOKENS for d in (*WIDTHS, *ODD_WIDTHS)]
    print(f"\nsilu_and_mul in float16; {'measured' if here else 'predicted'}")
    print("tokens     d   one access   wanted   accesses of warps         us     GB/s   of the memory's")
    for one in rows:
        p = one.problem
        if one.refused:
            print(f"{p.rows:6} {p.columns:5}   XLA answers: {one.refused}")
            continue
        us, share = 1e6 * (one.measured_s or one.predicted_s), one.bytes_per_s / chip.hbm_bytes_per_s
        print(
            f"{p.rows:6} {p.columns:5} {one.access_bytes:6} bytes {one.wanted:8.0%} {one.transactions:19} "
            f"{us:10.1f} {one.bytes_per_s / 1e9:8.0f} {share:12.0%}"
        )
    verdicts = ", ".join(f"d = {d} {'right' if right(d) else 'wrong'}" for d in (1000, 1003, 1))
    print(f"computed here: {verdicts}")
    if told.plot:
        save(drawn(chip, rows, dark=told.dark), told.plot)


def drawn(chip: Hardware, rows: list[Row], *, dark: bool = False) -> Figure:
    """Bandwidth over d, of few rows and of many."""
    with style.drawing(dark) as look:
        figure = style.figure(f"SiLU-and-mul on {chip.kind}: bandwidth over d", look)
        axes = figure.subplots()
        for tokens, colour in zip(TOKENS, (look.ours, look.xla), strict=True):
            found = [one for one in rows if one.problem.rows == tokens and one.problem.columns in WIDTHS]
            x, y = [one.problem.columns for one in found], [one.bytes_per_s / 1e9 for one in found]
            axes.plot(x, y, marker="o", color=colour)
            axes.annotate(f"{tokens} tokens", (x[-1], y[-1]), xytext=(8, 0), textcoords="offset points", va="center")
        limit = chip.hbm_bytes_per_s / 1e9
        axes.axhline(limit, color=look.faint, linestyle="--")
        axes.annotate(
            "device memory", (WIDTHS[0], limit), xytext=(0, -16), textcoords="offset points", color=look.faint
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS, [str(d) for d in WIDTHS])
        axes.set(xlabel="d, elements of each half of a row", ylabel="GB/s, read and written", ylim=(0, 1.15 * limit))
        axes.grid(axis="y")
        axes.margins(x=0.12)
    return figure


if __name__ == "__main__":
    main()
