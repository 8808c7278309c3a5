"""A plan: the kernels of one optimized function on one chip, in a file that a deployment can use alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import reprlib
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler.core.codec import BY_NAME, field_of, json_object, maker, parsed, text, whole
from scheduler.core.errors import PlanError
from scheduler.core.files import read_text, replace_text
from scheduler.core.records import Environment, Schedule, choice_text
from scheduler.core.text import seconds_text
from search_spaces import format_problem

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Planned:
    """The kernel for one problem, or XLA.

    Attributes:
      operation, problem: the operation's name, and `Problem.canonical()`.
      backend, version, schedule: the selected kernel and its schedule.
      reason: why it was selected, or why XLA computes the problem.
    """

    operation: str
    problem: str
    backend: str
    version: int
    schedule: Schedule
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} {format_problem(self.operation, self.problem)}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """The decision for some arguments of the function.

    Attributes:
      arguments: as text.
      verdict: the decision as a sentence.
      plan_s, xla_s: median wall time of one call with kernels, and by XLA alone, in seconds; None if not timed.
    """

    arguments: str
    verdict: str
    plan_s: float | None
    xla_s: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The kernels of a function; plans with equal contents are equal, and `print(plan)` shows a table.

    Attributes:
      function: the name of the function.
      hardware: `Hardware.id` of the chip.
      environment: versions of JAX, and the date.
      package: the version of tile-scheduler.
      answers: one per problem for which a kernel was tried.
      figures: one per decision.
      changes: other changes, which need no kernel, as text; () if `optimize` makes none under the plan.
    """

    function: str
    hardware: str
    environment: Environment
    package: str
    answers: tuple[Planned, ...]
    figures: tuple[Figure, ...] = ()
    changes: tuple[str, ...] = ()

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
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


WIDTH = 100


def _lines(plan: Plan) -> Iterator[str]:
    """Yields lines of `WIDTH` columns: the function, its decisions, and each kernel with its reason."""
    here = plan.environment
    yield f"plan {plan.digest} of {plan.function} on {plan.hardware}"
    yield f"made on {here.date[:10]} with jax {here.jax} and tile-scheduler {plan.package}"
    for figure in plan.figures:
        yield from _folded(f"({figure.arguments})", "")
        yield from _folded(figure.verdict, "  ")
        if figure.plan_s is not None and figure.xla_s is not None:
            yield f"  a call: with kernels {seconds_text(figure.plan_s)}, XLA {seconds_text(figure.xla_s)}"
    for each in plan.answers:
        yield str(each)
        yield from _folded(f"{choice_text(each.backend, each.schedule)}: {each.reason}", "  ")
    for change in plan.changes:
        yield from _folded(f"changed: {change}", "")


def _folded(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _digest_of(fields: Mapping[str, Any]) -> str:
    content = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


_PLAN = maker(Plan, BY_NAME)


def _plan_of(value: object) -> Plan:
    fields = dict(json_object(value))
    if (version := field_of(fields, "format", whole)) > FORMAT:
        raise ValueError(f"this version reads format {FORMAT}, found format {version}: upgrade tile-scheduler")
    # The digest is of the text as written, because a later version may decode it into other names.
    written, found = field_of(fields, "digest", text), _digest_of({k: v for k, v in fields.items() if k != "digest"})
    plan = _PLAN(fields)
    if written != found:
        raise ValueError(f'it was changed after it was written; if that is meant, write "digest": "{found}" into it')
    return plan
