"""Formats a record for `print`, in a few lines, and for a notebook, as a small table without scripts or downloads."""

from __future__ import annotations

import html

from scheduler.core.records import Entry, Record, choice_text
from scheduler.core.text import digits, one_line, printable, ratio_text, seconds_text, share_text
from scheduler.inspect.case import of_record
from scheduler.inspect.provenance import record_head
from scheduler.inspect.verdict import against_library, confidence, first_line, gain_text, standing, verdict
from scheduler.model.cost import CostModel
from search_spaces import format_problem

_NUMBER = ' style="text-align:right"'


def record_html(record: Record) -> str:
    """Returns the problem, the winner and its gain over XLA, the entries, and the confidence as escaped HTML."""
    problem = format_problem(record.key.operation, record.key.problem)
    winner, gain = record.winner, gain_text(record)
    against = f"{gain} the speed of XLA" if gain.endswith("x") and winner.backend != record.library else f"XLA: {gain}"
    rows = "".join(_row(record, entry) for entry in record.entries)
    time = "estimated" if record.estimated else "time"
    head = "".join(
        f"<th{style}>{name}</th>"
        for name, style in (
            ("backend", ""), (time, _NUMBER), ("over the winner's", _NUMBER), ("TFLOP/s", _NUMBER),
            ("% of roofline", _NUMBER), ("schedule", ' style="text-align:left"'),
        )
    )  # fmt: skip
    shown = " ".join([*verdict(record), *(f"{line}." for line in record_head(record, trials_kept=True))])
    return (
        f"<div><p><b>{_escaped(record.key.operation)}</b> {_escaped(problem)} on {_escaped(record.key.hardware)}<br>"
        f"<b>{_escaped(seconds_text(winner.measurement.median_s))}</b> by {_escaped(winner.backend)}, "
        f"{_escaped(against)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p><small>{_escaped(shown)}</small></p></div>"
    )


def record_text(record: Record) -> str:
    """Returns one line each for the problem, the winner, the library, the confidence, and the origin of the record."""
    winner, library = record.winner, record.library_entry
    estimated = ", estimated and not measured" if record.estimated else ""
    estimated += ", imported and not verified here" if record.imported else ""
    by = choice_text(winner.backend, winner.schedule)
    lines = [str(record.key), f"winner: {seconds_text(winner.measurement.median_s)}{estimated}, {by}"]
    if library is None:
        lines.append(f"library: {record.library} has no time")
    elif library != winner:
        qualifier = {"ahead": "", "tie": ", a tie within 1 %", "undecided": ", undecided"}[
            standing(record, library).state
        ]
        lines.append(
            f"library: {seconds_text(library.measurement.median_s)}, {choice_text(library.backend, library.schedule)}; "
            f"{standing(record, library).ratio:.3g} times the winner's{qualifier}"
        )
    else:
        stands = against_library(record)
        other = "" if stands is None else f"; the best other takes {stands.ratio:.3g} times as long"
        lines.append(f"library: {record.library} is the winner{other}")
    lines += [first_line(f"failed: {lost}") for lost in record.failed]
    lines += [first_line(f"note: {note}") for note in record.notes]
    lines.append(f"how sure: {confidence(record) or 'no run-off is known.'}")
    date, trials, *_ = record_head(record, trials_kept=True)
    lines.append(f"{trials}. {date}.")
    return "\n".join(map(one_line, lines))


def _row(record: Record, entry: Entry) -> str:
    time_s, case = entry.measurement.median_s, of_record(record)
    rate = share = ""
    if case is not None and case.problem.flops:
        rate = digits(case.problem.flops / time_s / 1e12)
    if case is not None and not case.hardware.abilities.interpreted:
        share = share_text(CostModel(case.hardware).lower_bound(case.problem) / time_s)
    beside = "" if entry == record.winner else _comparison_text(record, entry)
    cells = (
        (entry.backend, ""), (seconds_text(time_s), _NUMBER), (beside, _NUMBER), (rate, _NUMBER), (share, _NUMBER),
        (choice_text("", entry.schedule).strip(), ' style="text-align:left"'),
    )  # fmt: skip
    return "<tr>" + "".join(f"<td{style}>{_escaped(text)}</td>" for text, style in cells) + "</tr>"


def _comparison_text(record: Record, entry: Entry) -> str:
    """Returns the entry's time over the winner's with its interval, or "tie"."""
    stands = standing(record, entry)
    ratio = "tie" if stands.state == "tie" else ratio_text(stands.ratio)
    return f"{ratio} ({stands.interval})" if stands.interval else ratio


def _escaped(text: str) -> str:
    return html.escape(printable(text), quote=True)
