"""Formats schedules by their differences, and messages by their first line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from scheduler.core.records import Record, Schedule, choice_text, schedule_text


def first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def difference(schedule: Schedule, base: Schedule) -> str:
    """Describes how `schedule` differs from `base`; a field only in `base` has its default in `schedule`."""
    changed = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(changed | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


@dataclasses.dataclass(frozen=True)
class Compared:
    """Candidates as text.

    Attributes:
      texts: One text per candidate.
      note: A line that names the schedules that the abbreviated texts refer to; empty if there are none.
    """

    texts: Sequence[str]
    note: Sequence[str]


def compared(
    choices: Sequence[tuple[str, Schedule]],
    bases: Mapping[str, tuple[str, Schedule]] | None = None,
    *,
    operations: Sequence[str] | None = None,
) -> Compared:
    """Formats each backend and schedule: the first of a backend in full, the others by their differences from it.

    Args:
      bases: Backend -> a schedule shown elsewhere and its name. All schedules of that backend are shown by their
        differences from it.
      operations: The operation of each choice, if there are several. The same backend then has different fields.
    """
    of = operations if operations is not None else [""] * len(choices)
    known = {(operation, backend): base for operation in set(of) for backend, base in (bases or {}).items()}
    texts, named = [], []
    for operation, (backend, schedule) in zip(of, choices, strict=True):
        if (operation, backend) in known and schedule:
            name, base = known[operation, backend]
            texts.append(f"{backend} {difference(schedule, base)}")
            named.append(name)
        else:
            texts.append(choice_text(backend, schedule))
            if schedule:
                first = f"the first of {backend}" if len(set(of)) == 1 else "the first of its operation and backend"
                known.setdefault((operation, backend), (first, schedule))
    names = " and ".join(dict.fromkeys(named))
    return Compared(texts, [f"schedules are shown by what differs from {names}"] if names else [])


def bases_of(record: Record | None) -> dict[str, tuple[str, Schedule]]:
    """Returns the record's schedule of each backend with its name, for showing other schedules by their differences."""
    bases: dict[str, tuple[str, Schedule]] = {}
    for entry in record.entries if record is not None else ():
        name = "the winner" if record is not None and entry == record.winner else f"the best {entry.backend}"
        if entry.schedule:
            bases.setdefault(entry.backend, (name, entry.schedule))
    return bases
