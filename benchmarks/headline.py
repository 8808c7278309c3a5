"""What the README says in figures: each comparison with its rival, card and points; where it is lost; what it costs.

All figures are of benchmarks/results/; a comparison without a result has no line.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from markdown_page import line, number, percent, table, text
from rows import FORWARD

Result = Mapping[str, Any]
Results = Mapping[str, Result]
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What of a benchmark's rows is compared.

    Attributes:
      ratio: key of a row: the rival's time over ours; a row without it has no point.
      part: which operations or kinds of rows count; of the names of missing points, too.
      summarized: whether the README has it.
    """

    ours: str
    rival: str
    benchmark: str
    ratio: str
    part: Callable[[str], bool] = lambda name: True
    summarized: bool = True

    def points(self, result: Result) -> list[tuple[str, float, float]]:
        """Returns name, ratio and least ratio of each point: the last two differ if a point was timed several times."""
        rows = (row for row in result["rows"] if row.get(self.ratio) and self.part(kind_of(row)))
        return [(name_of(row), row[self.ratio], min(row.get("ratios", [row[self.ratio]]))) for row in rows]

    def suite(self, result: Result) -> int:
        """Returns how many points the benchmark has, those that were not timed included."""
        names = [kind_of(row) for row in result["rows"]] + list(result["environment"].get("missing", ()))
        return sum(self.part(name.partition(" ")[0]) for name in names if name)


def kind_of(row: Row) -> str:
    """Returns what kind of point a row is: its operation, or training or inference; "" if it is no point."""
    if "model" in row:
        return str(row.get("kind", "")) if "ratios" in row else ""
    return str(row.get("operation") or row.get("point") or row["problem"])


def name_of(row: Row) -> str:
    """Returns the point's name as the tables of docs/results.md have it."""
    named = row.get("model") or row.get("point")
    return str(named or f"{row.get('operation', '')} {row['problem']}").strip().removesuffix(" dtype=bfloat16")


def _forward(name: str) -> bool:
    return name in FORWARD


COMPARISONS = (
    Comparison("`optimize`, training steps", "the framework's `jit`", "models", "optimize_vs_jnp", "training".__eq__),
    Comparison("`optimize`, inference", "the framework's `jit`", "models", "optimize_vs_jnp", "inference".__eq__),
    Comparison(
        "`optimize`, masks from arguments", "the framework's `jit`", "models", "optimize_vs_jnp", "masked".__eq__
    ),
    Comparison("`tuned_flash_attention`, forward and backward", "cuDNN", "attention", "final_vs_cudnn"),
    Comparison("softmax, RMS norm, SiLU-and-mul", "XLA", "rows", "final_vs_xla", _forward),
    Comparison(
        "backward passes of rows, losses, other norms, quantization",
        "XLA",
        "rows",
        "final_vs_xla",
        lambda name: not _forward(name),
    ),
    Comparison(
        "the same",
        "torch, the faster of eager and compiled",
        "rows",
        "final_vs_torch",
        lambda name: not _forward(name),
    ),
    Comparison("`tuned_ragged_dot` and its gradients", "tokamax", "grouped", "final_vs_tokamax"),
    Comparison("`tuned_ragged_dot`", "torch's `_grouped_mm`", "grouped", "final_vs_torch"),
    Comparison("`tuned_matmul`", "XLA", "matmul", "final_vs_xla"),
    Comparison("`tuned_matmul`", "JAX's `hopper_matmul_mgpu`", "matmul", "final_vs_jax_hopper"),
    Comparison("`tuned_matmul` with bias, activation or residual", "XLA", "fused", "final_vs_written"),
    Comparison("the best Pallas matmul", "XLA", "matmul", "pallas_vs_xla", summarized=False),
    Comparison("the best Pallas attention", "cuDNN", "attention", "pallas_vs_cudnn", summarized=False),
    Comparison("the best Pallas kernel of rows", "XLA", "rows", "pallas_vs_xla", summarized=False),
)


def files(results: Results, benchmark: str) -> dict[str, Result]:
    """Returns the results of a benchmark on every card, by file name."""
    return {name: result for name, result in sorted(results.items()) if name.partition("-")[0] == benchmark}


def card(result: Result) -> str:
    """Returns the card's name."""
    return str(result["environment"]["device"]).partition(" (")[0]


def compared(results: Results) -> Iterator[tuple[Comparison, Result, list[tuple[str, float, float]]]]:
    """Yields each comparison with each of its results and the points that it has."""
    for comparison in COMPARISONS:
        for result in reversed(files(results, comparison.benchmark).values()):  # the H200 has more points
            if points := comparison.points(result):
                yield comparison, result, points


def ratios(results: Results, only: str | None = None) -> Iterator[str]:
    """Yields the lines of the table of the README, or of one card."""
    yield from table("ours", "rival", "card", "points", "geomean", "least", left=3)
    for comparison, result, points in compared(results):
        if comparison.summarized and only in (None, card(result)):
            suite = comparison.suite(result)
            many = f"{len(points)}" if suite == len(points) else f"{len(points)} of {suite}"
            mean, least = statistics.geometric_mean([ratio for _, ratio, _ in points]), min(low for *_, low in points)
            name = card(result).removeprefix("NVIDIA ").partition(" ")[0]
            yield line(comparison.ours, comparison.rival, name, many, number(mean, 3), number(least, 3))


def losses(results: Results) -> Iterator[str]:
    """Yields the section of the points at which ours is slower."""
    yield from ("", "## Where we lose", "")
    yield from text(
        "Every comparison with a ratio below 1: ours is slower there. *Below 1*: so many of its points; of a function "
        "that was timed several times the least ratio counts. *The best Pallas*: the kernel alone; a call runs XLA or "
        "cuDNN there instead, if a search measured it."
    )
    yield from table("ours", "rival", "card", "at worst", "least", "below 1", left=4)
    for comparison, result, points in compared(results):
        if lost := sorted((low, name) for name, _, low in points if low < 1):
            least, at = lost[0]
            count = f"{len(lost)} of {len(points)}"
            yield line(comparison.ours, comparison.rival, card(result), at, number(least, 3), count)
    yield ""
    for name, result in files(results, "models").items():
        if refused := result["summary"]["false_rejections"]:
            yield from text(f"`optimize` refuses kernels that are right in: {', '.join(refused)} (`{name}.json`).")
    yield from text(
        "Not compared: other cards than those of this page; no TPU and no Ampere, Ada or Blackwell GPU ran a kernel of "
        "this package for these tables ([contrib](use/contrib.md))."
    )


def costs(results: Results) -> Iterator[str]:
    """Yields what a search and a decision cost, and after how many calls the time is repaid."""
    for result in reversed(files(results, "tuning_time").values()):
        summary, problem = result["summary"], result["rows"][0]["problem"]
        said = (
            f"- A search of `matmul {problem.removesuffix(' dtype=bfloat16')}` takes "
            f"{summary['seconds_with_startup']:.0f} s ({summary['trials']} trials) on an {card(result)}"
        )
        matmuls = results.get(f"matmul-{_suffix(results, result)}")
        row = next((row for row in (matmuls["rows"] if matmuls else ()) if row["problem"] == problem), None)
        if row and row["xla_us"] > row["final_us"]:
            saved_us = row["xla_us"] - row["final_us"]
            calls = summary["seconds_with_startup"] * 1e6 / saved_us
            said += f"; it saves {saved_us:.1f} µs a call and is repaid after {_rounded(calls)} calls"
        yield from _item(f"{said}.")
    for result in reversed(files(results, "models").values()):
        rows = [row for row in result["rows"] if row.get("kind") == "training" and row["jnp_us"] > row["optimize_us"]]
        if rows:
            repaid = [row["decided_s"] * 1e6 / (row["jnp_us"] - row["optimize_us"]) for row in rows]
            decided_s = statistics.median(row["decided_s"] for row in rows)
            yield from _item(
                f"- The first call of `optimize` decides in {decided_s:.0f} s and is repaid after "
                f"{_rounded(statistics.median(repaid))} steps (medians of {len(rows)} training steps, {card(result)}). "
                "A later process reads the decision from the cache."
            )


def _item(words: str) -> Iterator[str]:
    first, *rest = text(words)[:-1]
    yield first
    yield from (f"  {each}" for each in rest)


def _suffix(results: Results, result: Result) -> str:
    return next(name.partition("-")[2] for name, each in results.items() if each is result)


def _rounded(count: float) -> str:
    """Returns two digits of a count, in words that a reader can compare."""
    if count >= 1e6:
        return f"{count / 1e6:.2g} million" if count < 1e8 else f"{count / 1e6:.0f} million"
    return f"{float(f'{count:.2g}'):,.0f}"


def repeated(results: Results) -> Iterator[str]:
    """Yields how far the winners of two searches of one problem with two seeds differ."""
    yield from table("card", "problem", "first, µs", "second, µs", "difference", left=2)
    for result in reversed(files(results, "tuning_time").values()):
        for row in result["rows"]:
            if "disagreement" in row:
                first, second = (number(time_us, 1) for time_us in row["winner_us"])
                apart = "the same schedule" if row["same_winner"] else percent(row["disagreement"])
                problem = row["problem"].replace(" dtype=bfloat16", "")
                yield line(card(result).removeprefix("NVIDIA "), problem, first, second, apart)
