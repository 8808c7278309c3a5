"""Describes records in lists, reports and `print`, without JAX: their order, their origins, and a few lines on each."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterator, Sequence

from scheduler.core.records import Key, Measurement, Record, Trial, choice_text
from scheduler.core.text import one_line, seconds_text
from scheduler.inspect.verdict import against_library, confidence, first_line, standing
from search_spaces import format_problem

# Numbers such as the extents in "float32[200,256]". Digits within a dtype's name are not matched.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])([0-9]+)")


def order_of(key: Key, *, fields: bool = True) -> tuple[object, ...]:
    """Returns the sort key of a record's key, in which numbers are ordered as numbers.

    Args:
      fields: Whether a problem's fields are ordered as in its operation, which is loaded for that. Otherwise they are
        ordered by name.
    """
    words = _NUMBER.split(format_problem(key.operation, key.problem) if fields else key.problem)
    problem = tuple((word, 0) if place % 2 == 0 else ("", int(word[:4000])) for place, word in enumerate(words))
    return key.operation, key.hardware, problem


# ------------------------------------------------------------------------------
# Describes the origin of a record: date, number of trials and failures; and the progress of an unfinished search.


def stale(record: Record) -> bool:
    """Returns whether `record` was measured with another minor version of JAX than the installed one."""
    return stale_version(record.environment.jax)


def stale_version(jax: str) -> bool:
    """Returns whether `jax` is another minor version of JAX than the installed one."""
    return jax.split(".")[:2] != _jax_here().split(".")[:2]


@functools.cache
def _jax_here() -> str:
    return importlib.metadata.version("jax")


def stale_line() -> str:
    """Returns the note for a stale record."""
    return (
        f"stale: measured with another minor version of jax than the {_jax_here()} that is here; "
        "served all the same, and `tile-scheduler verify` times it again"
    )


def unverified_line() -> str:
    """Returns the note for an imported record."""
    return (
        "not verified here: a call uses the schedule only if its kernel is verified on this architecture; "
        "`tile-scheduler verify` times the record on this machine"
    )


def record_head(record: Record, *, trials_kept: bool) -> Iterator[str]:
    """Yields lines on how the record was measured."""
    env = record.environment
    driver = f", {'' if record.estimated else 'driver '}{env.driver}" if env.driver else ""
    made = f"{record.origin[0].upper()}{record.origin[1:]}"
    yield f"{made} {env.date} with jax {env.jax}{driver}{' (stale)' if stale(record) else ''}"
    versions = ", ".join(f"{backend} version {version}" for backend, version in record.versions.items())
    lost = "" if trials_kept else ", their times not stored with the record"
    yield f"{record.tried} trials (budget {record.budget}{lost}) of {record.space} schedules; {versions}"
    if stale(record):
        yield stale_line()
    if record.imported:
        yield f"imported from {record.imported.source}, SHA-256 {record.imported.sha256}"
        yield unverified_line()


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
        stands, time = standing(record, library), seconds_text(library.measurement.median_s)
        qualifier = {"ahead": "", "tie": ", a tie within 1 %", "undecided": ", undecided"}[stands.state]
        choice = choice_text(library.backend, library.schedule)
        lines.append(f"library: {time}, {choice}; {stands.ratio:.3g} times the winner's{qualifier}")
    else:
        against = against_library(record)
        other = "" if against is None else f"; the best other takes {against.ratio:.3g} times as long"
        lines.append(f"library: {record.library} is the winner{other}")
    lines += [first_line(f"failed: {lost}") for lost in record.failed]
    lines += [first_line(f"note: {note}") for note in record.notes]
    lines.append(f"how sure: {confidence(record) or 'no run-off is known.'}")
    date, trials, *_ = record_head(record, trials_kept=True)
    lines.append(f"{trials}. {date}.")
    return "\n".join(map(one_line, lines))


def unfinished_text(trials: Sequence[Trial]) -> str:
    """Describes the progress of an unfinished search."""
    ran = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    parts = ", none of which ran"
    if ran:
        best_s, _, best = min(ran)
        how = "estimated " if isinstance(best.outcome, Measurement) and best.outcome.estimated else ""
        parts = f", the best {how}{seconds_text(best_s)}: {choice_text(best.backend, best.schedule)}"
    return f"cut short, or still searched: {len(trials)} trial{'' if len(trials) == 1 else 's'} kept{parts}"
