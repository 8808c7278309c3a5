"""What an answer without a search is worth on problems that nothing near was measured of: no device is needed.

Everything that records and recorded sweeps of one chip know is left out, one problem at a time, with all problems whose
sizes lie within a doubling of it (whatever their dtypes and epilogues); constants and errors of the model are fitted to
the rest, and the answer that `predict` then gives is compared with the fastest program of XLA and with the fastest
schedule known. The rule of before (one factor of time for each kernel, and a gain of a tenth) answers in the same run,
and so does today's with the neighbours left in.

An answer's time is one that was measured, where its schedule was: a sweep knows every schedule, a record its entries.
Of others it is estimated: the fastest known of that kernel, times what the top prediction takes over the fastest in
the sweeps of that kernel, or of all where it has none (their mean; for a bound, the most of any). `exact` counts what
needed no estimate.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import Calibration, Environment, Measurement, Point, Record, Trial, fields_of, key_of
from scheduler.measure import replay
from scheduler.model.calibration import Observed, fit, observed
from scheduler.model.constants import ProblemPoint
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.prediction.predict import predict
from scheduler.search import sweep
from scheduler.store import text_files
from scheduler.store.store import Store
from search_spaces import Operation, Problem, load

# Problems whose sizes are at most so many doublings apart in all are of one group, and left out together.
GROUP = 1.0
# The rule of before: what the model had to promise, and what it took for the library's time.
GAIN_BEFORE, GRAIN_BEFORE, FIXED_BEFORE_S = 0.10, 3500.0, 4e-6


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
    seconds: float
    bound_s: float
    exact: bool


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", help="[default: all of which records were shipped]")
    parser.add_argument("--kind", default="NVIDIA H200", help="the chip")
    parser.add_argument(
        "--group", type=float, default=GROUP, help="doublings within which problems are left out together"
    )
    options = parser.parse_args(arguments)
    hardware = chips.find(options.kind)
    records = [r for r in text_files.read_records(ROOT / "records") if r.key.hardware == hardware.id]
    names = options.operations or sorted({record.key.operation for record in records})
    rows, newest, regrets = [], [], regrets_of(hardware)
    for name in names:
        mine = [record for record in records if record.key.operation == name]
        judged, environments = judge(load(name), hardware, mine, options.group, regrets)
        rows += judged
        newest += environments
        show(name, judged)
    summary = {"group_doublings": options.group} | summarise(rows)
    for name, value in summary.items():
        print(f"{name}: {value}")
    latest = max(newest, key=lambda one: one.date)
    write_result("no_search", hardware, summary=summary, rows=rows, environment=environment(latest, *map(load, names)))


def judge(
    operation: Operation[Any],
    hardware: Hardware,
    records: Sequence[Record],
    group: float,
    regrets: Mapping[str, Sequence[float]],
) -> tuple[list[dict[str, Any]], Sequence[Environment]]:
    """A row for each problem, and under which environments it was measured."""
    paths = sweeps_of(hardware, operation.name)
    swept = (
        sweep.merged_measurements([sweep.recorded_measurements(operation, path) for path in paths]) if paths else None
    )
    with_records = sweep.stored_measurements(operation, hardware, store_of(records))
    together = sweep.merged_measurements([part for part in (swept, with_records) if part is not None])
    known = [known_of(operation, hardware, problem, swept, with_records) for problem in together.trials]
    seen = {
        kernel.backend: [
            found
            for problem, trials in together.trials.items()
            if (found := observed(kernel, problem, hardware, trials)) is not None
        ]
        for kernel in operation.kernels
    }
    rows = []
    for one in known:
        near = {problem for problem in together.trials if apart(one.problem, problem) <= group}
        keys = {key_of(operation, problem, hardware) for problem in near}
        alone = {one.problem}
        fitted = fits(operation, hardware, seen, together.environments, near)
        others = [record for record in records if record.key not in keys]
        answer = predict(operation, one.problem, hardware, records=others, fitted=fitted)
        fitted = fits(operation, hardware, seen, together.environments, alone)
        others = [record for record in records if record.key != key_of(operation, one.problem, hardware)]
        beside = predict(operation, one.problem, hardware, records=others, fitted=fitted)
        before = rule_of_before(operation, one.problem, hardware, seen, near)
        timed = functools.partial(time_of, operation, hardware, one, regrets)
        library_s = one.best(operation.library.backend)
        best_s = min(one.times.values())
        row = {
            "operation": operation.name,
            "problem": str(one.problem),
            "swept": one.swept,
            "group": len(near),
            "xla_us": None if library_s is None else library_s * 1e6,
            "best_us": best_s * 1e6,
            "faster": answer.faster,
            "expected_gain": answer.library_s / answer.predicted_s,
        }
        for label, (backend, schedule) in {
            "": (answer.backend, answer.schedule),
            "beside_": (beside.backend, beside.schedule),
            "before_": before,
        }.items():
            chosen = timed(backend, schedule)
            row |= {
                f"{label}answer": backend,
                f"{label}us": chosen.seconds * 1e6,
                f"{label}bound_us": chosen.bound_s * 1e6,
                f"{label}exact": chosen.exact,
            }
        rows.append(row)
    return rows, together.environments


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
    if best is None:  # nothing ran of it, or nothing was tried: as slow as can be said
        return Chosen(backend, max(known.times.values()), max(known.times.values()), False)
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


def rule_of_before(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    seen: Mapping[str, Sequence[Observed]],
    left_out: Collection[Problem],
) -> tuple[str, Mapping[str, Any]]:
    """The answer by one factor for each kernel and a gain of a tenth, as it was given until errors were learnt."""
    library, model = operation.library, CostModel(hardware)
    factors = {
        library.backend: middle(
            [
                o.seconds[0] / library_before(hardware, o.problem)
                for o in seen[library.backend]
                if o.problem not in left_out
            ]
        )
    }
    library_s = factors[library.backend] * library_before(hardware, problem)
    best: tuple[float, str, Mapping[str, Any]] | None = None
    for kernel in operation.kernels:
        if (
            kernel.library
            or hardware.architecture not in kernel.verified_on
            or kernel.supports(problem, hardware.target)
        ):
            continue
        pruned = prune(kernel, problem, hardware, model, keep=1, verified=True)
        if not len(pruned.points):
            continue
        factor = middle(
            [
                o.measured_s / o.predicted_s
                for o in seen[kernel.backend]
                if o.predicted_s and o.measured_s and o.problem not in left_out
            ]
        )
        expected = factor * float(pruned.predicted_s[0])
        if best is None or expected < best[0]:
            best = expected, kernel.backend, pruned.schedule(0)
    if best is None or best[0] > (1 - GAIN_BEFORE) * library_s:
        return library.backend, {}
    return best[1:]


def middle(factors: Sequence[float]) -> float:
    return float(np.median(factors)) if factors else 1.0


def library_before(hardware: Hardware, problem: Problem) -> float:
    """The library's time as it was predicted before: no bytes between kernels, and few results leave cores idle."""
    c = CostModel(hardware).in_force
    results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
    busy = results / (results + GRAIN_BEFORE * hardware.cores) if results else 1.0
    arithmetic = problem.flops / (busy * c.library_e_mma * hardware.peak(problem.arithmetic))
    unfused = problem.bytes_moved if getattr(problem, "fused", False) else problem.library_bytes_moved
    memory = unfused / (c.library_e_hbm * hardware.hbm_bytes_per_s)
    return float(np.linalg.norm([arithmetic, memory], c.library_p)) + FIXED_BEFORE_S


def apart(one: Problem, other: Problem) -> float:
    """Doublings between two problems' sizes, whatever else differs."""
    here, there = ProblemPoint(one, 1.0).sizes, ProblemPoint(other, 1.0).sizes
    return sum(abs(here.get(name, 0.0) - there.get(name, 0.0)) for name in here.keys() | there.keys())


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that matter, of all operations and of each."""
    against = [row for row in rows if row["xla_us"] is not None]
    summary: dict[str, Any] = {"problems": len(rows), "problems_with_xla": len(against)}
    summary |= figures(against, "")
    summary |= {f"beside_{name}": value for name, value in figures(against, "beside_").items()}
    summary |= {f"before_{name}": value for name, value in figures(against, "before_").items()}
    for name in sorted({row["operation"] for row in against}):
        mine = [row for row in against if row["operation"] == name]
        summary[name] = {"problems": len(mine), **figures(mine, "")}
        summary[name] |= {f"before_{key}": value for key, value in figures(mine, "before_").items()}
    return summary


def figures(rows: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    gains = [math.log(row["xla_us"] / row[f"{label}us"]) for row in rows]
    attainable = [max(0.0, math.log(row["xla_us"] / row["best_us"])) for row in rows]
    exact = [gain for gain, row in zip(gains, rows, strict=True) if row[f"{label}exact"]]
    shares = [gain_taken([r for r in rows if r["operation"] == name], label) for name in {r["operation"] for r in rows}]
    told = [share for share in shares if share is not None]
    return {
        "final_vs_xla_geomean": math.exp(np.mean(gains)),
        "final_vs_xla_worst": math.exp(min(gains)),
        "final_vs_xla_worst_bound": min(row["xla_us"] / row[f"{label}bound_us"] for row in rows),
        "gain_taken": sum(gains) / sum(attainable) if sum(attainable) else None,
        "gain_taken_mean_of_operations": float(np.mean(told)) if told else None,
        "exact": len(exact),
        "final_vs_xla_worst_exact": math.exp(min(exact)) if exact else None,
        "slower_by_2_percent": sum(gain < math.log(0.98) for gain in gains),
    }


def gain_taken(rows: Sequence[Mapping[str, Any]], label: str) -> float | None:
    """The share of the attainable gain over XLA, in log time, that answers take."""
    attainable = sum(max(0.0, math.log(row["xla_us"] / row["best_us"])) for row in rows)
    return sum(math.log(row["xla_us"] / row[f"{label}us"]) for row in rows) / attainable if attainable else None


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=name)
    for column in ("problem", "XLA us", "best", "answer", "", "faster", "before"):
        table.add_column(column)
    for row in rows:
        xla = row["xla_us"]
        gains = [f"{xla / row[key]:.3f}" if xla else "-" for key in ("best_us", "us", "before_us")]
        table.add_row(
            row["problem"],
            f"{xla:.2f}" if xla else "-",
            gains[0],
            gains[1] + ("" if row["exact"] else " ?"),
            row["answer"],
            "-" if row["faster"] is None else f"{row['faster']:.2f}",
            gains[2],
        )
    Console(width=180).print(table)


def store_of(records: Iterable[Record]) -> Store:
    store = Store(":memory:")
    for record in records:
        store.put(record)
    return store


if __name__ == "__main__":
    main()
