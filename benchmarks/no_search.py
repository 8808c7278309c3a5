"""What an answer without a search is worth on problems that nothing near was measured of: no device is needed.

Everything that records and recorded sweeps of one chip know is left out, one problem at a time, with all problems whose
sizes lie within a doubling of it (whatever their dtypes and epilogues); constants and errors of the model are fitted to
the rest, and the answer that `predict` then gives is compared with the fastest library, XLA's or the vendor's, and with
the fastest schedule known. With records of a second chip of the architecture, each problem is also answered from that
chip's records and constants alone (`cross_chip_...`).

An answer's time is one that was measured, where its schedule was: a sweep knows every schedule, a record its entries.
Of others it is estimated: the fastest known of that kernel, times what the top prediction takes over the fastest in
the sweeps of that kernel, or of all where it has none (their mean; for a bound, the most of any). `exact` counts what
needed no estimate. Of an answer of which no program was measured nothing is known (`unknown`).

The curve has the share of the gain that is taken, and the worst answer, for each accepted ratio of expected loss to
expected gain (`predict.LOSS_PER_GAIN`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware, siblings
from scheduler.core.records import Calibration, Environment, Measurement, Point, Record, Trial, fields_of, key_of
from scheduler.measure import replay
from scheduler.model.calibration import Observed, fit, observed
from scheduler.model.constants import ProblemPoint
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.prediction.predict import LOSS_PER_GAIN, predict
from scheduler.search import sweep
from scheduler.store import text_files
from scheduler.store.store import Store
from search_spaces import Operation, Problem, load

# Distance of points of the picture that have one label.
CLOSE = 0.005
# Problems whose sizes are at most so many doublings apart in all are of one group, and left out together.
GROUP = 1.0
RATIOS = tuple(sorted({0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, LOSS_PER_GAIN}))
ATTENTION = ("flash_attention", "flash_attention_backward")
NOT_ROWS = (*ATTENTION, "matmul", "gated_matmul", "scaled_matmul", "ragged_dot", "ragged_dot_weights")
# The constants, by backend, and the records with which a problem is answered.
Evidence = tuple[Mapping[str, Calibration], Sequence[Record]]


@dataclasses.dataclass(frozen=True)
class Known:
    """What was measured of one problem.

    Attributes:
      times: of each schedule, with all its fields, in seconds.
      swept: whether a sweep knows its whole space.
    """

    problem: Problem
    times: Mapping[Point, float]
    swept: bool

    def best(self, backend: str) -> float | None:
        return min((s for (kernel, _), s in self.times.items() if kernel == backend), default=None)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An answer, the time it takes in seconds, and whether that was measured; `bound_s` is the most it may take."""

    backend: str
    seconds: float | None
    bound_s: float | None
    exact: bool


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", help="[default: all of which records were shipped]")
    parser.add_argument("--kind", default="NVIDIA H200", help="the chip")
    parser.add_argument(
        "--group", type=float, default=GROUP, help="doublings within which problems are left out together"
    )
    options = parser.parse_args(arguments)
    hardware, records = chips.find(options.kind), text_files.read_records(ROOT / "records")
    mine = [record for record in records if record.key.hardware == hardware.id]
    names = options.operations or sorted({record.key.operation for record in mine})
    rows, cross, newest, regrets = [], [], [], regrets_of(hardware)
    for name in names:
        operation, found = load(name), measured(load(name), hardware, mine)
        judged = judge(operation, hardware, found, left_out(operation, hardware, found, options.group), regrets)
        rows += judged
        newest += found.environments
        show(name, judged)
        if (other := sibling_evidence(operation, hardware, records)) is not None:
            cross += judge(operation, hardware, found, lambda _, other=other: other, regrets)
    summary = {"group_doublings": options.group} | summarise(rows, cross)
    for name, value in summary.items():
        print(f"{name}: {value}")
    path = write_result(
        "no_search",
        hardware,
        summary=summary,
        rows=rows + [{**row, "cross_chip": True} for row in cross],
        environment=environment(max(newest, key=lambda one: one.date), *map(load, names)),
    )
    draw(summary["curve"], path.with_suffix(".svg"))


@dataclasses.dataclass(frozen=True)
class Found:
    """What was measured of one operation on one chip.

    Attributes:
      known: of each problem, its times.
      seen: of each backend, what its calibration is fitted to.
    """

    known: Sequence[Known]
    seen: Mapping[str, Sequence[Observed]]
    records: Sequence[Record]
    environments: Sequence[Environment]


def measured(operation: Operation[Any], hardware: Hardware, records: Sequence[Record]) -> Found:
    records = [record for record in records if record.key.operation == operation.name]
    paths = sweeps_of(hardware, operation.name)
    swept = (
        sweep.merged_measurements([sweep.recorded_measurements(operation, path) for path in paths]) if paths else None
    )
    with_records = sweep.stored_measurements(operation, hardware, store_of(records))
    together = sweep.merged_measurements([part for part in (swept, with_records) if part is not None])
    seen = {
        kernel.backend: [
            found
            for problem, trials in together.trials.items()
            if (found := observed(kernel, problem, hardware, trials)) is not None
        ]
        for kernel in operation.kernels
    }
    known = [known_of(operation, hardware, problem, swept, with_records) for problem in together.trials]
    return Found(known, seen, records, together.environments)


def left_out(
    operation: Operation[Any], hardware: Hardware, found: Found, group: float
) -> Callable[[Problem], Evidence]:
    """The evidence about a problem on the same chip, without its group."""

    def evidence(problem: Problem) -> Evidence:
        near = {one.problem for one in found.known if apart(one.problem, problem) <= group}
        keys = {key_of(operation, each, hardware) for each in near}
        fitted = fits(operation, hardware, found.seen, found.environments, near)
        return fitted, [record for record in found.records if record.key not in keys]

    return evidence


def sibling_evidence(operation: Operation[Any], hardware: Hardware, records: Sequence[Record]) -> Evidence | None:
    """All that the most similar chip with records of the operation knows; None if there is no such chip."""
    for chip in siblings(hardware):
        if mine := [r for r in records if (r.key.hardware, r.key.operation) == (chip.id, operation.name)]:
            found = measured(operation, chip, mine)
            return fits(operation, chip, found.seen, found.environments, ()), mine
    return None


def judge(
    operation: Operation[Any],
    hardware: Hardware,
    found: Found,
    evidence: Callable[[Problem], Evidence],
    regrets: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """A row for each problem: the kernel that is expected to be fastest, and the library that runs otherwise."""
    rows = []
    for one in found.known:
        fitted, records = evidence(one.problem)
        answer = predict(operation, one.problem, hardware, records=records, fitted=fitted, loss_per_gain=math.inf)
        timed = functools.partial(time_of, operation, hardware, one, regrets)
        chosen, otherwise = timed(answer.backend, answer.schedule), timed(answer.otherwise, {})
        library_s = [s for kernel in operation.kernels if kernel.library or kernel.vendor
                     if (s := one.best(kernel.backend)) is not None]  # fmt: skip
        row = {
            "operation": operation.name,
            "problem": str(one.problem),
            "swept": one.swept,
            "xla_us": microseconds(one.best(operation.library.backend)),
            "library_us": microseconds(min(library_s, default=None)),
            "best_us": microseconds(min(one.times.values())),
            "faster": answer.faster,
            "loss_per_gain": None if answer.backend == answer.otherwise else answer.loss_per_gain,
            "expected_gain": None if answer.otherwise_s is None else answer.otherwise_s / answer.predicted_s,
        }
        for label, each in {"kernel": chosen, "otherwise": otherwise}.items():
            row |= {
                label: each.backend,
                f"{label}_us": microseconds(each.seconds),
                f"{label}_bound_us": microseconds(each.bound_s),
                f"{label}_exact": each.exact,
            }
        rows.append(row)
    return rows


def microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def fits(
    operation: Operation[Any],
    hardware: Hardware,
    seen: Mapping[str, Sequence[Observed]],
    environments: Sequence[Environment],
    left_out: Collection[Problem],
) -> dict[str, Calibration]:
    """What would be fitted without these problems, by backend."""
    made = {}
    for kernel in operation.kernels:
        if some := [one for one in seen[kernel.backend] if one.problem not in left_out]:
            made[kernel.backend] = fit(operation, kernel, hardware, some, environments[0])
    return made


def known_of(
    operation: Operation[Any],
    hardware: Hardware,
    problem: Problem,
    swept: sweep.Measured | None,
    recorded: sweep.Measured,
) -> Known:
    """All times of one problem; of one that was swept those of its sweep, as they met the same conditions."""
    trials = (swept.trials.get(problem) if swept is not None else None) or recorded.trials[problem]
    whole = swept is not None and problem in swept.trials
    times: dict[Point, float] = {}
    extra: Iterable[Trial] = recorded.trials.get(problem, ()) if whole else ()
    for trial in (*extra, *trials):
        kernel = operation.kernel(trial.backend)
        if not isinstance(trial.outcome, Measurement) or trial.version != kernel.version:
            continue
        times[point(operation, hardware, problem, trial.backend, trial.schedule)] = trial.outcome.median_s
    return Known(problem, times, whole)


def point(
    operation: Operation[Any], hardware: Hardware, problem: Problem, backend: str, schedule: Mapping[str, Any]
) -> Point:
    space = operation.kernel(backend).space(problem, hardware.target)
    return backend, fields_of(dataclasses.asdict(space.decode(schedule)))


def time_of(
    operation: Operation[Any],
    hardware: Hardware,
    known: Known,
    regrets: Mapping[str, Sequence[float]],
    backend: str,
    schedule: Mapping[str, Any],
) -> Chosen:
    """What an answer takes: as measured, or the best of its kernel times what top predictions cost in sweeps."""
    if (taken := known.times.get(point(operation, hardware, known.problem, backend, schedule))) is not None:
        return Chosen(backend, taken, taken, True)
    best = known.best(backend)
    if best is None:
        return Chosen(backend, None, None, False)
    if operation.kernel(backend).library:  # its other program was slower, or was not measured
        return Chosen(backend, best, best, False)
    found = regrets.get(f"{operation.name}/{backend}") or [regret for some in regrets.values() for regret in some]
    return Chosen(backend, best * float(np.exp(np.mean(np.log(found)))), best * max(found), False)


def regrets_of(hardware: Hardware) -> dict[str, list[float]]:
    """Time of the top prediction over that of the fastest in each sweep, by operation and backend."""
    found: dict[str, list[float]] = {}
    for path in sweeps_of(hardware):
        head, _ = replay.read(path)
        operation = load(head.operation)
        swept = sweep.recorded_measurements(operation, path)
        (problem,) = swept.trials
        for kernel in operation.kernels:
            seen = None if kernel.library else observed(kernel, problem, hardware, swept.trials[problem])
            if seen is None or seen.schedules is None:
                continue
            pruned = prune(kernel, problem, hardware, CostModel(hardware), keep=1, verified=True)
            first = pruned.points.row(0) if len(pruned.points) else None
            rows = [index for index in range(len(seen.seconds)) if seen.schedules.row(index) == first]
            if rows:  # the space may have grown since
                regret = float(seen.seconds[rows].min() / seen.seconds.min())
                found.setdefault(f"{operation.name}/{kernel.backend}", []).append(regret)
    return found


def sweeps_of(hardware: Hardware, operation: str = "*") -> list[Path]:
    kind = hardware.kind.lower().replace(" ", "-")
    return sorted((ROOT / "sweeps" / kind).glob(f"{operation}-*.jsonl.gz"))


def apart(one: Problem, other: Problem) -> float:
    """Doublings between two problems' sizes, whatever else differs."""
    here, there = ProblemPoint(one, 1.0).sizes, ProblemPoint(other, 1.0).sizes
    return sum(abs(here.get(name, 0.0) - there.get(name, 0.0)) for name in here.keys() | there.keys())


def decided(row: Mapping[str, Any], most: float) -> dict[str, Any]:
    """A row with the answer at a ratio of expected loss to expected gain."""
    ratio = row["loss_per_gain"]
    label = "kernel" if ratio is not None and ratio <= most else "otherwise"
    return {
        **row,
        "answer": row[label],
        "us": row[f"{label}_us"],
        "bound_us": row[f"{label}_bound_us"],
        "exact": row[f"{label}_exact"],
    }


def summarise(rows: Sequence[Mapping[str, Any]], cross: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The figures that matter, of all operations and of each."""
    answers = [decided(row, LOSS_PER_GAIN) for row in rows]
    known = [row for row in answers if row["us"] is not None and row["library_us"] is not None]
    names = sorted({row["operation"] for row in known})
    summary: dict[str, Any] = {"problems": len(rows), "unknown": len(rows) - len(known), **figures(known)}
    summary["gain_taken_attention"] = gain_taken([row for row in known if row["operation"] in ATTENTION])
    summary["gain_taken_rows"] = gain_taken([row for row in known if row["operation"] not in NOT_ROWS])
    elsewhere = [row for row in (decided(row, LOSS_PER_GAIN) for row in cross) if row["us"] and row["library_us"]]
    summary["cross_chip_gain_taken"] = gain_taken(elsewhere)
    summary["cross_chip_worst"] = min((row["library_us"] / row["us"] for row in elsewhere), default=None)
    summary["curve"] = []
    for most in RATIOS:
        some = [row for row in (decided(row, most) for row in rows) if row["us"] and row["library_us"]]
        summary["curve"].append({"loss_per_gain": most, **figures(some)})
    for name in names:
        mine = [row for row in known if row["operation"] == name]
        summary[name] = {"problems": len(mine), **figures(mine)}
    return summary


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures against XLA, and (`gain_taken`, `final_vs_library_...`) against the faster of all libraries."""
    against_xla = [row["xla_us"] / row["us"] for row in rows if row["xla_us"] is not None]
    gains = [row["library_us"] / row["us"] for row in rows]
    exact = [gain for gain, row in zip(gains, rows, strict=True) if row["exact"]]
    shares = [gain_taken([r for r in rows if r["operation"] == name]) for name in {r["operation"] for r in rows}]
    told = [share for share in shares if share is not None]
    return {
        "final_vs_xla_geomean": math.exp(np.mean(np.log(against_xla))) if against_xla else None,
        "final_vs_xla_worst": min(against_xla, default=None),
        "final_vs_library_geomean": math.exp(np.mean(np.log(gains))),
        "final_vs_library_worst": min(gains),
        "final_vs_library_worst_of_50": math.exp(np.mean(np.log(sorted(gains)[: -(-len(gains) // 50)]))),
        "final_vs_library_worst_bound": min(row["library_us"] / row["bound_us"] for row in rows),
        "gain_taken": gain_taken(rows),
        "gain_taken_mean_of_operations": float(np.mean(told)) if told else None,
        "exact": len(exact),
        "final_vs_library_worst_exact": min(exact, default=None),
        "slower_by_2_percent": sum(gain < 0.98 for gain in gains),
    }


def gain_taken(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of the attainable gain over the fastest library, in log time, that answers take."""
    attainable = sum(max(0.0, math.log(row["library_us"] / row["best_us"])) for row in rows)
    return sum(math.log(row["library_us"] / row["us"]) for row in rows) / attainable if attainable else None


def draw(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots the share of the gain that is taken against the worst answer."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "no_search"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    worst = [point["final_vs_library_worst_of_50"] for point in curve]
    for name, label in (("gain_taken", "all problems"), ("gain_taken_mean_of_operations", "mean of operations")):
        shares = [point[name] for point in curve]
        axes.plot(worst, shares, marker="o", label=label)
        labels: list[tuple[float, float, list[float]]] = []  # close points have one
        for point, x, y in zip(curve, worst, shares, strict=True):
            if not labels or abs(x - labels[-1][0]) > CLOSE or abs(y - labels[-1][1]) > CLOSE:
                labels.append((x, y, []))
            labels[-1][2].append(point["loss_per_gain"])
        for x, y, ratios in labels:
            text = " to ".join(f"{ratio:g}" for ratio in dict.fromkeys((ratios[0], ratios[-1])))
            weight = "bold" if LOSS_PER_GAIN in ratios else "normal"
            axes.annotate(text, (x, y), (4, 5), textcoords="offset points", fontsize=7, weight=weight)
    axes.set(
        xlabel="the library's time over the answer's: mean of the worst 2 %", ylabel="share of the attainable gain"
    )
    axes.set_title("at each accepted ratio of expected loss to expected gain; bold: chosen", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=name)
    for column in ("problem", "library us", "best", "answer", "", "loss per gain"):
        table.add_column(column)
    for row in (decided(row, LOSS_PER_GAIN) for row in rows):
        library = row["library_us"]
        gains = [f"{library / row[key]:.3f}" if library and row[key] else "-" for key in ("best_us", "us")]
        table.add_row(
            row["problem"],
            f"{library:.2f}" if library else "-",
            gains[0],
            gains[1] + ("" if row["exact"] else " ?"),
            row["answer"],
            "-" if row["loss_per_gain"] is None else f"{row['loss_per_gain']:.2f}",
        )
    Console(width=180).print(table)


def store_of(records: Iterable[Record]) -> Store:
    store = Store(":memory:")
    for record in records:
        store.put(record)
    return store


if __name__ == "__main__":
    main()
