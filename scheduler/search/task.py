"""Tasks of a job (problems), the options of their searches, and their results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import re
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union

from scheduler.core import arguments
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, L2S, AllFailed, Entry, Record, Schedule
from search_spaces import value_of
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

BUDGET = arguments.EFFORTS["default"]
# The cost model's order, then a surrogate: `samplers.ModelSampler`.
MODEL = "model"
# Optuna samplers: name -> class.
SAMPLERS: Mapping[str, str] = {
    "tpe": "TPESampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
    "qmc": "QMCSampler",
    "random": "RandomSampler",
}
# Packages in addition to Optuna that a class of samplers imports when it proposes.
_NEEDS: Mapping[str, Sequence[str]] = {
    "GPSampler": ("torch", "scipy"),
    "CmaEsSampler": ("cmaes",),
    "QMCSampler": ("scipy",),
}
Sampler = Union[str, "BaseSampler"]


def sampler_of(named: Sampler, seed: int) -> BaseSampler | None:
    """Returns the sampler of a search; None stands for `samplers.ModelSampler`.

    Args:
      named: an Optuna sampler; "model"; a key of `SAMPLERS`; or ``module:NAME``, which refers to a sampler, a sampler
        class or a function that returns a sampler. A class or a function is called with ``seed=seed`` if it has that
        parameter, else without arguments.

    Raises:
      TypeError, ValueError: `named` is not a sampler, or the sampler needs a package that is not installed.
    """
    if named == MODEL:
        return None
    made = _made(named, seed)
    _require_packages(made)
    return made


def _made(named: Sampler, seed: int) -> BaseSampler:
    import optuna

    if isinstance(named, optuna.samplers.BaseSampler):
        return named
    if not isinstance(named, str):
        raise TypeError(f"sampler must be an Optuna sampler or the name of one, found {named!r}")
    if ":" in named:
        try:
            made = value_of(named)
        except (ImportError, AttributeError, OSError) as error:
            raise ValueError(f"the sampler {named} cannot be loaded: {error}") from error
        if callable(made):
            try:
                made = made(seed=seed) if "seed" in inspect.signature(made).parameters else made()
            except Exception as error:  # a class or a function of the user's own
                raise ValueError(
                    f"a call of {named} with the seed alone makes no sampler: {type(error).__name__}: {error}; write a "
                    "function that returns the sampler, and name that function"
                ) from error
        if not isinstance(made, optuna.samplers.BaseSampler):
            raise ValueError(f"{named} must be or return an Optuna sampler, found {type(made).__name__}")
        return made
    if named not in SAMPLERS:
        raise ValueError(f"unknown sampler {named!r}: use {', '.join([MODEL, *SAMPLERS])}, or module:NAME")
    options = {"warn_independent_sampling": False} if named in ("cmaes", "qmc") else {}
    if named == "qmc":
        options["scramble"] = True  # otherwise the points are the same for every seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: BaseSampler = getattr(optuna.samplers, SAMPLERS[named])(seed=seed, **options)
    return sampler


def _require_packages(sampler: BaseSampler) -> None:
    """Raises a ValueError if the sampler, or one within it as in `PartialFixedSampler`, needs a missing package."""
    from optuna.samplers import BaseSampler

    several = [sampler]
    for each in several:
        several += [inner for inner in vars(each).values() if isinstance(inner, BaseSampler) and inner not in several]
        for name in (of.__name__ for of in type(each).__mro__):
            if missing := [one for one in _NEEDS.get(name, ()) if importlib.util.find_spec(one) is None]:
                raise ValueError(f"{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Options of a search: of `scheduler.tune`, of the command line, of the tasks of a job, and of a fleet's orders.

    Attributes:
      budget: maximum number of trials, including the library's; or "quick" (8), "default" (64) or "full" (until nothing
        improves). The search stops earlier if no untried candidate can win, or if the last trials brought no
        improvement and none is expected; the record gives the reason.
      seconds: time after which no more trials are proposed. Without this limit, a search in interpret mode (on a CPU)
        that would take more than `tuner.LONGEST_INTERPRETED_S` is rejected.
      backends: kernels to try in addition to the library; None tries all that support the problem.
      seed: seed of the search; the inputs are always the same.
      l2: whether candidates read their operands from memory ("cold") or, as far as they fit, from the cache ("warm").
        A problem measured cold is tuned again if `l2` is warm.
      force: search even if the store has a valid record.
      first_error: search, and raise the first failure of a candidate (except the library's) instead of continuing.
      sampler: proposes schedules: "model" (the cost model's order, then a surrogate), the name of an Optuna sampler
        ("tpe", "gp", "cmaes", "nsgaii", "qmc", "random"), ``module:NAME``, or any Optuna sampler object. A sampler
        object keeps its state between searches; a named sampler does not.

    Raises:
      TypeError, ValueError: a value is not valid; the message says what is expected.
    """

    budget: int = BUDGET
    seconds: float | None = None
    backends: frozenset[str] | None = None
    seed: int = 0
    l2: L2 = "cold"
    force: bool = False
    first_error: bool = False
    sampler: Sampler = MODEL

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", arguments.checked_budget(self.budget))
        arguments.checked_positive_or_none("seconds", self.seconds)
        arguments.checked_seed(self.seed)
        arguments.checked_choice("l2", self.l2, L2S)
        arguments.checked_flag("force", self.force)
        arguments.checked_flag("first_error", self.first_error)
        sampler_of(self.sampler, self.seed)  # validates the sampler

    @property
    def searches_known(self) -> bool:
        """Whether a problem is searched even if the store has a valid record."""
        return self.force or self.first_error


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem to tune.

    Attributes:
      count: number of calls with this problem in the function that the job tunes.
    """

    operation: Operation[Any]
    problem: Problem
    options: SearchOptions = SearchOptions()
    count: int = 1

    def __post_init__(self) -> None:
        arguments.checked_integer("count", self.count)

    def __str__(self) -> str:
        return f"{self.operation.name} {self.problem}"


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A job entry that cannot be parsed: its text and the reason."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The baseline of a search: the schedule that calls used before it, from a record or the model.

    Attributes:
      seconds: its time; a prediction unless `measured`, because this search did not try it.
    """

    backend: str
    schedule: Schedule
    seconds: float
    measured: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one task.

    Attributes:
      state: "tuned": searched now; "known": tuned earlier and still valid; or "failed".
      reason: why the task failed, or why an earlier result was no longer valid; "" if there is no such reason.
      hardware: the chip; None if the task failed before it was known.
      record: the full outcome; None if the task failed.
      entry: the fastest schedule among the requested backends.
      before: the baseline; None if nothing was measured now, or no schedule could be selected before.
      resumed: trials reused from an earlier run of the search that was interrupted.
      elapsed_s: wall time spent.
      stored: False if the store rejected the record.
    """

    task: Task | Malformed
    state: Literal["tuned", "known", "failed"]
    reason: str = ""
    hardware: Hardware | None = None
    record: Record | None = None
    entry: Entry | None = None
    before: Baseline | None = None
    resumed: int = 0
    elapsed_s: float = 0.0
    stored: bool = True

    @property
    def library(self) -> Entry | None:
        """The library's own entry in the record."""
        return None if self.record is None else self.record.library_entry

    @property
    def broken(self) -> tuple[AllFailed, ...]:
        """Backends without a schedule that ran in this search, through failures of their own."""
        if self.record is None or self.state == "known":  # already reported by the search that measured it
            return ()
        return tuple(lost for lost in self.record.failed if lost.own)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the results of this search (`Record.notes`)."""
        return () if self.record is None or self.state == "known" else self.record.notes


# ------------------------------------------------------------------------------
# Parses ranges of an extent: ``m=1..8192`` on the command line and in jobs, ``m = [1, 8192]`` in jobs.

_RANGE = re.compile(r"\s*(-?\d+)\s*\.\.\s*(-?\d+)\s*")


def value_text(name: str, value: Any) -> str:
    """Converts the value of a field in a job to its command-line text.

    Raises:
      ValueError: it is neither a value nor a range.
    """
    if not isinstance(value, list):
        if not isinstance(value, (int, str)):
            raise ValueError(f"{name} must be an integer, a bool or a string, found {value!r}")
        return str(value)
    if len(value) != 2 or any(type(end) is not int for end in value):
        raise ValueError(
            f"{name} must be a value or a range of two integers such as [1, 8192], found {value!r}; write one "
            "[[problem]] per value"
        )
    return f"{value[0]}..{value[1]}"


def points(low: int, high: int) -> list[int]:
    """Returns the values of a range that are tuned: both ends and the powers of two between them.

    A value between two of them is at most half a doubling away from one, and calls use its schedule
    (`predict.SERVED`).
    """
    powers = (1 << exponent for exponent in range(low.bit_length(), high.bit_length()))
    return sorted({low, high, *powers})


def problems_of(operation: Operation[Any], texts: Mapping[str, str]) -> list[Problem]:
    """Returns the problem of these fields; with a range, the problems at its `points` that are valid.

    Raises:
      ValueError: there are two ranges; the ranged field is not an extent; an end is not a valid problem, or the ends
        are in the wrong order; or `Problem.parse` raised.
    """
    integers = {name for name, kind in typing.get_type_hints(operation.problem).items() if kind is int}
    named = {name: found for name, text in texts.items() if (found := _RANGE.fullmatch(text))}
    ranged = {name: found for name, found in named.items() if name in integers}
    if not ranged:
        for name in named:
            if name in typing.get_type_hints(operation.problem):
                raise ValueError(f"{name}={texts[name]}: only an extent may be a range")
        return [operation.problem.parse(texts)]
    if len(ranged) > 1:
        raise ValueError(
            f"only one field may be a range, found {' and '.join(ranged)}; write one problem per value of the others"
        )
    ((name, found),) = ranged.items()
    low, high = int(found[1]), int(found[2])
    if low >= high:
        other = f"write {name}={low}" if low == high else f"write {name}={high}..{low}"
        raise ValueError(f"{name}={low}..{high}: a range must increase: {other}")
    if low < 1:
        raise ValueError(f"{name}={low}..{high}: an extent must be at least 1")
    lowest, highest = (operation.problem.parse({**texts, name: str(value)}) for value in (low, high))
    if getattr(lowest, name) == getattr(highest, name) or _shapes(lowest) == _shapes(highest):
        raise ValueError(f"{name}={low}..{high}: only an extent may be a range, and no array's shape depends on {name}")
    found_problems = []
    for value in points(low, high):
        with contextlib.suppress(ValueError):
            found_problems.append(dataclasses.replace(lowest, **{name: value}))
    return found_problems


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    return [array.shape for array in (*problem.operands(), *problem.results())]
