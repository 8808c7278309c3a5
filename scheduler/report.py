"""What the command line prints: values of this project as JSON objects and as lines and tables for a person."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.record import (
    Calibration,
    Entry,
    Failure,
    Key,
    Measurement,
    Record,
    Schedule,
    Sweep,
    Trial,
    choice_text,
    schedule_text,
)
from search_spaces import spelled

if TYPE_CHECKING:
    from scheduler.answer import Answer
    from scheduler.explain import Access, Account, Ranked
    from scheduler.hardware import Hardware
    from scheduler.jobs import Result
    from scheduler.reverify import Verdict as Reverified
    from search_spaces.kernel import Problem

Json = dict[str, Any]

# Of a list: wider lines are harder to follow than schedules that are told in two.
WIDEST = 150


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def difference(schedule: Schedule, base: Schedule) -> str:
    """What of `schedule` is not as in `base`; a field that only `base` has is at its default."""
    told = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(told | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


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


def library(record: Record) -> Entry | None:
    """XLA's entry in the record, None where it did not run; a record does not say which kernel is the library."""
    return record.best(frozenset({"xla"}))


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `numbers` are set flush right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        number = name in numbers
        made.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    return made


def texts(*cells: object) -> list[Text]:
    """Cells in which nothing is markup."""
    return [Text(str(cell)) for cell in cells]


def labelled(rows: Iterable[tuple[object, object]]) -> Table:
    """Words beside what they stand for, which is folded under itself."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for label, text in rows:
        made.add_row(*texts(label, text))
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a `ledger`: what it is of, figures, and lines that stand under it."""

    of: str
    figures: Sequence[str]
    under: Sequence[str] = ()


def ledger(
    title: str, columns: Sequence[str], groups: Iterable[tuple[Sequence[str], Sequence[Row]]], width: int
) -> Iterator[RenderableType]:
    """Rows of which each takes lines of its own, with figures flush right, in groups below lines that head them."""
    groups, width = list(groups), min(width, WIDEST)
    figures = zip(columns, *(row.figures for _, rows in groups for row in rows), strict=True)
    widths = [max(map(len, column)) for column in figures]

    def line(first: str, cells: Sequence[str]) -> Table:
        made = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        made.width = width
        made.add_column(ratio=1, overflow="fold")
        for each in widths:
            made.add_column(justify="right", width=each, no_wrap=True)
        made.add_row(*texts(first, *cells))
        return made

    yield line(title, columns)
    yield Text("\u2500" * width)
    for number, (heading, rows) in enumerate(groups):
        yield from ([""] if number else []) + list(heading)
        for row in rows:
            yield line(row.of, row.figures)
            yield from (Padding(Text(text, overflow="fold"), (0, 0, 0, 2)) for text in row.under if text)


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
        "unconfirmed": stale(record),
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


def entries(record: Record, problem: Problem | None, hardware: Hardware | None) -> Iterator[RenderableType]:
    """The winner, the runner-up and the best of each other backend, side by side, and their schedules."""
    made = table(
        "", "backend", "time", "spread", "TFLOP/s", "of bound", "model said",
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
                entry.backend,
                seconds_text(time),
                seconds_text(entry.measurement.spread_s),
                _digits(seen["flops_per_s"] / 1e12) if "flops_per_s" in seen else "",
                f"{seen['share_of_bound']:.1%}" if "share_of_bound" in seen and rated else "",
                seconds_text(entry.predicted_s),
            )
        )
    yield made
    told = [(name or entry.backend, entry) for name, entry in zip(names, record.entries, strict=False)]
    if rows := list(_schedules((name, entry.backend, entry.schedule) for name, entry in told)):
        yield ""
        yield labelled(rows)


def _schedules(choices: Iterable[tuple[object, str, Schedule]]) -> Iterator[tuple[object, str]]:
    """Label and schedule: of each backend the first in full, the others by what differs from it."""
    first: dict[str, tuple[object, Schedule]] = {}
    for label, backend, schedule in choices:
        if backend in first:
            base, of = first[backend]
            yield label, f"{difference(schedule, of)} (else as {base})"
        elif schedule:
            first[backend] = label, schedule
            yield label, schedule_text(schedule)


@dataclasses.dataclass(frozen=True)
class Standing:
    """A winner beside another entry of its record.

    Attributes:
      state: "ahead" beyond doubt; "tie", within 1 %; or "undecided".
      ratio: the other's time over the winner's: in the median round of the run-off, where the record tells.
      low, high: the interval of that, minus one; None where the record does not tell.
    """

    state: Literal["ahead", "tie", "undecided"]
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """Where the other one is, in words."""
        return "" if self.low is None or self.high is None else interval_text(self.low, self.high)


def standing(record: Record, other: Entry) -> Standing:
    """What the run-off of `record` says of its winner and `other`."""
    from scheduler.race import TIE, margin
    from scheduler.text import label_of

    sure, winner = record.confidence, record.winner
    tied = label_of(other.backend, other.schedule) in sure.tied
    found = margin(winner.measurement, other.measurement, sure.rounds)
    if found is None or not math.isfinite(found.low):
        ratio = other.measurement.median_s / winner.measurement.median_s
        near = tied or abs(ratio - 1) <= TIE
        return Standing("tie" if near else "ahead" if ratio > 1 and found is None else "undecided", ratio)
    near = tied or (found.low <= 0 and found.low >= -TIE and found.high <= TIE)
    state: Literal["ahead", "tie", "undecided"] = "tie" if near else "ahead" if found.low > 0 else "undecided"
    return Standing(state, 1 + found.middle, found.low, found.high)


def interval_text(low: float, high: float) -> str:
    """Where something lies whose time is longer by `low` to `high`, as shares: never a negative one."""
    slower, faster = max(high, 0.0), max(-low, 0.0)
    if max(slower, faster) < 5e-5:
        return "as fast"
    least, most = (f"{end:.2%}" for end in sorted((abs(low), abs(high))))
    if low > 0 or high < 0:
        return f"{least if least == most else f'{least} to {most}'} {'slower' if low > 0 else 'faster'}"
    if faster < 5e-5:
        return f"up to {slower:.2%} slower"
    if slower < 5e-5:
        return f"up to {faster:.2%} faster"
    return f"between {faster:.2%} faster and {slower:.2%} slower"


def gain_text(record: Record) -> str:
    """XLA's time over the winner's in short: a ratio only where it is beyond doubt."""
    xla = library(record)
    if xla is None:
        return "no XLA"
    rival = _rival(record) if record.winner == xla else xla
    if rival is None:
        return "1.00x"
    stands = standing(record, rival)
    if stands.state != "ahead":
        return stands.state
    return "1.00x" if record.winner == xla else f"{stands.ratio:.2f}x"


def _rival(record: Record) -> Entry | None:
    """The best entry that is not the library's."""
    return next((entry for entry in record.entries if entry is not library(record)), None)


def verdict(record: Record) -> list[str]:
    """The winner against XLA, which backends never ran, why the search ended, and how sure that is, as far as known."""
    failed = [f"{lost}." for lost in record.failed]
    return [line for line in (_against_xla(record), *failed, _ended(record), _confidence(record)) if line]


def _ended(record: Record) -> str:
    if not record.stopped:
        return ""
    left = f"; {record.excluded} untried ones cannot win, by their lower bound" if record.excluded else ""
    return f"The search ended: {record.stopped}{left}."


def _against_xla(record: Record) -> str:
    other = library(record)
    if other is None:
        return "XLA did not run."
    if record.winner == other:
        if (rival := _rival(record)) is None:
            return "XLA is the only backend that ran."
        stands = standing(record, rival)
        if stands.state == "undecided":
            medians = f"takes {stands.ratio:.3g} times as long by the medians, which decides nothing"
            where = f"is {stands.interval}" if stands.interval else medians
            return f"Undecided, and XLA answers: the best Pallas schedule {where}."
        said = "A tie within 1 % goes to XLA" if stands.state == "tie" else "XLA wins"
        return f"{said}; the best Pallas schedule takes {stands.ratio:.3g} times as long."
    stands, xla = standing(record, other), f"XLA ({seconds_text(other.measurement.median_s)})"
    if stands.state == "ahead":
        digits = ".3f" if stands.ratio < 1.1 else ".3g"
        return f"{stands.ratio:{digits}} times as fast as {xla}."
    if stands.state == "tie":
        return f"As fast as {xla}, within 1 %."
    return f"Undecided against {xla}" + (f", which is {stands.interval}." if stands.interval else ".")


def _confidence(record: Record) -> str:
    sure = record.confidence
    if not sure.rounds:
        return ""
    samples = len(record.winner.measurement.samples_s)
    said = [f"Run-off: {sure.rounds} rounds, {samples} samples of the winner, L2 {record.winner.measurement.l2}"]
    where = ""
    if sure.margin_low is not None and sure.margin_high is not None:
        where = f"the runner-up is {interval_text(sure.margin_low, sure.margin_high)}"
    if record.undecided:
        said.append(f"undecided{f': {where}' if where else ''}")
    elif where:
        said.append(where)
    if sure.tied:
        others = len(sure.tied) - 1
        said.append(f"tied with {others} other{'s' if others > 1 else ''}, within 1 %")
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
    yield f"{sweep.operation} {spelled(sweep.operation, sweep.problem)} on {sweep.kind}"
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


def results(of: Sequence[Result], width: int) -> Iterator[RenderableType]:
    """Before and after, a row for each problem of a job."""
    told = _abbreviated([(r.entry.backend, r.entry.schedule) for r in of if r.entry is not None], width)
    schedules = iter(told.texts)
    rows = []
    for result in of:
        figures = [result.state, "", "", "", ""]
        if result.entry is not None:
            figures[2] = seconds_text(result.entry.measurement.median_s)
            if result.before is not None:
                figures[1] = ("" if result.before.measured else "~") + seconds_text(result.before.seconds)
                figures[4] = _gain(result)
            if result.library is not None:
                figures[3] = seconds_text(result.library.measurement.median_s)
        under = [next(schedules)] if result.entry is not None else []
        rows.append(Row(str(result.task), figures, [*under, *map(str, result.broken), result.reason]))
    yield from ledger("problem, and its schedule", ("", "before", "after", "XLA", "gain"), [(told.base, rows)], width)
    if any(row.figures[1].startswith("~") for row in rows):
        yield "~: a prediction"


def _gain(result: Result) -> str:
    """The time before over the time after; no ratio where that was not measured, or the run-off could not tell."""
    before, record, after = result.before, result.record, result.entry
    if before is None or record is None or after is None or not before.measured:
        return ""
    same = [e for e in record.entries if (e.backend, dict(e.schedule)) == (before.backend, dict(before.schedule))]
    if after != record.winner or not same:  # measured apart
        ratio = before.seconds / after.measurement.median_s
        return f"{ratio:.2f}x" if ratio >= 1 else "undecided"
    if same[0] == record.winner:
        return "1.00x"
    stands = standing(record, same[0])
    return f"{stands.ratio:.2f}x" if stands.state == "ahead" else stands.state


@dataclasses.dataclass(frozen=True)
class _Abbreviated:
    """Choices as text; `base` says what their schedules have in common where the texts leave that out."""

    texts: Sequence[str]
    base: Sequence[str] = ()


def _abbreviated(choices: Sequence[tuple[str, Schedule]], width: int) -> _Abbreviated:
    """In full, or, if one of them is wider than `width`, without what most schedules of its backend have in common."""
    full = [choice_text(backend, schedule) for backend, schedule in choices]
    if max(map(len, full), default=0) <= width - 2:
        return _Abbreviated(full)
    usual: dict[str, Schedule] = {}
    for backend in dict.fromkeys(backend for backend, _ in choices):
        of = [schedule for name, schedule in choices if name == backend]
        counts = {name: collections.Counter(schedule.get(name) for schedule in of) for name in of[0]}
        common = {name: count.most_common(1)[0] for name, count in counts.items() if None not in count}
        if shared := {name: value for name, (value, count) in common.items() if value is not None and count > 1}:
            usual[backend] = shared
    short = [
        f"{backend} {difference(schedule, usual[backend])}" if backend in usual else choice_text(backend, schedule)
        for backend, schedule in choices
    ]
    base = "; ".join(choice_text(backend, schedule) for backend, schedule in usual.items())
    return _Abbreviated(short, [f"where a schedule is silent: {base}"])


def records(of: Sequence[tuple[str, Record]], width: int) -> Iterator[RenderableType]:
    """Records by where they are kept, of which operation and chip, and with which jax they were measured."""

    def place(row: tuple[str, Record]) -> tuple[str, str, str, str]:
        where, record = row
        return where, record.key.operation, record.key.hardware, record.environment.jax

    groups = []
    for (where, operation, hardware, jax), rows in itertools.groupby(sorted(of, key=place), place):
        group = [record for _, record in rows]
        told = _abbreviated([(r.winner.backend, r.winner.schedule) for r in group], min(width, WIDEST))
        word = f"stale (tuned with jax {jax})" if stale(group[0]) else f"tuned with jax {jax}"
        heading = [f"{operation}, {hardware}, {where}: {word}", *told.base]
        lines = [
            Row(
                spelled(operation, record.key.problem),
                (seconds_text(record.winner.measurement.median_s), gain_text(record)),
                [schedule],
            )
            for record, schedule in zip(group, told.texts, strict=True)
        ]
        groups.append((heading, lines))
    yield from ledger("problem, and its schedule", ("time", "vs XLA"), groups, width)
    yield ""
    if any(stale(record) for _, record in of):
        yield stale_line()
    yield "vs XLA: its time over the schedule's; a tie is within 1 %, undecided what the run-off could not tell"


def unfinished_text(trials: Sequence[Trial]) -> str:
    """How far a search came that did not end."""
    ran = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    said = ", none of which ran"
    if ran:
        best_s, _, best = min(ran)
        said = f", the best {seconds_text(best_s)}: {choice_text(best.backend, best.schedule)}"
    return f"cut short, or still searched: {len(trials)} trial{'' if len(trials) == 1 else 's'} kept{said}"


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
    told = {"operation": key.operation, "problem": json.loads(key.problem), "hardware": key.hardware}
    return {
        "where": where,
        **(told if record is None else record_json(record, problem, hardware)),
        "trials": [trial_json(trial) for trial in trials],
        "unfinished": len(unfinished),
    }


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


def reverified_json(verdict: Reverified) -> Json:
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


def reverified(verdicts: Sequence[Reverified], width: int) -> Iterator[RenderableType]:
    """What became of each stored winner, a row each."""
    states = {"holds": "holds", "slower": "no longer fastest", "broken": "cannot be served", "elsewhere": "not timed"}
    told = _abbreviated([(v.record.winner.backend, v.record.winner.schedule) for v in verdicts], min(width, WIDEST))
    rows = []
    for verdict, schedule in zip(verdicts, told.texts, strict=True):
        record = verdict.record
        then, now = seconds_text(record.winner.measurement.median_s), verdict.now
        rows.append(
            Row(
                f"{record.key.operation} {spelled(record.key.operation, record.key.problem)}",
                (record.environment.jax, then, seconds_text(now.median_s) if now else ""),
                [schedule, states[verdict.state] + (f": {verdict.reason}" if verdict.reason else "")],
            )
        )
    yield from ledger("problem, and its winner", ("jax then", "then", "now"), [(told.base, rows)], width)


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


def trials_told(trials: Sequence[Trial], record: Record | None, width: int) -> Iterator[RenderableType]:
    """Every trial; of each backend the record's schedule, or the first, is what the others are told by."""
    base: dict[str, tuple[str, Schedule]] = {}
    for entry in record.entries if record is not None else ():
        name = "the winner" if record is not None and entry == record.winner else f"the best {entry.backend}"
        base.setdefault(entry.backend, (name, entry.schedule))
    rows = []
    for trial in trials:
        failed = isinstance(trial.outcome, Failure)
        time = seconds_text(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else "failed"
        choice = choice_text(trial.backend, trial.schedule)
        if trial.backend not in base:
            base[trial.backend] = f"trial {trial.number}", trial.schedule
        elif trial.schedule:
            choice = f"{trial.backend} {difference(trial.schedule, base[trial.backend][1])}"
        why = [_first_line(str(trial.outcome))] if failed else []
        rows.append(Row(f"{trial.number:>3}  {choice}", (time, seconds_text(trial.predicted_s)), why))
    names = [name for name, schedule in base.values() if schedule]
    heading = [f"schedules are told by what differs from {' and '.join(names)}"] if names else []
    yield from ledger("trial", ("time", "model said"), [(heading, rows)], width)


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


def account_parts(account: Account, width: int, *, trials_kept: bool = True) -> Iterator[RenderableType]:
    """One kernel's schedules, counted down from all of them, and the model's first with its terms.

    Args:
      trials_kept: whether the trials of the problem's record are here; else nobody can tell which were tried.
    """
    title = f"{account.backend}, version {account.version}"
    if account.refused:
        yield f"{title}: {account.refused}"
        return
    yield f"{title}: {account.size} schedule{'' if account.size == 1 else 's'}"
    counts = Table.grid(padding=(0, 2))
    counts.add_column(justify="right", no_wrap=True)
    counts.add_column(overflow="fold")
    for reason, count in account.dropped.items():
        counts.add_row(*texts(f"-{count}", reason))
    counts.add_row(*texts(f"={account.untried + len(account.tried)}", "legal"))
    if trials_kept:
        counts.add_row(*texts(len(account.tried), "of them tried"))
        for reason, count in failures(account.tried).items():
            counts.add_row(*texts(count, f"of these failed: {reason}"))
        counts.add_row(*texts(account.untried, "not tried"))
    yield counts
    if any(ranked.terms for ranked in account.first):
        yield ""
        yield from _first_choices(account.first, width)
    if account.fitted:
        yield account.fitted


def _first_choices(first: Sequence[Ranked], width: int) -> Iterator[RenderableType]:
    """The model's first, a column each, with what their times are made of; then their schedules."""
    rows: dict[str, Sequence[str]] = {
        "predicted": [seconds_text(ranked.predicted_s) for ranked in first],
        "on-chip": [f"{ranked.onchip_bytes / 1024:.1f} KiB" for ranked in first],
    }
    for name in dict.fromkeys(name for ranked in first for name, seconds in ranked.terms.items() if seconds):
        rows[name] = [seconds_text(ranked.terms[name]) for ranked in first]
    if any(ranked.access for ranked in first):
        accesses = [_access_texts(ranked.access) if ranked.access else ("", "", "") for ranked in first]
        rows |= dict(zip(("accesses", "wanted", "each"), zip(*accesses, strict=True), strict=True))
    title = "the model's first"
    widest = max(len(cell) for cells in rows.values() for cell in cells)
    fitting = max(1, (width - len(title)) // (widest + 3))
    for start in range(0, len(first), fitting):
        numbers = [str(number + 1) for number in range(start, min(start + fitting, len(first)))]
        made = table(title, *numbers, numbers=numbers)
        for name, cells in rows.items():
            made.add_row(*texts(name, *cells[start : start + fitting]))
        yield made
    yield labelled(_schedules((number + 1, "", ranked.schedule) for number, ranked in enumerate(first)))


def _access_texts(access: Access) -> tuple[str, str, str]:
    return f"{access.transactions:.3g}", f"{access.coalescing:.0%}", f"{access.bytes:.0f} B"


def failures(trials: Sequence[Trial]) -> Mapping[str, int]:
    """How many trials failed, by reason; the most frequent first."""
    reasons = (_first_line(str(trial.outcome)) for trial in trials if isinstance(trial.outcome, Failure))
    return dict(collections.Counter(reasons).most_common())


def failed_beside(trials: Sequence[Trial], record: Record) -> list[str]:
    """Of each backend that `record` has a schedule of, how many others failed, and what the most of them say."""
    said = []
    for backend in dict.fromkeys(entry.backend for entry in record.entries):
        tried = [trial for trial in trials if trial.backend == backend]
        if reasons := failures(tried):
            said.append(
                f"{sum(reasons.values())} of {len(tried)} schedules of {backend} failed: {next(iter(reasons))}."
            )
    return said


def _first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
