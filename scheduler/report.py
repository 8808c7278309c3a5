"""What the command line prints: values of this project as JSON objects and as lines and tables for a person."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from scheduler.record import Calibration, Entry, Failure, Measurement, Record, Schedule, Sweep, Trial

if TYPE_CHECKING:
    from scheduler.answer import Answer
    from scheduler.explain import Access, Account
    from scheduler.hardware import Hardware
    from scheduler.jobs import Result
    from scheduler.reverify import Verdict
    from search_spaces.kernel import Problem

Json = dict[str, Any]


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def schedule_text(schedule: Schedule) -> str:
    """Sorted by name, as stores keep it: a schedule reads the same wherever it is printed."""
    return " ".join(f"{name}={value}" for name, value in sorted(schedule.items()))


def choice_text(backend: str, schedule: Schedule) -> str:
    return f"{backend} {schedule_text(schedule)}".rstrip()


def problem_text(canonical: str) -> str:
    """A key's problem as it is typed: ``m=64 n=64``."""
    return schedule_text(json.loads(canonical))


def unconfirmed(record: Record) -> bool:
    """Whether it was measured with another minor version of JAX than the one installed here."""
    here = importlib.metadata.version("jax")
    return record.environment.jax.split(".")[:2] != here.split(".")[:2]


def library(record: Record, backend: str = "xla") -> Entry | None:
    return record.best(frozenset({backend}))


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `numbers` are set flush right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def texts(*cells: object) -> list[Text]:
    """Cells in which nothing is markup."""
    return [Text(str(cell)) for cell in cells]


def entry_json(entry: Entry, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    """An entry with its times in seconds; with `problem` and `hardware`, also how much of the chip it uses."""
    values: Json = {
        "backend": entry.backend,
        "version": entry.version,
        "schedule": dict(entry.schedule),
        "median_s": entry.measurement.median_s,
        "spread_s": entry.measurement.spread_s,
        "clock": entry.measurement.clock,
        "l2": entry.measurement.l2,
        "predicted_s": entry.predicted_s,
    }
    if problem is not None:
        values["flops_per_s"] = problem.flops / entry.measurement.median_s
    if problem is not None and hardware is not None:
        values["share_of_bound"] = bound_s(problem, hardware) / entry.measurement.median_s
    return values


def bound_s(problem: Problem, hardware: Hardware) -> float:
    """The time that arithmetic and compulsory traffic allow at best, seconds."""
    from scheduler.cost import CostModel

    return CostModel(hardware).lower_bound(problem)


def record_json(record: Record, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    other = library(record)
    return {
        "operation": record.key.operation,
        "problem": json.loads(record.key.problem),
        "hardware": record.key.hardware,
        "unconfirmed": unconfirmed(record),
        "winner": entry_json(record.winner, problem, hardware),
        "entries": [entry_json(entry, problem, hardware) for entry in record.entries],
        "speedup_over_xla": other.measurement.median_s / record.winner.measurement.median_s if other else None,
        "versions": dict(record.versions),
        "environment": dataclasses.asdict(record.environment),
        "budget": record.budget,
        "tried": record.tried,
        "space": record.space,
        "confidence": dataclasses.asdict(record.confidence),
        "excluded": record.excluded,
        "stopped": record.stopped,
        "failed": [dataclasses.asdict(lost) for lost in record.failed],
    }


def entries_table(record: Record, problem: Problem | None, hardware: Hardware | None) -> Table:
    """The winner, the runner-up and the best of each other backend, side by side."""
    made = table(
        "", "schedule", "time", "spread", "TFLOP/s", "of bound", "model said",
        numbers=("time", "spread", "TFLOP/s", "of bound", "model said"),
    )  # fmt: skip
    # One constant row stands for every CPU: a share of its peaks tells a person nothing.
    rated = hardware is not None and hardware.platform != "cpu"
    names = ["winner", "runner-up"] + [""] * (len(record.entries) - 2)
    for name, entry in zip(names, record.entries, strict=False):
        seen, time = entry_json(entry, problem, hardware), entry.measurement.median_s
        made.add_row(
            *texts(
                name,
                choice_text(entry.backend, entry.schedule),
                seconds_text(time),
                seconds_text(entry.measurement.spread_s),
                _digits(seen["flops_per_s"] / 1e12) if "flops_per_s" in seen else "",
                f"{seen['share_of_bound']:.1%}" if "share_of_bound" in seen and rated else "",
                seconds_text(entry.predicted_s),
            )
        )
    return made


def verdict(record: Record) -> str:
    """The winner against XLA in a sentence, and how sure that is in a second one, where the record knows."""
    failed = "".join(f"{lost}.\n" for lost in record.failed)
    return f"{_against_xla(record)}\n{failed}{_ended(record)}{_confidence(record)}".rstrip()


def _ended(record: Record) -> str:
    if not record.stopped:
        return ""
    left = f"; {record.excluded} untried ones cannot win, by their lower bound" if record.excluded else ""
    return f"The search ended: {record.stopped}{left}. "


def _against_xla(record: Record) -> str:
    other, winner = library(record), record.winner
    if other is None:
        return "XLA did not run."
    if winner == other:
        rival = next((entry for entry in record.entries if entry is not other), None)
        if rival is None:
            return "XLA is the only backend that ran."
        ratio = rival.measurement.median_s / other.measurement.median_s
        tied = record.confidence.tied or abs(ratio - 1) <= 0.01
        said = "A tie within 1 % goes to XLA" if tied else "XLA wins"
        return f"{said}; the best Pallas schedule takes {ratio:.3g} times as long."
    return (
        f"{other.measurement.median_s / winner.measurement.median_s:.3g} times as fast as XLA "
        f"({seconds_text(other.measurement.median_s)})."
    )


def _confidence(record: Record) -> str:
    sure = record.confidence
    if not sure.rounds:
        return ""
    samples = len(record.winner.measurement.samples_s)
    said = [f"Run-off: {sure.rounds} rounds, {samples} samples of the winner, L2 {record.winner.measurement.l2}"]
    if sure.margin_low is not None and sure.margin_high is not None:
        said.append(f"the runner-up is slower by {sure.margin_low:.2%} to {sure.margin_high:.2%}")
    if sure.tied:
        said.append(f"tied: {', '.join(sure.tied)}")
    return "; ".join([*said, *sure.notes]) + "."


def result_json(result: Result) -> Json:
    """What became of one problem of a job; `state` is "tuned", "known" or "failed"."""
    values: Json = {
        "task": str(result.task),
        "state": result.state,
        "reason": result.reason,
        "elapsed_s": result.elapsed_s,
        "resumed": result.resumed,
    }
    problem = getattr(result.task, "problem", None)
    if result.before is not None:
        values["before"] = dataclasses.asdict(result.before)
    if result.entry is not None:
        values["answer"] = entry_json(result.entry, problem, result.hardware)
    if result.record is not None:
        values["record"] = record_json(result.record, problem, result.hardware)
    return values


def sweep_lines(sweep: Sweep, trials: Sequence[Trial]) -> Iterator[str]:
    """What a sweep measured, and what came out of it."""
    drawn = "all" if sweep.sample is None else f"{sweep.sample} drawn with seed {sweep.seed}, and the library"
    yield f"{sweep.operation} {problem_text(sweep.problem)} on {sweep.kind}"
    yield f"{sweep.space} schedules, {sweep.legal} of them legal; {drawn}, measured {sweep.repetitions} times each"
    for reason, count in failures(trials).items():
        yield f"{count} failed: {reason}"
    times = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    if times:
        best_s, _, best = min(times)
        yield f"fastest: {seconds_text(best_s)}, {choice_text(best.backend, best.schedule)}"
    if sweep.again:
        yield f"the {sweep.again} fastest, and the library, measured once more in {sweep.rounds} rounds"


def calibration_json(calibration: Calibration) -> Json:
    return dataclasses.asdict(calibration)


def calibrations_table(calibrations: Sequence[Calibration]) -> Table:
    """What was fitted for each kernel, and how far off the model then is."""
    made = table(
        "", "problems", "trials", "typical error", "constants", numbers=("problems", "trials", "typical error")
    )
    for c in calibrations:
        constants = " ".join(f"{name}={value:.3g}" for name, value in c.constants.items())
        made.add_row(*texts(f"{c.backend}, version {c.version}", c.problems, c.trials, f"{c.error:.1%}", constants))
    return made


def results_table(results: Sequence[Result]) -> Table:
    """Before and after, a row for each problem of a job."""
    made = table(
        "problem", "", "before", "after", "XLA", "gain", "schedule", numbers=("before", "after", "XLA", "gain")
    )
    states = {"tuned": "tuned", "known": "already tuned", "failed": "failed"}
    for result in results:
        cells = ["", "", "", "", result.reason]
        if result.entry is not None:
            after = result.entry.measurement.median_s
            cells = ["", seconds_text(after), "", "", choice_text(result.entry.backend, result.entry.schedule)]
            if result.before is not None:
                cells[0] = seconds_text(result.before.seconds) + ("" if result.before.measured else " predicted")
                cells[3] = f"{result.before.seconds / after:.2f}x" if result.before.measured else ""
            cells[-1] += "".join(f"; {lost}" for lost in result.broken)
            if result.library is not None:
                cells[2] = seconds_text(result.library.measurement.median_s)
        made.add_row(*texts(result.task, states[result.state], *cells))
    return made


def records_table(rows: Sequence[tuple[str, Record]]) -> Table:
    """Records by where they are kept."""
    made = table(
        "operation", "problem", "hardware", "schedule", "time", "vs XLA", "jax", "date", "where", "",
        numbers=("time", "vs XLA"),
    )  # fmt: skip
    for where, record in rows:
        winner, other = record.winner, library(record)
        ratio = other.measurement.median_s / winner.measurement.median_s if other else None
        made.add_row(
            *texts(
                record.key.operation,
                problem_text(record.key.problem),
                record.key.hardware,
                choice_text(winner.backend, winner.schedule),
                seconds_text(winner.measurement.median_s),
                "" if ratio is None else f"{ratio:.2f}x",
                record.environment.jax,
                record.environment.date[:10],
                where,
                "unconfirmed" if unconfirmed(record) else "",
            )
        )
    return made


def reverified_json(verdict: Verdict) -> Json:
    record = verdict.record
    return {
        "operation": record.key.operation,
        "problem": json.loads(record.key.problem),
        "hardware": record.key.hardware,
        "state": verdict.state,
        "reason": verdict.reason,
        "then_s": record.winner.measurement.median_s,
        "now_s": verdict.now.median_s if verdict.now else None,
        "then": dataclasses.asdict(record.environment),
        "rivals": [
            {
                "role": rival.role,
                "backend": rival.backend,
                "schedule": dict(rival.schedule),
                "then_s": rival.then.measurement.median_s if rival.then else None,
                "now_s": rival.now.median_s if isinstance(rival.now, Measurement) else None,
                "failure": str(rival.now) if isinstance(rival.now, Failure) else None,
            }
            for rival in verdict.rivals
        ],
    }


def reverified_table(verdicts: Sequence[Verdict]) -> Table:
    """What became of each stored winner, a row each."""
    made = table("operation", "problem", "winner", "jax then", "then", "now", "", "why", numbers=("then", "now"))
    states = {"holds": "holds", "slower": "no longer fastest", "broken": "cannot be served", "elsewhere": "not timed"}
    for verdict in verdicts:
        record = verdict.record
        made.add_row(
            *texts(
                record.key.operation,
                problem_text(record.key.problem),
                choice_text(record.winner.backend, record.winner.schedule),
                record.environment.jax,
                seconds_text(record.winner.measurement.median_s),
                seconds_text(verdict.now.median_s) if verdict.now else "",
                states[verdict.state],
                verdict.reason,
            )
        )
    return made


def trial_json(trial: Trial) -> Json:
    values: Json = {
        "number": trial.number,
        "backend": trial.backend,
        "version": trial.version,
        "schedule": dict(trial.schedule),
        "predicted_s": trial.predicted_s,
        "median_s": None,
        "failure": None,
    }
    match trial.outcome:
        case Measurement(median_s=median_s):
            values["median_s"] = median_s
        case Failure() as failure:
            values["failure"] = {"stage": failure.stage, "detail": failure.detail}
    return values


def trials_table(trials: Sequence[Trial]) -> Table:
    made = table("#", "schedule", "time", "model said", "", numbers=("#", "time", "model said"))
    for trial in trials:
        time = seconds_text(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else "failed"
        why = str(trial.outcome) if isinstance(trial.outcome, Failure) else ""
        choice = choice_text(trial.backend, trial.schedule)
        made.add_row(*texts(trial.number, choice, time, seconds_text(trial.predicted_s), why))
    return made


def explanation_json(
    accounts: Sequence[Account],
    answer: Answer,
    record: Record | None,
    held: Entry | str,
    problem: Problem,
    hardware: Hardware,
) -> Json:
    """Where every schedule went; `held` is the entry that a call gets, or why the record is of no use."""
    kernels = [
        {
            "backend": account.backend,
            "version": account.version,
            "refused": account.refused,
            "size": account.size,
            "dropped": dict(account.dropped),
            "first": [dataclasses.asdict(ranked) for ranked in account.first],
            "fitted": account.fitted,
            "tried": len(account.tried),
            "failed": dict(failures(account.tried)),
            "untried": account.untried,
        }
        for account in accounts
    ]
    return {
        "hardware": hardware.id,
        "kernels": kernels,
        "model": dataclasses.asdict(answer),
        "record": record_json(record, problem, hardware) if record is not None else None,
        "holds": not isinstance(held, str),
        "reason": held if isinstance(held, str) else "",
    }


def account_parts(account: Account) -> Iterator[str | Table]:
    """One kernel's schedules, counted down from all of them, and the model's first with its terms."""
    title = f"{account.backend}, version {account.version}"
    if account.refused:
        yield f"{title}: {account.refused}"
        return
    yield f"{title}: {account.size} schedule{'' if account.size == 1 else 's'}"
    counts = table("count", "of", numbers=("count",))
    counts.show_header = False
    for reason, count in account.dropped.items():
        counts.add_row(*texts(f"-{count}", reason))
    counts.add_row(*texts(f"={account.untried + len(account.tried)}", "legal"))
    counts.add_row(*texts(len(account.tried), "of them tried"))
    for reason, count in failures(account.tried).items():
        counts.add_row(*texts(count, f"of these failed: {reason}"))
    counts.add_row(*texts(account.untried, "not tried"))
    yield counts
    if terms := list(dict.fromkeys(name for ranked in account.first for name, s in ranked.terms.items() if s)):
        access = ("accesses", "wanted", "each") if any(ranked.access for ranked in account.first) else ()
        numbers = ("predicted", "on-chip", *terms, *access)
        first = table("the model's first", *numbers, numbers=numbers)
        for ranked in account.first:
            first.add_row(
                *texts(
                    schedule_text(ranked.schedule),
                    seconds_text(ranked.predicted_s),
                    f"{ranked.onchip_bytes / 1024:.1f} KiB",
                    *(seconds_text(ranked.terms[name]) for name in terms),
                    *(_access_texts(ranked.access) if ranked.access else [""] * len(access)),
                )
            )
        yield first
    if account.fitted:
        yield account.fitted


def _access_texts(access: Access) -> tuple[str, str, str]:
    return f"{access.transactions:.3g}", f"{access.coalescing:.0%}", f"{access.bytes:.0f} B"


def failures(trials: Sequence[Trial]) -> Mapping[str, int]:
    """How many trials failed, by reason; the most frequent first."""
    reasons = (_first_line(str(trial.outcome)) for trial in trials if isinstance(trial.outcome, Failure))
    return dict(collections.Counter(reasons).most_common())


def _first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
