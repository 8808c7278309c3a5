"""Describes the origin of a record: date, number of trials and failures; and the progress of an unfinished search."""

from __future__ import annotations

import collections
import functools
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence

from scheduler.core.quantities import seconds_text
from scheduler.core.records import Failure, Measurement, Record, Trial, choice_text
from scheduler.inspect.wording import first_line


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


def record_head(record: Record, *, trials_kept: bool) -> Iterator[str]:
    """Yields lines on how the record was measured."""
    env = record.environment
    driver = f", {'' if record.estimated else 'driver '}{env.driver}" if env.driver else ""
    how = "Estimated by the compiler, not measured," if record.estimated else "Measured"
    yield f"{how} {env.date} with jax {env.jax}{driver}{' (stale)' if stale(record) else ''}"
    versions = ", ".join(f"{backend} version {version}" for backend, version in record.versions.items())
    lost = "" if trials_kept else ", their times not kept beside the record"
    yield f"{record.tried} trials (budget {record.budget}{lost}) of {record.space} schedules; {versions}"
    if stale(record):
        yield stale_line()


def unfinished_text(trials: Sequence[Trial]) -> str:
    """Describes the progress of an unfinished search."""
    ran = [(t.outcome.median_s, t.number, t) for t in trials if isinstance(t.outcome, Measurement)]
    said = ", none of which ran"
    if ran:
        best_s, _, best = min(ran)
        how = "estimated " if isinstance(best.outcome, Measurement) and best.outcome.estimated else ""
        said = f", the best {how}{seconds_text(best_s)}: {choice_text(best.backend, best.schedule)}"
    return f"cut short, or still searched: {len(trials)} trial{'' if len(trials) == 1 else 's'} kept{said}"


def failures(trials: Sequence[Trial]) -> Mapping[str, int]:
    """Returns the number of failed trials by reason, the most frequent first."""
    reasons = (first_line(str(trial.outcome)) for trial in trials if isinstance(trial.outcome, Failure))
    return dict(collections.Counter(reasons).most_common())
