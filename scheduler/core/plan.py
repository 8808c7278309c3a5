"""A plan: which schedule answers each problem of one function on one chip, in a file that a deployment needs alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from scheduler.core.codec import BY_NAME, parsed
from scheduler.core.decoding import field_of, json_object, list_of, maker, text, whole
from scheduler.core.errors import PlanError
from scheduler.core.files import read_text, replace_text
from scheduler.core.quantities import seconds_text
from scheduler.core.records import LIBRARY, Environment, Schedule, choice_text
from search_spaces import spelled

FORMAT = 1
# "xla": every problem answered by its fastest library, XLA or a vendor's (cuDNN); "all": each by its fastest alone;
# "plan": as the plan has it.
Variant = Literal["xla", "all", "plan"]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The answer to one problem.

    Attributes:
      operation, problem: its name, and `Problem.canonical()`.
      backend, version, schedule: what runs.
      count: how often one call of the function runs it.
      reason: why this one, in words.
      alone_s, library_s: seconds alone of the fastest kernel that was considered, and of the fastest library; None
        where not measured.
      library: that one's backend, XLA's or a vendor's; `library_version` and `library_schedule`: which program of it.
      fingerprint, reference: of the schedule and of the operation's reference, as in `Entry` and `Record`.
    """

    operation: str
    problem: str
    backend: str
    version: int
    schedule: Schedule
    count: int
    reason: str
    alone_s: float | None = None
    library_s: float | None = None
    library: str = LIBRARY
    library_version: int = 1
    library_schedule: Schedule = dataclasses.field(default_factory=dict)
    fingerprint: str = ""
    reference: str = ""

    def __str__(self) -> str:
        return f"{self.operation} {spelled(self.operation, self.problem)}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Wall time of one call of the whole function, in seconds: the median of rounds in turns, and its spread."""

    variant: Variant
    median_s: float
    spread_s: float
    rounds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Plans are equal whose contents are; `print(plan)` shows a table.

    Attributes:
      function: whose it is, as text.
      hardware, kind: `Hardware.id` of the chip it holds for, and the name that its driver gives.
      environment: versions of jax, and the date.
      package: the version of tile-scheduler.
      answers: of each problem that the function poses.
      figures: of the whole function.
      verdict: what they say, in a sentence.
    """

    function: str
    hardware: str
    kind: str
    environment: Environment
    package: str
    answers: tuple[Planned, ...]
    figures: tuple[Figure, ...] = ()
    verdict: str = ""

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for answer in self.answers:
            if (key := (answer.operation, answer.problem)) in seen:
                raise ValueError(f"answers: {answer} is answered twice")
            seen.add(key)

    def answer(self, operation: str, problem: str) -> Planned | None:
        """The answer to a problem in its canonical text; None where the plan holds none."""
        return self._by_problem.get((operation, problem))

    @functools.cached_property
    def _by_problem(self) -> Mapping[tuple[str, str], Planned]:
        return {(each.operation, each.problem): each for each in self.answers}

    @functools.cached_property
    def digest(self) -> str:
        """Of the content: the same in every process that has the same plan."""
        return _digest_of(self._fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON that diffs and can be read.

        Raises:
          OSError: the file cannot be written.
        """
        fields = self._fields()
        text = json.dumps({"digest": _digest_of(fields), **fields}, indent=1, allow_nan=False)
        replace_text(path, text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file, every field of it checked.

        Raises:
          PlanError: it cannot be read, is damaged, of a newer format, or was changed after it was written; the message
            says what to do.
        """
        try:
            return _plan_of(parsed(read_text(path)))
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:  # a UnicodeDecodeError, too
            raise PlanError(f"{path} is no plan that can be used: {error}") from None

    def _fields(self) -> dict[str, Any]:
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        for answer in fields["answers"]:
            for name in _MAY_LACK:
                if not answer[name]:
                    del answer[name]
        return fields

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


WIDTH = 100


def _lines(plan: Plan) -> Iterator[str]:
    """A table of a hundred columns: what the plan is of, what it gained, and each answer with its reason."""
    here = plan.environment
    yield f"plan {plan.digest} of {plan.function} on {plan.hardware}"
    yield f"made on {here.date[:10]} with jax {here.jax} and tile-scheduler {plan.package}"
    yield from _folded(plan.verdict, "")
    for figure in plan.figures:
        times = f"{seconds_text(figure.median_s)} a call (+- {seconds_text(figure.spread_s / 2)})"
        yield f"{figure.variant:>6}: {times} in {figure.rounds} rounds"
    cells = [("count", "alone", "library")]
    for each in plan.answers:
        alone, library = ("" if s is None else seconds_text(s) for s in (each.alone_s, each.library_s))
        cells.append((str(each.count), alone, library))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    heads = ["".join(f"{cell:>{width}}  " for cell, width in zip(row, widths, strict=True)) for row in cells]
    yield f"{heads[0]}problem, and what answers it"
    for head, each in zip(heads[1:], plan.answers, strict=True):
        below = " " * len(head)
        yield head + str(each)
        reason = f": {each.reason}" if each.reason else ""
        yield from _folded(choice_text(each.backend, each.schedule) + reason, below)


def _folded(said: str, indent: str) -> list[str]:
    return textwrap.wrap(said, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _digest_of(fields: Mapping[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# Fields of an answer that text has only where they are not empty.
_MAY_LACK = ("fingerprint", "reference")
_BY_NAME = {**BY_NAME, "library_schedule": BY_NAME["schedule"]}
_PLAN = maker(Plan, {**_BY_NAME, "answers": list_of(maker(Planned, _BY_NAME, optional=_MAY_LACK))})


def _plan_of(value: object) -> Plan:
    fields = dict(json_object(value))
    if (version := field_of(fields, "format", whole)) > FORMAT:
        raise ValueError(f"its format is {version}, and this version reads {FORMAT}: upgrade tile-scheduler")
    # Of the text as it is written: what later versions read in other words is still what was written.
    written, found = field_of(fields, "digest", text), _digest_of({k: v for k, v in fields.items() if k != "digest"})
    plan = _PLAN(fields)
    if written != found:
        raise ValueError(
            f'it was changed after it was written; if that is meant, write "digest": "{found}" into it, and time it '
            "again: tile-scheduler verify --plan"
        )
    return plan
