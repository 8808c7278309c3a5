"""Records, their trials, and results of searches, sweeps, calibrations and verifications, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from scheduler.cli.terminal import Json, Row, labelled, ledger, table, texts
from scheduler.core import codec
from scheduler.core.records import (
    LIBRARY,
    Calibration,
    Entry,
    Failure,
    Key,
    Measurement,
    Record,
    Sweep,
    Trial,
    choice_text,
    point_of,
)
from scheduler.core.text import digits, ratio_text, seconds_text, share_text
from scheduler.inspect.provenance import stale, stale_line, unverified_line
from scheduler.inspect.verdict import (
    Standing,
    bases_of,
    compared,
    failures,
    first_line,
    gain_text,
    order_note,
    standing,
    without_prediction,
)
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.search.reverify import VerifyResult
    from scheduler.search.task import Result
    from search_spaces.problem import Problem


def roofline_s(problem: Problem, hardware: Hardware) -> float:
    """Returns the roofline time of arithmetic and compulsory traffic, in seconds."""
    from scheduler.model.cost import CostModel

    return CostModel(hardware).lower_bound(problem)


def picked(value: object, *names: str) -> Json:
    """Returns these attributes as JSON."""
    return {name: getattr(value, name) for name in names}


def key_json(key: Key) -> Json:
    return {"operation": key.operation, "problem": codec.problem_to_json(key.problem), "hardware": key.hardware}


def entry_json(entry: Entry, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    """Returns an entry as JSON, with times in seconds; with `problem` and `hardware`, also its use of the chip."""
    values: Json = {
        **picked(entry, "backend", "version"),
        "schedule": dict(entry.schedule),
        **picked(entry.measurement, "median_s", "spread_s", "clock", "estimated", "l2"),
        "predicted_s": entry.predicted_s,
    }
    if entry.measurement.worst_s is not None:
        values["worst_s"] = entry.measurement.worst_s
    if problem is not None and problem.flops:
        values["flops_per_s"] = problem.flops / entry.measurement.median_s
    if problem is not None and hardware is not None:
        values["share_of_roofline"] = roofline_s(problem, hardware) / entry.measurement.median_s
    return values


def record_json(record: Record, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    other = record.library_entry
    return {
        **key_json(record.key),
        "estimated": record.estimated,
        "imported": dataclasses.asdict(record.imported) if record.imported else None,
        "stale": stale(record),
        "undecided": record.undecided,
        "winner": entry_json(record.winner, problem, hardware),
        "entries": [entry_json(entry, problem, hardware) for entry in record.entries],
        "speedup_over_xla": other.measurement.median_s / record.winner.measurement.median_s if other else None,
        "versions": dict(record.versions),
        "environment": dataclasses.asdict(record.environment),
        **picked(record, "budget", "tried", "space", "excluded", "stopped", "notes"),
        "confidence": dataclasses.asdict(record.confidence),
        "failed": [dataclasses.asdict(lost) for lost in record.failed],
    }


def trial_json(trial: Trial) -> Json:
    failed = isinstance(trial.outcome, Failure)
    return {
        **picked(trial, "number", "backend", "version", "predicted_s"),
        "schedule": dict(trial.schedule),
        "median_s": getattr(trial.outcome, "median_s", None),
        "failure": picked(trial.outcome, "stage", "detail") if failed else None,
    }


def kept_json(
    where: str,
    key: Key,
    record: Record | None,
    trials: Sequence[Trial],
    unfinished: Sequence[Trial],
    problem: Problem,
    hardware: Hardware | None,
) -> Json:
    """Returns the stored data of a problem as JSON; without a record, only the trials of an unfinished search."""
    return {
        "where": where,
        **(key_json(key) if record is None else record_json(record, problem, hardware)),
        "trials": [trial_json(trial) for trial in trials],
        "unfinished": len(unfinished),
    }


def entries(record: Record, problem: Problem | None, hardware: Hardware | None, width: int) -> Iterator[RenderableType]:
    """Yields the winner, the runner-up and the best of each other backend, side by side, and their schedules."""
    # All CPUs share one row of constant peaks, so fractions of these peaks are meaningless.
    rated = hardware is not None and not hardware.abilities.interpreted
    names = ["winner", "runner-up", *[""] * len(record.entries)][: len(record.entries)]
    unpredicted = without_prediction(record.entries, record.library)
    seen = [entry_json(entry, problem, hardware) for entry in record.entries]
    rates = [values.get("flops_per_s", 0.0) for values in seen]
    rate, scale = ("TFLOP/s", 1e12) if max(rates) >= 1e11 else ("GFLOP/s", 1e9)
    columns = {
        "": names,
        "backend": [entry.backend for entry in record.entries],
        "estimated" if record.estimated else "time": [seconds_text(e.measurement.median_s) for e in record.entries],
        "worst": [seconds_text(e.measurement.worst_s) if e.measurement.worst_s else "" for e in record.entries],
        "ratio": ["", *(ratio_text(standing(record, entry).ratio) for entry in record.entries[1:])],
        "spread": [seconds_text(entry.measurement.spread_s) for entry in record.entries],
        rate: [digits(each / scale) if each else "" for each in rates],
        "% of roofline": [
            digits(100 * values["share_of_roofline"]) if "share_of_roofline" in values and rated else ""
            for values in seen
        ],
        "predicted": [_predicted_text(entry.predicted_s, entry.backend in unpredicted) for entry in record.entries],
    }
    shown_columns = [name for name, cells in columns.items() if any(cells)]
    for dispensable in ("spread", rate):
        if sum(max(map(len, [name, *columns[name]])) + 2 for name in shown_columns) - 2 > width:
            shown_columns.remove(dispensable)
    made = table(*shown_columns, numbers=shown_columns[2:])
    for cells in zip(*(columns[name] for name in shown_columns), strict=True):
        made.add_row(*texts(*cells))
    yield made
    shown = [(name, entry) for name, entry in zip(names, record.entries, strict=False) if entry.schedule]
    schedules = compared([(entry.backend, entry.schedule) for _, entry in shown])
    if shown:
        yield ""
        yield labelled(zip((name for name, _ in shown), schedules.texts, strict=True))
        yield from schedules.note
    if len(record.entries) > 1:
        yield ""
        yield "ratio: time over the winner's time" + (", in the median round" if record.confidence.rounds else "")
    if note := order_note(record):
        yield note


def _predicted_text(seconds: float, missing: bool) -> str:
    return "-" if missing else seconds_text(seconds)


def records(of: Sequence[tuple[str, Record]], width: int) -> Iterator[RenderableType]:
    """Yields records grouped by store, operation, chip, JAX version, and origin.

    Groups are in the order of their first records.
    """

    def place(row: tuple[str, Record]) -> tuple[str, str, str, str, str]:
        where, record = row
        return where, record.key.operation, record.key.hardware, record.environment.jax, record.origin

    by_group: dict[tuple[str, str, str, str, str], list[Record]] = {}
    for row in of:
        by_group.setdefault(place(row), []).append(row[1])
    groups = []
    for (where, operation, hardware, jax, origin), group in by_group.items():
        choices = compared([(r.winner.backend, r.winner.schedule) for r in group])
        origin = "tuned" if origin == "measured" else origin
        word = f"stale ({origin} with jax {jax})" if stale(group[0]) else f"{origin} with jax {jax}"
        heading = [f"{operation}, {hardware}, {where}: {word}", *choices.note]
        lines = [
            Row(
                format_problem(operation, record.key.problem),
                (seconds_text(record.winner.measurement.median_s), gain_text(record)),
                [schedule],
            )
            for record, schedule in zip(group, choices.texts, strict=True)
        ]
        groups.append((heading, lines))
    yield from ledger("problem, and its schedule", ("time", "vs XLA"), groups, width)
    yield ""
    if any(stale(record) for _, record in of):
        yield stale_line()
    if any(record.imported for _, record in of):
        yield unverified_line()
    yield "vs XLA: XLA's time over the schedule's. tie: within 1 %. undecided: the run-off was inconclusive."


def trials_table(trials: Sequence[Trial], record: Record | None, width: int) -> Iterator[RenderableType]:
    """Yields all trials.

    For each backend, the record's schedule, or the first one, is in full. Other schedules list only their differences.
    """
    choices = compared([(trial.backend, trial.schedule) for trial in trials], bases_of(record))
    unpredicted = without_prediction(trials, LIBRARY if record is None else record.library)
    rows = []
    for trial, choice in zip(trials, choices.texts, strict=True):
        failed = isinstance(trial.outcome, Failure)
        time = seconds_text(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else "failed"
        why = [first_line(str(trial.outcome))] if failed else []
        predicted = _predicted_text(trial.predicted_s, trial.backend in unpredicted)
        rows.append(Row(f"{trial.number:>3}  {choice}", (time, predicted), why))
    estimated = any(isinstance(trial.outcome, Measurement) and trial.outcome.estimated for trial in trials)
    yield from ledger("trial", ("estimated" if estimated else "time", "predicted"), [(choices.note, rows)], width)


# ------------------------------------------------------------------------------
# Results of searches, sweeps, calibrations and verifications.


def result_json(result: Result) -> Json:
    """Returns the result of one problem of a job as JSON; `state` is "tuned", "known" or "failed"."""
    values: Json = {"task": str(result.task), **picked(result, "state", "reason", "elapsed_s", "resumed")}
    problem = getattr(result.task, "problem", None)
    if result.before is not None:
        values["before"] = dataclasses.asdict(result.before)
        values["saved_s"] = saved_s(result)
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
        state = "estimated" if result.record is not None and result.record.estimated else result.state
        figures = [state, "", "", "", ""]
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
    if any(row.figures[0] == "estimated" for row in rows):
        yield "estimated: by the compiler, for an absent chip; nothing was measured"


def _gain(result: Result) -> str:
    """Formats the ratio of the time before to the time after.

    Empty if the time before was not measured. If the final comparison is inconclusive, the text is its state.
    """
    stands = _against_before(result)
    return "" if stands is None else ratio_text(stands.ratio) if stands.state == "ahead" else stands.state


def _against_before(result: Result) -> Standing | None:
    """Compares the fastest schedule with the one that calls used before; None if that was not measured."""
    before, record, after = result.before, result.record, result.entry
    if before is None or record is None or after is None or not before.measured:
        return None
    same = [e for e in record.entries if point_of(e.backend, e.schedule) == point_of(before.backend, before.schedule)]
    if after != record.winner or not same:  # the two were not measured in the same comparison
        ratio = before.seconds / after.measurement.median_s
        return Standing("ahead" if ratio >= 1 else "undecided", ratio)
    return Standing("ahead", 1.0) if same[0] == record.winner else standing(record, same[0])


def saved_s(result: Result) -> float | None:
    """Returns the seconds that a call saves by the search; 0 if no gain is sure, None if that was not measured."""
    stands = _against_before(result)
    if stands is None or result.entry is None:
        return None
    return result.entry.measurement.median_s * max(0.0, stands.ratio - 1) if stands.state == "ahead" else 0.0


def cost_text(of: Sequence[Result]) -> str:
    """Says what the searches of these results cost, and after how many calls they are repaid; "" if there was none."""
    searched = [result for result in of if result.state == "tuned"]
    if not searched:
        return ""
    cost_s = sum(result.elapsed_s for result in searched)
    known = [(gain_s, result.task) for result in searched if (gain_s := saved_s(result)) is not None]
    gain_s = sum(gain_s * getattr(task, "count", 1) for gain_s, task in known)
    one = len(of) == 1
    cost = f"The {'search' if one else 'searches'} took {seconds_text(cost_s)}"
    if gain_s:
        saved = f"{'saves' if one else 'save'} {seconds_text(gain_s)} per {'call' if one else 'round'}"
        times = f"{int(float(f'{cost_s / gain_s:.3g}')) + 1:,} {'calls' if one else 'rounds'}"
        each = "" if one else " In a round each problem is called once, or as often as the job counts."
        return f"{cost} and {saved}: repaid after {times}.{each}"
    if len(known) < len(searched):
        return f"{cost}. The gain is unknown: the schedule that calls used before was not measured."
    return f"{cost} and {'gains' if one else 'gain'} nothing: calls are as fast without {'it' if one else 'them'}."


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
        **key_json(record.key),
        **picked(verdict, "state", "reason"),
        "then_s": record.winner.measurement.median_s,
        "now_s": verdict.now.median_s if verdict.now else None,
        "then": dataclasses.asdict(record.environment),
        "rivals": [
            {
                **picked(rival, "role", "backend"),
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


def failure_lines(trials: Sequence[Trial], record: Record) -> list[str]:
    """Returns, for each backend in `record`, the number of failed schedules and their most frequent reason.

    Schedules with wrong results are among the notes of the record.
    """
    lines = []
    for backend in dict.fromkeys(entry.backend for entry in record.entries):
        tried = [trial for trial in trials if trial.backend == backend]
        if reasons := failures([trial for trial in tried if getattr(trial.outcome, "stage", "") != "verify"]):
            lines.append(
                f"{sum(reasons.values())} of {len(tried)} schedules of {backend} failed: {next(iter(reasons))}."
            )
    return lines
