"""The overview of a report: a table of records with filters and sorting, and a list of unfinished searches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from xml.etree.ElementTree import Element

from scheduler.core.quantities import digits, seconds_text
from scheduler.core.records import Key, Record, Trial, schedule_text
from scheduler.inspect.provenance import stale, unfinished_text
from scheduler.inspect.report.elements import Child, element, extend
from scheduler.inspect.report.gather import Told
from scheduler.inspect.report.pictures import Pictures, shown
from scheduler.inspect.verdict import against_library, gain_text

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


def outcome(told: Told) -> str:
    """Returns the result of the winner against XLA as short text, used as a filter value."""
    record = told.record
    if record.library_entry is None:
        return "XLA did not run"
    stands = against_library(record)
    if stands is not None and stands.state == "undecided":
        return "undecided"
    if stands is not None and stands.state == "tie":
        return "a tie"
    return "XLA answers" if record.winner == record.library_entry else "faster than XLA"


def gain(told: Told) -> float | None:
    """Returns XLA's time over the winner's, 1 if not significant or if XLA won; None if XLA did not run."""
    record = told.record
    if record.library_entry is None:
        return None
    stands = against_library(record)
    won = stands is not None and stands.state == "ahead" and record.winner != record.library_entry
    return stands.ratio if won and stands is not None else 1.0


_FILTERS: Mapping[str, Callable[[Told], str]] = {
    "operation": lambda told: told.record.key.operation,
    "chip": lambda told: told.record.key.hardware,
    "dtype": lambda told: told.dtype,
    "against XLA": outcome,
    "kept in": lambda told: told.where,
    "times": lambda told: _times(told.record),
}


def overview(
    records: Sequence[tuple[str, Told]], cut: Iterable[tuple[str, Key, Sequence[Trial]]], pictures: Pictures
) -> Element:
    """Returns the table of records with links to their articles, its filters, and the unfinished searches."""
    told = [one for _, one in records]
    several = {name: len({pick(one) for one in told}) > 1 for name, pick in _FILTERS.items()}
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
        summary = element("summary", "Pictures: against XLA, and under the roofline")
        extend(made, [element("details", summary, *shown(pictures.of_all))])
    elif records and pictures.missing:
        extend(made, [element("p", pictures.missing, class_="faint")])
    extend(made, [_filters(told), element("div", table, class_="scrolls")])
    if not records:
        extend(made, [element("p", "No record is stored.", class_="empty")])
    else:
        extend(made, [element("p", "No record has all of that.", class_="empty", id="none", hidden=True)])
    extend(made, (element("p", note, class_="faint") for note in _NOTES))
    lines = [element("li", f"{key}, {where}: {unfinished_text(trials)}") for where, key, trials in cut]
    if lines:
        extend(made, [element("h2", "Searches that did not end"), element("ul", *lines)])
    return made


def _filters(told: Sequence[Told]) -> Element:
    """Returns a search box, and a menu for each property in which records differ. They are hidden without a script."""
    fields = [
        element(
            "label",
            element("span", "find"),
            element("input", type="search", id="words", placeholder="m=4096 gelu", autocomplete="off"),
        )
    ]
    for name, pick in _FILTERS.items():
        values = sorted({pick(one) for one in told})
        if len(values) > 1:
            options = (element("option", value or "(none)", value=f"={value}") for value in values)
            menu = element("select", element("option", "any", value=""), *options, data_field=name.split()[0])
            fields.append(element("label", element("span", name), menu))
    fields.append(element("button", "clear", type="reset"))
    count = element("output", f"{len(told)} records", id="count", aria_live="polite")
    return element("form", *fields, count, id="filters", hidden=True)


def _row(ident: str, told: Told) -> Element:
    record, case, time_s = told.record, told.case, told.record.winner.measurement.median_s
    share = None if told.roofline_s is None else 100 * told.roofline_s / time_s
    cells: dict[str, Child] = {
        "operation": record.key.operation,
        "problem": element("a", told.spelled, href=f"#{ident}"),
        "chip": record.key.hardware,
        "answer": record.winner.backend,
        "time": figure(time_s, seconds_text(time_s)),
        "vs XLA": figure(gain(told), gain_text(record)),
        "TFLOP/s": _rate(case.problem.flops / time_s if case else None),
        "TB/s": _rate(case.problem.bytes_moved / time_s if case else None),
        "% of roofline": None if share is None else figure(share, f"{share:.1f}"),
        "measured": element("time", record.environment.date[:10], datetime=record.environment.date),
    }
    row = element(
        "tr",
        data_operation=record.key.operation,
        data_chip=record.key.hardware,
        data_dtype=told.dtype,
        data_against=outcome(told),
        data_kept=told.where,
        data_times=_times(record),
        data_words=f"{schedule_text(record.winner.schedule)} {told.where} {outcome(told)}",
    )
    for name, cell in cells.items():
        row.append(element("td", cell, class_=_class(name)))
    row[1].set("data-operation", record.key.operation)  # shown there if the screen has no room for its column
    measured = row[-1]
    if stale(record):
        extend(measured, [" ", element("span", "stale", class_="badge", title=f"with jax {record.environment.jax}")])
    if record.estimated:
        extend(measured, [" ", element("span", "estimated", class_="badge", title="by the compiler: nothing ran")])
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
