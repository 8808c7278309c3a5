"""Records and their trials, as JSON and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scheduler.cli.terminal import Json, Row, labelled, ledger, table, texts
from scheduler.core import codec
from scheduler.core.records import LIBRARY, Entry, Failure, Key, Measurement, Record, Trial
from scheduler.core.text import digits, ratio_text, seconds_text
from scheduler.inspect.provenance import stale, stale_line, unverified_line
from scheduler.inspect.verdict import (
    bases_of,
    compared,
    first_line,
    gain_text,
    order_note,
    standing,
    without_prediction,
)
from search_spaces import format_problem

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from search_spaces.problem import Problem


def roofline_s(problem: Problem, hardware: Hardware) -> float:
    """Returns the roofline time of arithmetic and compulsory traffic, in seconds."""
    from scheduler.model.cost import CostModel

    return CostModel(hardware).lower_bound(problem)


def entry_json(entry: Entry, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    """Returns an entry as JSON, with times in seconds; with `problem` and `hardware`, also its use of the chip."""
    values: Json = {
        "backend": entry.backend,
        "version": entry.version,
        "schedule": dict(entry.schedule),
        "median_s": entry.measurement.median_s,
        "spread_s": entry.measurement.spread_s,
        "clock": entry.measurement.clock,
        "estimated": entry.measurement.estimated,
        "l2": entry.measurement.l2,
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
        "operation": record.key.operation,
        "problem": codec.problem_to_json(record.key.problem),
        "hardware": record.key.hardware,
        "estimated": record.estimated,
        "imported": dataclasses.asdict(record.imported) if record.imported else None,
        "stale": stale(record),
        "undecided": record.undecided,
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
        "notes": list(record.notes),
    }


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
    names = {"operation": key.operation, "problem": codec.problem_to_json(key.problem), "hardware": key.hardware}
    return {
        "where": where,
        **(names if record is None else record_json(record, problem, hardware)),
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
