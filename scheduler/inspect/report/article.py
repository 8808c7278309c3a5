"""The overview of a report, and its article on each record: why this schedule, how certain, how to tune it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element, tostring

from scheduler.core.records import Entry, Failure, Key, Measurement, Record, Trial, choice_text, schedule_text
from scheduler.core.text import digits, ratio_text, seconds_text, share_text
from scheduler.inspect.case import of_record
from scheduler.inspect.explain import Account
from scheduler.inspect.provenance import record_head, stale, unfinished_text
from scheduler.inspect.report.content import Child, Picture, Pictures, RecordDetails, element, extend, shown, table
from scheduler.inspect.verdict import (
    against_library,
    bases_of,
    compared,
    failures,
    first_line,
    gain_text,
    order_note,
    standing,
    verdict,
    without_prediction,
)

# ------------------------------------------------------------------------------
# The overview of a report: a table of records with filters and sorting, and a list of unfinished searches.

# For each column: its name, a description of its values, and its initial sort order.
_COLUMNS = (
    ("operation", "", "ascending"),
    ("problem", "", "ascending"),
    ("chip", "", "ascending"),
    ("answer", "the kernel that won", "ascending"),
    ("time", "median of the final comparison", "ascending"),
    ("vs XLA", "XLA's time over it, where it is beyond doubt", "descending"),
    ("TFLOP/s", "", "descending"),
    ("TB/s", "compulsory traffic over the time", "descending"),
    ("% of roofline", "", "descending"),
    ("measured", "UTC", "descending"),
)
_NOTES = (
    "vs XLA: its time over the schedule's; a tie is within 1 %, undecided what the final comparison could not tell.",
    "% of roofline: the larger of FLOPs over the peak rate and compulsory traffic over the memory bandwidth, over the "
    "time; above 100 where operands are found in a cache.",
)
_FIGURES = ("time", "vs XLA", "TFLOP/s", "TB/s", "% of roofline")


def outcome(record: Record) -> tuple[str, float | None]:
    """Returns the result against XLA as short text, used as a filter value, and the gain.

    The gain is XLA's time over the winner's, 1 if not significant or if XLA won; None if XLA did not run.
    """
    if record.library_entry is None:
        return "XLA did not run", None
    stands = against_library(record)
    if stands is not None and stands.state != "ahead":
        return ("undecided" if stands.state == "undecided" else "a tie"), 1.0
    if stands is None or record.winner == record.library_entry:
        return "XLA answers", 1.0
    return "faster than XLA", stands.ratio


_FILTERS: Mapping[str, Callable[[RecordDetails], str]] = {
    "operation": lambda details: details.record.key.operation,
    "chip": lambda details: details.record.key.hardware,
    "dtype": lambda details: details.dtype,
    "against XLA": lambda details: outcome(details.record)[0],
    "kept in": lambda details: details.where,
    "times": lambda details: _times(details.record),
}


def overview(
    records: Sequence[tuple[str, RecordDetails]], cut: Iterable[tuple[str, Key, Sequence[Trial]]], pictures: Pictures
) -> Element:
    """Returns the table of records with links to their articles, its filters, and the unfinished searches."""
    details = [one for _, one in records]
    several = {name: len({pick(one) for one in details}) > 1 for name, pick in _FILTERS.items()}
    head = (
        element(
            "th",
            element("button", name, type="button", title=title or None, data_first=first),
            scope="col",
            class_=_class(name),
        )
        for name, title, first in _COLUMNS
    )
    table = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *(_row(ident, one) for ident, one in records)),
        id="records",
        class_="" if several["chip"] else "one-chip",
    )
    made = element("section", id="list")
    if pictures.of_all:
        summary = element("summary", "Picture: against XLA, under the roofline")
        extend(made, [element("details", summary, *shown(pictures.of_all))])
    elif records and pictures.missing:
        extend(made, [element("p", pictures.missing, class_="faint")])
    extend(made, [_filters(details), element("div", table, class_="scrolls")])
    if not records:
        extend(made, [element("p", "No record is stored.", class_="empty")])
    else:
        extend(made, [element("p", "No record has all of that.", class_="empty", id="none", hidden=True)])
    extend(made, (element("p", note, class_="faint") for note in _NOTES))
    lines = [element("li", f"{key}, {where}: {unfinished_text(trials)}") for where, key, trials in cut]
    if lines:
        extend(made, [element("h2", "Searches that did not end"), element("ul", *lines)])
    return made


def _filters(details: Sequence[RecordDetails]) -> Element:
    """Returns a search box, and a menu for each property in which records differ. They are hidden without a script."""
    fields = [
        element(
            "label",
            element("span", "find"),
            element("input", type="search", id="words", placeholder="m=4096 gelu", autocomplete="off"),
        )
    ]
    for name, pick in _FILTERS.items():
        values = sorted({pick(one) for one in details})
        if len(values) > 1:
            options = (element("option", value or "(none)", value=f"={value}") for value in values)
            menu = element("select", element("option", "any", value=""), *options, data_field=name.split()[0])
            fields.append(element("label", element("span", name), menu))
    fields.append(element("button", "clear", type="reset"))
    count = element("output", f"{len(details)} records", id="count", aria_live="polite")
    return element("form", *fields, count, id="filters", hidden=True)


def _row(ident: str, details: RecordDetails) -> Element:
    record, case, time_s = details.record, details.case, details.record.winner.measurement.median_s
    share = None if details.roofline_s is None else 100 * details.roofline_s / time_s
    against, gain = outcome(record)
    cells: dict[str, Child] = {
        "operation": record.key.operation,
        "problem": element("a", details.problem_text, href=f"#{ident}"),
        "chip": record.key.hardware,
        "answer": record.winner.backend,
        "time": figure(time_s, seconds_text(time_s)),
        "vs XLA": figure(gain, gain_text(record)),
        "TFLOP/s": _rate(case.problem.flops / time_s if case else None),
        "TB/s": _rate(case.problem.bytes_moved / time_s if case else None),
        "% of roofline": None if share is None else figure(share, f"{share:.1f}"),
        "measured": element("time", record.environment.date[:10], datetime=record.environment.date),
    }
    row = element(
        "tr",
        data_operation=record.key.operation,
        data_chip=record.key.hardware,
        data_dtype=details.dtype,
        data_against=against,
        data_kept=details.where,
        data_times=_times(record),
        data_words=f"{schedule_text(record.winner.schedule)} {details.where} {against}",
    )
    for name, cell in cells.items():
        row.append(element("td", cell, class_=_class(name)))
    row[1].set("data-operation", record.key.operation)  # shown there if the screen has no room for its column
    measured = row[-1]
    if stale(record):
        extend(measured, [" ", element("span", "stale", class_="badge", title=f"with jax {record.environment.jax}")])
    if record.estimated:
        extend(measured, [" ", element("span", "estimated", class_="badge", title="by the compiler: nothing ran")])
    if record.imported:
        extend(measured, [" ", element("span", "imported", class_="badge", title="not verified on this machine")])
    return row


def _times(record: Record) -> str:
    return "estimated" if record.estimated else "measured"


def figure(value: float | None, text: str) -> Element:
    """Returns a formatted number, with the value to sort by."""
    return element("data", text, value="" if value is None else repr(value))


def _rate(per_s: float | None) -> Element | None:
    return None if per_s is None else figure(per_s, digits(per_s / 1e12))


def _class(name: str) -> str:
    """Returns the class of a column in the style sheet and the script."""
    own = {"vs XLA": "gain", "% of roofline": "share", "TFLOP/s": "flops", "TB/s": "bytes"}.get(name, name)
    return f"{own} figure" if name in _FIGURES else own


def article(ident: str, details: RecordDetails, pictures: Sequence[Picture], missing: str) -> Element:
    """Returns the article on one record. `missing` explains why there are no plots, if any."""
    record = details.record
    made = element(
        "article",
        element(
            "nav",
            element("a", "All records", href="#list"),
            element("a", "previous", class_="previous", hidden=True),
            element("a", "next", class_="next", hidden=True),
        ),
        element("h2", f"{record.key.operation} ", element("span", details.problem_text)),
        element("p", f"on {record.key.hardware}; kept in: {details.where}", class_="faint"),
        _figures(details),
        id=ident,
        tabindex="-1",
    )
    parts = {
        "Why this schedule": _why(details),
        "Confidence": _sure(record),
        "Comparison": _entries(details),
        "Where the schedules went": _accounts(details),
        "Pictures": [*shown(pictures), *([element("p", missing)] if missing else [])],
        "Trials": _trials(details),
        "Once more": _commands(details),
    }
    for heading, content in parts.items():
        if content := list(content):
            extend(made, [element("section", element("h3", heading), *content)])
    return made


def record_html(record: Record) -> str:
    """Returns the key figures, the comparison and the confidence of a record as HTML, for a notebook."""
    details = RecordDetails("", record, case=of_record(record))
    title = f"{record.key.operation} {details.problem_text} on {record.key.hardware}"
    lines = (element("p", line) for line in record_head(record, trials_kept=True))
    made = element("div", element("b", title), _figures(details), *_entries(details), *_sure(record), *lines)
    return tostring(made, encoding="unicode", method="html")


def _figures(details: RecordDetails) -> Element:
    """Returns the key figures."""
    record, case, time_s = details.record, details.case, details.record.winner.measurement.median_s
    shown = {"estimated time" if record.estimated else "time": seconds_text(time_s), "against XLA": gain_text(record)}
    if shown["against XLA"] == "1.00x":
        shown["against XLA"], _ = outcome(record)
    if case is not None:
        shown["rate"] = f"{digits(case.problem.flops / time_s / 1e12)} TFLOP/s"
        shown["traffic"] = f"{digits(case.problem.bytes_moved / time_s / 1e12)} TB/s"
    if details.roofline_s is not None:
        shown[f"of the roofline ({details.bound})"] = f"{100 * details.roofline_s / time_s:.1f} %"
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in shown.items()),
        class_="figures",
    )


def _why(details: RecordDetails) -> Iterator[Element]:
    record, winner = details.record, details.record.winner
    yield element("p", " ".join(_story(details)))
    yield element("p", element("code", choice_text(winner.backend, winner.schedule)))
    if isinstance(details.held, str):
        yield element("p", f"Calls do not get it: {details.held}.", class_="warning")
    yield from (element("p", line, class_="faint") for line in record_head(record, trials_kept=bool(details.trials)))


def _story(details: RecordDetails) -> Iterator[str]:
    """Yields sentences that lead from the whole space to the winner."""
    record = details.record
    size = sum(account.size for account in details.accounts)
    legal = sum(len(account.ranks) for account in details.accounts)
    if details.accounts:
        yield f"Of {_counted(size, 'schedule')}, {size - legal:,} break a rule or do not fit; {legal:,} are legal."
    else:
        yield f"The space had {_counted(record.space, 'schedule')}."
    left = f", and {record.excluded:,} more could not win by their lower bound" if record.excluded else ""
    yield f"The search tried {record.tried:,} of them{left}."
    if details.rank is not None and details.rank[1] > 1:
        place, among = details.rank
        yield f"The model had ranked the winner {_place(place)} of the {among:,} of its kernel."
    others = len(record.entries) - 1
    if record.confidence.rounds and others:
        opponents = "the other" if others == 1 else f"the {others} others below"
        yield f"It met {opponents} in {record.confidence.rounds} rounds of a final comparison."


def _sure(record: Record) -> Iterator[Element]:
    yield from (element("p", line) for line in verdict(record))
    if tied := record.confidence.tied:
        lines = (element("li", element("code", label)) for label in tied)
        summary = element("summary", f"The {len(tied)} that are equally fast, within 1 %")
        yield element("details", summary, element("ol", *lines))


def _entries(details: RecordDetails) -> Iterator[Element]:
    """Yields a table of the winner, the runner-up and the best of each other backend."""
    record, case = details.record, details.case
    shown = [(entry.backend, entry.schedule) for entry in record.entries]
    choices = compared(shown)
    unpredicted = without_prediction(record.entries, record.library)
    names = ["winner", "runner-up"] + [""] * (len(record.entries) - 2)
    columns = ["", "kernel and schedule", "vs the winner", "estimated" if record.estimated else "time"]
    columns += ["spread", "TFLOP/s", "% of roofline", "predicted", "off"]
    rows = []
    for name, entry, choice in zip(names, record.entries, choices.texts, strict=False):
        time_s = entry.measurement.median_s
        rows.append(
            (
                name,
                element("code", choice),
                standing(record, entry).interval if entry != record.winner else "",
                seconds_text(time_s),
                seconds_text(entry.measurement.spread_s),
                digits(case.problem.flops / time_s / 1e12) if case else "",
                f"{100 * details.roofline_s / time_s:.1f}" if details.roofline_s is not None else "",
                *(("", "") if entry.backend in unpredicted else _prediction(entry)),
            )
        )
    yield table(None, columns, rows, numbers=6)
    yield from (element("p", f"{line}.", class_="faint") for line in choices.note)
    if note := order_note(record):
        yield element("p", note, class_="faint")


def _prediction(entry: Entry) -> tuple[str, str]:
    """Returns the predicted time and its relative error."""
    ratio = entry.predicted_s / entry.measurement.median_s
    off = f"{'-' if ratio < 1 else '+'}{share_text(abs(ratio - 1))}" if ratio < 10 else ratio_text(ratio)
    return seconds_text(entry.predicted_s), off


def _accounts(details: RecordDetails) -> Iterator[Element]:
    if details.unexplained:
        yield element("p", f"Not known here: {details.unexplained}.")
        return
    now, then = sum(account.size for account in details.accounts), details.record.space
    if now != then:
        yield element("p", f"As today's kernels count; the search counted {_counted(then, 'schedule')}.")
    for account in details.accounts:
        if account.refused:
            yield element("p", element("b", account.backend), f", version {account.version}: {account.refused}.")
        elif account.size > 1:
            yield _funnel(account, bool(details.trials))
            if any(ranked.terms for ranked in account.first):
                yield from _predictions(account)
            if account.fitted:
                yield element("p", f"{account.fitted}.", class_="faint")
        else:
            yield element("p", element("b", account.backend), f", version {account.version}: one schedule.")


def _funnel(account: Account, trials_kept: bool) -> Element:
    """Returns a table of reasons and remaining schedules, with bars on a logarithmic scale."""
    left = account.size
    rows: list[tuple[Child, ...]] = [
        ("", f"schedules of {account.backend}, version {account.version}", *_left(left, left))
    ]
    for reason, count in account.dropped.items():
        left -= count
        rows.append((f"\u2212{count:,}", reason, *_left(left, account.size)))
    if trials_kept:
        tried = len(account.tried)
        rows.append((f"\u2212{account.untried:,}", "legal, and not tried", *_left(tried, account.size)))
        for reason, count in failures(account.tried).items():
            tried -= count
            rows.append((f"\u2212{count:,}", f"failed: {reason}", *_left(tried, account.size)))
    rows = [(reason, dropped, count, bar) for dropped, reason, count, bar in rows]
    return table(None, ["why", "dropped", "left", ""], rows, numbers=3)


def _left(left: int, size: int) -> tuple[str, Element]:
    share = math.log1p(left) / math.log1p(size) if size else 0.0
    bar = element("rect", width=f"{100 * share:.1f}", height="8")
    return f"{left:,}", element(
        "svg", bar, viewBox="0 0 100 8", preserveAspectRatio="none", class_="bar", aria_hidden="true"
    )


def _predictions(account: Account) -> Iterator[Element]:
    """Yields a table of the terms of the top predictions and the winner, and a list of their schedules."""
    winner = [ranked for ranked in account.asked if ranked not in account.first]
    shown = [*account.first, *winner]
    names = [
        *map(_place, range(1, len(account.first) + 1)),
        *(f"winner, {_place(account.rank(ranked.schedule))}" for ranked in winner),
    ]
    rows: list[tuple[Child, ...]] = [
        ("predicted", *(seconds_text(ranked.predicted_s) for ranked in shown)),
        ("on-chip memory", *(f"{ranked.onchip_bytes / 1024:.1f} KiB" for ranked in shown)),
    ]
    for name in dict.fromkeys(name for ranked in shown for name, seconds in ranked.terms.items() if seconds):
        rows.append((name, *(seconds_text(ranked.terms[name]) for ranked in shown)))
    yield table(f"Top predictions of {account.backend}", ["", *names], rows, numbers=len(shown))
    choices = compared([(account.backend, ranked.schedule) for ranked in shown])
    lines = (element("li", f"{name}: ", element("code", text)) for name, text in zip(names, choices.texts, strict=True))
    yield element("ul", *lines, class_="plain")


def _place(place: int | None) -> str:
    """Formats a rank: 1st, 22nd, 113th."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    assert place is not None, "a legal schedule in `about` has a rank"
    return f"{place:,}{'th' if place % 100 in (11, 12, 13) else ends.get(place % 10, 'th')}"


def _trials(details: RecordDetails) -> Iterator[Element]:
    if not details.trials:
        yield element("p", "The times of its trials are not stored with the record.")
        return
    time = "estimated" if details.record.estimated else "time"
    choices = compared([(trial.backend, trial.schedule) for trial in details.trials], bases_of(details.record))
    unpredicted = without_prediction(details.trials, details.record.library)
    rows: list[tuple[Child, ...]] = []
    for trial, choice in zip(details.trials, choices.texts, strict=True):
        said = element("span", element("code", choice))
        if isinstance(trial.outcome, Failure):
            extend(said, [element("span", first_line(str(trial.outcome)), class_="failure")])
        took = seconds_text(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else "failed"
        predicted = "" if trial.backend in unpredicted else seconds_text(trial.predicted_s)
        rows.append((str(trial.number), said, predicted, took))
    yield table(None, ["", "kernel and schedule", "predicted", time], rows, numbers=2)
    yield from (element("p", f"{line}.", class_="faint") for line in choices.note)


def _commands(details: RecordDetails) -> Iterator[Element]:
    if details.command is None:
        yield element("p", "The command is unknown, because its operation is not in this package.")
        return
    yield element("p", f"On a machine with this chip ({details.record.key.hardware}), this tunes it again:")
    yield element(
        "p", element("code", details.command), element("button", "copy", type="button", class_="copy", hidden=True),
        class_="command",
    )  # fmt: skip


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
