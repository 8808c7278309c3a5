"""Results of searches, sweeps, calibrations and verifications, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from scheduler.cli.record_report import entry_json, record_json
from scheduler.cli.terminal import Json, Row, ledger, table, texts
from scheduler.core import codec
from scheduler.core.records import Calibration, Failure, Measurement, Record, Sweep, Trial, choice_text, point_of
from scheduler.core.text import ratio_text, seconds_text, share_text
from scheduler.inspect.provenance import failures
from scheduler.inspect.verdict import compared, standing
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.search.reverify import VerifyResult
    from scheduler.search.task import Result


def result_json(result: Result) -> Json:
    """Returns the result of one problem of a job as JSON; `state` is "tuned", "known" or "failed"."""
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


def results(of: Sequence[Result], width: int) -> Iterator[RenderableType]:
    """Yields the times before and after, one row per problem of a job."""
    from scheduler.search.task import Malformed

    answered = [
        (r.task.operation.name, r.entry) for r in of if r.entry is not None and not isinstance(r.task, Malformed)
    ]
    choices = compared(
        [(entry.backend, entry.schedule) for _, entry in answered], operations=[name for name, _ in answered]
    )
    schedules = iter(choices.texts)
    rows = []
    for result in of:
        figures = [_state(result), "", "", "", ""]
        if result.entry is not None:
            figures[2] = seconds_text(result.entry.measurement.median_s)
            if result.before is not None:
                figures[1] = ("" if result.before.measured else "~") + seconds_text(result.before.seconds)
                figures[4] = _gain(result)
            if result.library is not None:
                figures[3] = seconds_text(result.library.measurement.median_s)
        under = [next(schedules)] if result.entry is not None else []
        under += [*map(str, result.broken), *result.notes]
        rows.append(Row(str(result.task), figures, [*under, result.reason]))
    yield from ledger(
        "problem, and its schedule", ("", "before", "after", "XLA", "gain"), [(choices.note, rows)], width
    )
    if any(row.figures[1].startswith("~") for row in rows):
        yield "~: a prediction"
    if any(row.figures[0] == _ESTIMATED for row in rows):
        yield "estimated: by the compiler, for an absent chip; nothing was measured"


_ESTIMATED = "estimated"


def _state(result: Result) -> str:
    return _ESTIMATED if result.record is not None and result.record.estimated else result.state


def _gain(result: Result) -> str:
    """Formats the ratio of the time before to the time after.

    Empty if the time before was not measured. If the final comparison is inconclusive, the text is its state.
    """
    before, record, after = result.before, result.record, result.entry
    if before is None or record is None or after is None or not before.measured:
        return ""
    same = [e for e in record.entries if point_of(e.backend, e.schedule) == point_of(before.backend, before.schedule)]
    if after != record.winner or not same:  # the two were not measured in the same comparison
        ratio = before.seconds / after.measurement.median_s
        return ratio_text(ratio) if ratio >= 1 else "undecided"
    if same[0] == record.winner:
        return "1.00x"
    stands = standing(record, same[0])
    return ratio_text(stands.ratio) if stands.state == "ahead" else stands.state


def sweep_lines(sweep: Sweep, trials: Sequence[Trial]) -> Iterator[str]:
    """Yields sentences about the measurements of a sweep and their results."""
    drawn = "all" if sweep.sample is None else f"{sweep.sample} drawn with seed {sweep.seed}, and the library"
    yield f"{sweep.operation} {format_problem(sweep.operation, sweep.problem)} on {sweep.kind}"
    yield f"{sweep.space} schedules, {sweep.legal} of them legal; {drawn}, measured {sweep.repetitions} times each"
    for reason, count in failures(trials).items():
        yield f"{count} failed: {reason}"
    times = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    if times:
        best_s, _, best = min(times)
        yield f"fastest: {seconds_text(best_s)}, {choice_text(best.backend, best.schedule)}"
    if sweep.again:
        yield f"the {sweep.again} fastest schedules and the library measured again in {sweep.rounds} rounds"


def calibration_json(calibration: Calibration) -> Json:
    return dataclasses.asdict(calibration)


def calibrations_table(calibrations: Sequence[Calibration]) -> Table:
    """Returns a table of the fitted constants of each kernel, with the remaining error of the model."""
    made = table(
        "", "problems", "trials", "typical error", "constants", numbers=("problems", "trials", "typical error")
    )
    for c in calibrations:
        shown = {name: value for name, value in c.constants.items() if not name.startswith("residual_")}
        constants = " ".join(f"{name}={value:.3g}" for name, value in shown.items())
        made.add_row(*texts(f"{c.backend}, version {c.version}", c.problems, c.trials, share_text(c.error), constants))
    return made


def reverified_json(verdict: VerifyResult) -> Json:
    record = verdict.record
    return {
        "operation": record.key.operation,
        "problem": codec.problem_to_json(record.key.problem),
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


def reverified(verdicts: Sequence[VerifyResult], width: int) -> Iterator[RenderableType]:
    """Yields the result for each stored winner, one row per winner."""
    states = {"holds": "valid", "slower": "no longer fastest", "broken": "cannot be used", "elsewhere": "not timed"}
    of_operation: dict[str, list[VerifyResult]] = {}
    for verdict in verdicts:
        of_operation.setdefault(verdict.record.key.operation, []).append(verdict)
    groups = []
    for operation, some in of_operation.items():
        choices = compared([(v.record.winner.backend, v.record.winner.schedule) for v in some])
        rows = []
        for verdict, schedule in zip(some, choices.texts, strict=True):
            record = verdict.record
            then, now = seconds_text(record.winner.measurement.median_s), verdict.now
            rows.append(
                Row(
                    f"{operation} {format_problem(operation, record.key.problem)}",
                    (record.environment.jax, then, seconds_text(now.median_s) if now else ""),
                    [schedule, states[verdict.state] + (f": {verdict.reason}" if verdict.reason else "")],
                )
            )
        groups.append((choices.note, rows))
    yield from ledger("problem, and its winner", ("jax then", "then", "now"), groups, width)


def _is_wrong(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failure) and trial.outcome.stage == "verify"


def failure_lines(trials: Sequence[Trial], record: Record) -> list[str]:
    """Returns, for each backend in `record`, the number of failed schedules and their most frequent reason.

    Schedules with wrong results are among the notes of the record.
    """
    lines = []
    for backend in dict.fromkeys(entry.backend for entry in record.entries):
        tried = [trial for trial in trials if trial.backend == backend]
        if reasons := failures([trial for trial in tried if not _is_wrong(trial)]):
            lines.append(
                f"{sum(reasons.values())} of {len(tried)} schedules of {backend} failed: {next(iter(reasons))}."
            )
    return lines
