"""Attention and device memory: roofline, traffic, where the time goes, and what one kernel in place of three saves.

    python examples/seeds/io_aware_attention.py [--hardware h200] [--plot roofline.svg] [--traffic bytes.svg]

Unfused attention is three launches, each a problem of this project: S = Q K^T, P = softmax(S) and O = P V. Fused it is
one. Bytes are those of the problems, loads and times those of the shipped kernels' footprints by the cost model; on a
Hopper GPU both are timed as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from example_options import accelerators, arguments, is_here, require, save

from scheduler import tuned_flash_attention, tuned_matmul, tuned_softmax
from scheduler.core.hardware import Hardware
from scheduler.inspect import plots
from scheduler.inspect.case import Case, of_record
from scheduler.inspect.plots import style
from scheduler.measure import timer
from scheduler.model.constants import model_of
from scheduler.model.pruning import prune
from scheduler.model.traffic import block_count, traffic
from scheduler.store import store
from search_spaces import Operation, Problem
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import SOFTMAX, SoftmaxProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEADS, HEAD_DIM, DTYPE = 12, 64, "float16"


def fused(length: int) -> FlashAttentionProblem:
    return FlashAttentionProblem(1, length, length, HEADS, HEADS, HEAD_DIM, dtype=DTYPE)


def unfused(length: int) -> dict[str, tuple[Operation[Any], Problem]]:
    """The three launches, by what they compute."""
    n, d, products = length, HEAD_DIM, {"dtype": DTYPE, "batch": HEADS}
    return {
        "S = Q K^T": (MATMUL, MatmulProblem(m=n, n=n, k=d, transpose_b=True, **products)),
        "P = softmax(S)": (SOFTMAX, SoftmaxProblem(rows=HEADS * n, columns=n, dtype=DTYPE)),
        "O = P V": (MATMUL, MatmulProblem(m=n, n=d, k=n, **products)),
    }


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the model says of the best schedule of a shipped kernel.

    Attributes:
      compulsory_bytes: each operand read once, each result written once.
      memory_bytes: that device memory moves, with what its cache cannot keep.
      core_bytes: that go into and out of the cores: what memory would move without that cache.
      predicted_s: of the launch.
      compute_s, memory_s: of that, what arithmetic units need, and what device memory does; they overlap.
    """

    compulsory_bytes: float
    memory_bytes: float
    core_bytes: float
    predicted_s: float
    compute_s: float
    memory_s: float

    def __add__(self, other: Launch) -> Launch:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Launch(*(a + b for a, b in pairs))

    @property
    def memory_share(self) -> float:
        return self.memory_s / (self.compute_s + self.memory_s)


def launch(chip: Hardware, operation: Operation[Any], problem: Problem) -> Launch:
    pallas = [k for k in operation.kernels if not (k.library or k.vendor) and not k.supports(problem, chip.target)]
    tops = [prune(kernel, problem, chip, model_of(operation, kernel, chip), keep=1) for kernel in pallas]
    top = min(tops, key=lambda pruned: float(pruned.predicted_s[0]))
    demand, model = top.kernel.footprint(problem, top.points, chip.target), model_of(operation, top.kernel, chip)
    parts = {name: float(np.max(seconds)) for name, seconds in model.terms(demand).items()}
    moved = traffic(demand, chip, model.in_force.l2_share)
    written = float(np.max(block_count(demand) * demand.steps * demand.mean_step.bytes_written))
    return Launch(
        compulsory_bytes=problem.bytes_moved,
        memory_bytes=float(moved.memory_bytes.item()) + written,
        core_bytes=float(moved.cache_bytes.item()) + written,
        predicted_s=float(top.predicted_s[0]),
        compute_s=max(parts["mma"], parts["power"], parts["mufu"], parts["fp32"]),
        memory_s=parts["hbm"],
    )


def standard(chip: Hardware, length: int) -> Launch:
    """The three launches together."""
    first, *others = (launch(chip, *piece) for piece in unfused(length).values())
    return sum(others, start=first)


def flash(chip: Hardware, length: int) -> Launch:
    return launch(chip, FLASH_ATTENTION, fused(length))


@dataclasses.dataclass(frozen=True)
class Saving:
    """What one launch in place of three saves: bytes of device memory, by problem; seconds, predicted and measured.

    Attributes:
      io: bytes that each of the three moves at least.
      fused_bytes: that the one does.
      predicted_s, measured_s: of the three, and of the one; measured is None where no GPU is here.
    """

    io: Mapping[str, float]
    fused_bytes: float
    predicted_s: tuple[float, float]
    measured_s: tuple[float, float] | None = None

    @property
    def unfused_bytes(self) -> float:
        return sum(self.io.values())

    @property
    def saved(self) -> float:
        return 1 - self.fused_bytes / self.unfused_bytes


def saving(chip: Hardware, length: int, *, measure: bool = False) -> Saving:
    return Saving(
        {name: problem.bytes_moved for name, (_, problem) in unfused(length).items()},
        fused(length).bytes_moved,
        (standard(chip, length).predicted_s, flash(chip, length).predicted_s),
        measured(chip, length) if measure else None,
    )


def measured(chip: Hardware, length: int) -> tuple[float, float]:
    """Seconds of the three launches, and of the one, by the device's own clock."""
    q, k, v = fused(length).inputs(seed=0)
    by_head = [x[0].swapaxes(0, 1) for x in (q * HEAD_DIM**-0.5, k, v)]

    @jax.jit
    def three(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return tuned_matmul(tuned_softmax(tuned_matmul(q, k.swapaxes(1, 2))), v)

    one = jax.jit(tuned_flash_attention)
    apart = np.asarray(three(*by_head).swapaxes(0, 1), np.float32) - np.asarray(one(q, k, v)[0], np.float32)
    assert np.abs(apart).max() < 0.02, "both compute the same attention"
    clock = chip.abilities.clock
    return (
        timer.measure(lambda: three(*by_head), repetitions=20, clock=clock, l2="warm").median_s,
        timer.measure(lambda: one(q, k, v), repetitions=20, clock=clock, l2="warm").median_s,
    )


@dataclasses.dataclass(frozen=True)
class Point:
    """An operation under the roofline: FLOP/B of compulsory traffic, FLOP/s that it allows, and what bounds it."""

    name: str
    flops_per_byte: float
    flops_per_s: float
    bound: str


def points(chip: Hardware) -> list[Point]:
    n = 4096
    named: dict[str, Problem] = {
        "softmax": SoftmaxProblem(rows=n, columns=n, dtype=DTYPE),
        "small product (128)": MatmulProblem(m=128, n=128, k=128, dtype=DTYPE),
        "large product (4096)": MatmulProblem(m=n, n=n, k=n, dtype=DTYPE),
        "attention in one launch": fused(n),
    }
    found = [_point(chip, name, p, p.bytes_moved) for name, p in named.items()]
    three = sum(problem.bytes_moved for _, problem in unfused(n).values())
    return [*found, _point(chip, "attention in three", fused(n), three)]


def _point(chip: Hardware, name: str, problem: Problem, moved: float) -> Point:
    intensity, ridge = problem.flops / moved, chip.ridge(problem.arithmetic)
    reached = chip.peak(problem.arithmetic) * min(1.0, intensity / ridge)
    return Point(name, intensity, reached, "arithmetic" if intensity >= ridge else "memory")


def main(argv: list[str] | None = None) -> None:
    drawings = {"traffic": "bytes and time over length", "parts": "the parts of the time of one launch"}
    told = arguments(__doc__, argv, drawings=drawings)
    chip: Hardware = told.hardware
    require(FLASH_ATTENTION.kernel("mosaic_gpu"), fused(LENGTHS[0]), chip)
    ridges = ", ".join(f"{row.kind} {row.ridge(DTYPE):.0f}" for row in accelerators())
    print(f"ridge of the roofline in {DTYPE}, FLOP/B: {ridges}\n")
    for point in points(chip):
        reached = f"{point.flops_per_s / 1e12:6.1f} TFLOP/s"
        print(f"  {point.name:24} {point.flops_per_byte:7.1f} FLOP/B, {reached} at most, bound by {point.bound}")

    both = [(length, standard(chip, length), flash(chip, length)) for length in LENGTHS]
    print(f"\nattention of {HEADS} heads of {HEAD_DIM} in {DTYPE}: MB that device memory moves")
    print("length   three launches      one   saved   in and out of its cores")
    for length, three, one in both:
        moved = f"{three.memory_bytes / 1e6:14.1f} {one.memory_bytes / 1e6:10.1f}"
        print(f"{length:6} {moved} {1 - one.memory_bytes / three.memory_bytes:7.1%} {one.core_bytes / 1e6:14.1f}")

    print("\nwhere the time goes by the model, us; arithmetic and memory overlap")
    print("length   three: arithmetic   memory (share)      all    one: arithmetic   memory (share)      all")
    for length, three, one in both:
        print(f"{length:6} {_times(three)} {_times(one)}")

    print("\nfusion")
    for length in (1024, 2048, 4096):
        found = saving(chip, length, measure=is_here(chip))
        io = ", ".join(f"{name} {moved / 1e6:.1f}" for name, moved in found.io.items())
        print(f"{length:6}: MB of {io}, together {found.unfused_bytes / 1e6:.1f}")
        print(f"        fused {found.fused_bytes / 1e6:.1f}, {found.saved:.1%} less")
        print(f"        predicted {_ratio(found.predicted_s)}")
        if found.measured_s is not None:
            print(f"        measured {_ratio(found.measured_s)}")
    if told.plot:
        save(plots.roofline(tuned(chip), dark=told.dark), told.plot)
    if told.traffic:
        save(drawn(chip, dark=told.dark), told.traffic)
    if told.parts:
        save(plots.time_breakdown(Case(FLASH_ATTENTION, fused(4096), chip), dark=told.dark), told.parts)


def _times(of: Launch) -> str:
    memory = f"{1e6 * of.memory_s:8.1f} ({of.memory_share:3.0%})"
    return f"{1e6 * of.compute_s:18.1f} {memory:>16} {1e6 * of.predicted_s:8.1f}"


def _ratio(seconds: tuple[float, float]) -> str:
    three, one = seconds
    return f"{1e6 * three:.0f} us in three launches, {1e6 * one:.0f} in one: {three / one:.1f} times as fast"


def tuned(chip: Hardware) -> list[Case]:
    """The shipped records of products, softmaxes and attention on that chip."""
    names = {MATMUL.name, SOFTMAX.name, FLASH_ATTENTION.name}
    with contextlib.closing(store.shipped()) as shipped:
        cases = [of_record(record) for record in shipped.records() if record.key.operation in names]
    return [case for case in cases if case is not None and case.hardware.kind == chip.kind]


def drawn(chip: Hardware, *, dark: bool = False) -> Figure:
    """Bytes of device memory over length, and the time of three launches beside that of one."""
    three, one = ([of(chip, length) for length in LENGTHS] for of in (standard, flash))
    x = np.arange(len(LENGTHS))
    with style.drawing(dark) as look:
        figure = style.figure(f"Attention on {chip.kind}: three launches, or one", look)
        left, right = figure.subplots(1, 2)
        for offset, launches, colour, name in ((-0.2, three, look.xla, "three"), (0.2, one, look.ours, "one")):
            left.bar(x + offset, [each.memory_bytes / 1e6 for each in launches], 0.4, color=colour, label=name)
            right.plot(x, [1e6 * each.predicted_s for each in launches], marker="o", color=colour, label=name)
        for at, (many, few) in enumerate(zip(three, one, strict=True)):
            saved = f"-{1 - few.memory_bytes / many.memory_bytes:.0%}"
            left.annotate(saved, (at + 0.02, few.memory_bytes / 1e6), ha="left", va="bottom", fontsize=9)
        for axes, unit in ((left, "MB that device memory moves"), (right, "µs by the model")):
            axes.set_xticks(x, [str(length) for length in LENGTHS])
            axes.set(xlabel="length", ylabel=unit, yscale="log")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.grid(axis="y")
            axes.legend(loc="upper left", title="launches")
    return figure


if __name__ == "__main__":
    main()
