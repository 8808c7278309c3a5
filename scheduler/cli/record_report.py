"""Records and their trials, as JSON objects and as lines and tables for a person."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scheduler.cli.layout import (
    Json,
    Row,
    compared,
    digits,
    first_line,
    labelled,
    ledger,
    seconds_text,
    table,
    texts,
)
from scheduler.cli.verdict_report import gain_text
from scheduler.core import codec
from scheduler.core.records import Entry, Failure, Key, Measurement, Record, Schedule, Trial, choice_text
from search_spaces import spelled

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from search_spaces.problem import Problem


def stale(record: Record) -> bool:
    """Whether it was measured with another minor version of JAX than the one installed here."""
    here = importlib.metadata.version("jax")
    return record.environment.jax.split(".")[:2] != here.split(".")[:2]


def stale_line() -> str:
    """What that means for calls."""
    return (
        f"stale: measured with another minor version of jax than the {importlib.metadata.version('jax')} that is here; "
        "served all the same, and `tile-scheduler verify` times it again"
    )


def roofline_s(problem: Problem, hardware: Hardware) -> float:
    """The time that arithmetic and compulsory traffic allow at best, seconds."""
    from scheduler.model.cost import CostModel

    return CostModel(hardware).lower_bound(problem)


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
        values["share_of_roofline"] = roofline_s(problem, hardware) / entry.measurement.median_s
    return values


def record_json(record: Record, problem: Problem | None = None, hardware: Hardware | None = None) -> Json:
    other = record.library_entry
    return {
        "operation": record.key.operation,
        "problem": codec.problem_to_json(record.key.problem),
        "hardware": record.key.hardware,
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
    """What a store keeps of a problem: without a record, only the trials of a search that did not end."""
    names = {"operation": key.operation, "problem": codec.problem_to_json(key.problem), "hardware": key.hardware}
    return {
        "where": where,
        **(names if record is None else record_json(record, problem, hardware)),
        "trials": [trial_json(trial) for trial in trials],
        "unfinished": len(unfinished),
    }


def entries(record: Record, problem: Problem | None, hardware: Hardware | None) -> Iterator[RenderableType]:
    """The winner, the runner-up and the best of each other backend, side by side, and their schedules."""
    made = table(
        "", "backend", "time", "spread", "TFLOP/s", "% of roofline", "predicted",
        numbers=("time", "spread", "TFLOP/s", "% of roofline", "predicted"),
    )  # fmt: skip
    # One constant row stands for every CPU: a share of its peaks tells a person nothing.
    rated = hardware is not None and not hardware.abilities.interpreted
    names = ["winner", "runner-up"] + [""] * (len(record.entries) - 2)
    for name, entry in zip(names, record.entries, strict=False):
        seen, time = entry_json(entry, problem, hardware), entry.measurement.median_s
        made.add_row(
            *texts(
                name,
                entry.backend,
                seconds_text(time),
                seconds_text(entry.measurement.spread_s),
                digits(seen["flops_per_s"] / 1e12) if "flops_per_s" in seen else "",
                f"{100 * seen['share_of_roofline']:.1f}" if "share_of_roofline" in seen and rated else "",
                seconds_text(entry.predicted_s),
            )
        )
    yield made
    shown = [(name, entry) for name, entry in zip(names, record.entries, strict=False) if entry.schedule]
    choices = compared([(entry.backend, entry.schedule) for _, entry in shown])
    if shown:
        yield ""
        yield labelled(zip((name for name, _ in shown), choices.texts, strict=True))
        yield from choices.note


def records(of: Sequence[tuple[str, Record]], width: int) -> Iterator[RenderableType]:
    """Records by where they are kept, of which operation and chip, and with which jax they were measured."""

    def place(row: tuple[str, Record]) -> tuple[str, str, str, str]:
        where, record = row
        return where, record.key.operation, record.key.hardware, record.environment.jax

    groups = []
    for (where, operation, hardware, jax), rows in itertools.groupby(sorted(of, key=place), place):
        group = [record for _, record in rows]
        choices = compared([(r.winner.backend, r.winner.schedule) for r in group])
        word = f"stale (tuned with jax {jax})" if stale(group[0]) else f"tuned with jax {jax}"
        heading = [f"{operation}, {hardware}, {where}: {word}", *choices.note]
        lines = [
            Row(
                spelled(operation, record.key.problem),
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
    yield "vs XLA: its time over the schedule's; a tie is within 1 %, undecided what the run-off could not tell"


def record_head(record: Record, *, trials_kept: bool) -> Iterator[str]:
    """Under what a record came about."""
    env = record.environment
    driver = f", driver {env.driver}" if env.driver else ""
    yield f"Measured {env.date} with jax {env.jax}{driver}{' (stale)' if stale(record) else ''}"
    versions = ", ".join(f"{backend} version {version}" for backend, version in record.versions.items())
    lost = "" if trials_kept else ", their times not kept beside the record"
    yield f"{record.tried} trials (budget {record.budget}{lost}) of {record.space} schedules; {versions}"
    if stale(record):
        yield stale_line()


def unfinished_text(trials: Sequence[Trial]) -> str:
    """How far a search came that did not end."""
    ran = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    said = ", none of which ran"
    if ran:
        best_s, _, best = min(ran)
        said = f", the best {seconds_text(best_s)}: {choice_text(best.backend, best.schedule)}"
    return f"cut short, or still searched: {len(trials)} trial{'' if len(trials) == 1 else 's'} kept{said}"


def trials_table(trials: Sequence[Trial], record: Record | None, width: int) -> Iterator[RenderableType]:
    """Every trial; of each backend the record's schedule, or the first, in full and the others by what differs."""
    bases: dict[str, tuple[str, Schedule]] = {}
    for entry in record.entries if record is not None else ():
        name = "the winner" if record is not None and entry == record.winner else f"the best {entry.backend}"
        if entry.schedule:
            bases.setdefault(entry.backend, (name, entry.schedule))
    choices = compared([(trial.backend, trial.schedule) for trial in trials], bases)
    rows = []
    for trial, choice in zip(trials, choices.texts, strict=True):
        failed = isinstance(trial.outcome, Failure)
        time = seconds_text(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else "failed"
        why = [first_line(str(trial.outcome))] if failed else []
        rows.append(Row(f"{trial.number:>3}  {choice}", (time, seconds_text(trial.predicted_s)), why))
    yield from ledger("trial", ("time", "predicted"), [(choices.note, rows)], width)
