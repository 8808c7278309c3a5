"""Schedules by what differs, and messages by their first line, as a person reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from scheduler.core.records import Record, Schedule, choice_text, schedule_text


def first_line(text: str, most: int = 160) -> str:
    line = text.splitlines()[0] if text else text
    return line if len(line) <= most else f"{line[: most - 3]}..."


def difference(schedule: Schedule, base: Schedule) -> str:
    """What of `schedule` is not as in `base`; a field that only `base` has is at its default."""
    changed = {name: value for name, value in schedule.items() if name not in base or base[name] != value}
    return schedule_text(changed | dict.fromkeys(base.keys() - schedule.keys(), "default")) or "the same"


@dataclasses.dataclass(frozen=True)
class Compared:
    """Candidates as text.

    Attributes:
      texts: one of each.
      note: by what those are shown that are not in full: a line, or none.
    """

    texts: Sequence[str]
    note: Sequence[str]


def compared(
    choices: Sequence[tuple[str, Schedule]],
    bases: Mapping[str, tuple[str, Schedule]] | None = None,
    *,
    operations: Sequence[str] | None = None,
) -> Compared:
    """Each backend and schedule: of a backend the first in full, the others by what differs from it.

    Args:
      bases: backend -> a schedule that is shown elsewhere, and its name: all of that backend show what differs from it.
      operations: whose each choice is, where they are of several: those of one backend then have other fields.
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
    """Backend -> the record's schedule of it, and its name: what the others of that backend are compared with."""
    bases: dict[str, tuple[str, Schedule]] = {}
    for entry in record.entries if record is not None else ():
        name = "the winner" if record is not None and entry == record.winner else f"the best {entry.backend}"
        if entry.schedule:
            bases.setdefault(entry.backend, (name, entry.schedule))
    return bases
