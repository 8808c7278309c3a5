"""A plan: the schedule for each problem of one function on one chip, in a file that a deployment can use alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import reprlib
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from scheduler.core.codec import BY_NAME, field_of, json_object, list_of, maker, parsed, text, whole
from scheduler.core.errors import PlanError
from scheduler.core.files import read_text, replace_text
from scheduler.core.records import LIBRARY, Environment, Schedule, choice_text
from scheduler.core.text import seconds_text
from search_spaces import format_problem

FORMAT = 1
# "xla": each problem runs its fastest library, XLA or a vendor's (cuDNN). "all": each problem runs its fastest backend
# in isolation. "plan": each problem runs the backend in the plan.
Variant = Literal["xla", "all", "plan"]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The selected schedule for one problem.

    Attributes:
      operation, problem: the operation's name, and `Problem.canonical()`.
      backend, version, schedule: the selected kernel and its schedule.
      count: how often one call of the function runs it.
      reason: why it was selected.
      alone_s, library_s: times in isolation, in seconds, of the fastest candidate kernel and of the fastest library;
        None if not measured.
      library: the backend of the fastest library, XLA or a vendor's.
      library_version, library_schedule: the version and the program of that library.
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
        return f"{self.operation} {format_problem(self.operation, self.problem)}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Wall time of one call of the whole function, in seconds: median of interleaved rounds, and its spread."""

    variant: Variant
    median_s: float
    spread_s: float
    rounds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Schedules for all problems of a function; plans with equal contents are equal, and `print(plan)` shows a table.

    Attributes:
      function: the planned function, as text.
      hardware, kind: `Hardware.id` of the chip, and the name that its driver reports.
      environment: versions of JAX, and the date.
      package: the version of tile-scheduler.
      answers: one per problem of the function.
      figures: times of the whole function.
      verdict: the conclusion from `figures`, as a sentence.
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
                raise ValueError(f"answers: {answer} occurs twice")
            seen.add(key)

    def answer(self, operation: str, problem: str) -> Planned | None:
        """Returns the schedule for a problem, given as canonical text, or None if the plan does not contain it."""
        return self._by_problem.get((operation, problem))

    @functools.cached_property
    def _by_problem(self) -> Mapping[tuple[str, str], Planned]:
        return {(each.operation, each.problem): each for each in self.answers}

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the content, equal in every process with the same plan."""
        return _digest_of(self._fields())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as readable JSON that diffs.

        Raises:
          OSError: the file cannot be written.
        """
        fields = self._fields()
        text = json.dumps({"digest": _digest_of(fields), **fields}, indent=1, allow_nan=False)
        replace_text(path, text + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file and validates every field.

        Raises:
          PlanError: it cannot be read, is damaged, has a newer format, or was edited after it was written; the message
            says what to do.
          TypeError: `path` is neither text nor a path.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"expected a scheduler.Plan or the path of its file, found {reprlib.repr(path)}")
        try:
            return _plan_of(parsed(read_text(path)))
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:  # includes UnicodeDecodeError
            raise PlanError(f"{path} is not a valid plan: {error}") from None

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
    """Yields a table of `WIDTH` columns: the function, its gain, and each selected schedule with its reason."""
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
    yield f"{heads[0]}problem, and its kernel"
    for head, each in zip(heads[1:], plan.answers, strict=True):
        below = " " * len(head)
        yield head + str(each)
        reason = f": {each.reason}" if each.reason else ""
        yield from _folded(choice_text(each.backend, each.schedule) + reason, below)


def _folded(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _digest_of(fields: Mapping[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# Fields of an answer that are omitted from the text if they are empty.
_MAY_LACK = ("fingerprint", "reference")
_BY_NAME = {**BY_NAME, "library_schedule": BY_NAME["schedule"]}
_PLAN = maker(Plan, {**_BY_NAME, "answers": list_of(maker(Planned, _BY_NAME, optional=_MAY_LACK))})


def _plan_of(value: object) -> Plan:
    fields = dict(json_object(value))
    if (version := field_of(fields, "format", whole)) > FORMAT:
        raise ValueError(f"this version reads format {FORMAT}, found format {version}: upgrade tile-scheduler")
    # The digest is of the text as written, because a later version may decode it into other names.
    written, found = field_of(fields, "digest", text), _digest_of({k: v for k, v in fields.items() if k != "digest"})
    plan = _PLAN(fields)
    if written != found:
        raise ValueError(
            f'it was changed after it was written; if that is meant, write "digest": "{found}" into it, and time it '
            "again: tile-scheduler verify --plan"
        )
    return plan
