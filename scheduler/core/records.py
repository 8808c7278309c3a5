"""Value types that are stored and exchanged: keys, measurements, failures and records of searches."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from scheduler.core.chip_table import Clock, Hardware
from scheduler.core.text import encodable, one_line
from search_spaces import format_problem, value_of
from search_spaces.space import Choice
from search_spaces.space import choice_text as text_of

if TYPE_CHECKING:
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


L2 = Literal["cold", "warm"]
L2S: tuple[L2, ...] = typing.get_args(L2)
# "implausible": a time faster than the hardware allows; "estimate": no time, because the chip is not present;
# "timeout": a step exceeded its time limit; "memory": out of device memory; "worker": the process was lost.
Stage = Literal["lower", "compile", "verify", "time", "implausible", "estimate", "timeout", "memory", "worker"]
Schedule = Mapping[str, Choice]
# The library's backend if a record or a recording does not name it.
LIBRARY = "xla"
# Relative difference below which times count as equal: the variation between measurements of one schedule.
TIE = 0.01


def schedule_text(schedule: Schedule) -> str:
    """Formats a schedule, ``stages=4 tile_m=128``, sorted by name."""
    return " ".join(f"{name}={text_of(value)}" for name, value in sorted(schedule.items()))


def variant_of(schedule: Schedule) -> str:
    """Returns the fields of a schedule that are not numbers, as text; they select the code independent of sizes."""
    return schedule_text({name: value for name, value in schedule.items() if isinstance(value, bool | str | None)})


def choice_text(backend: str, schedule: Schedule) -> str:
    """Formats a backend and its schedule; only the backend if the schedule has only defaults."""
    return f"{backend} {schedule_text(schedule)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Key:
    """The key of a schedule in a store.

    Attributes:
      hardware: `Hardware.id`: kind, cores and memory, because slices and variants of a chip differ.
      problem: `Problem.canonical()`.
    """

    operation: str
    hardware: str
    problem: str

    def __str__(self) -> str:
        return one_line(f"{self.operation} {format_problem(self.operation, self.problem)} on {self.hardware}")


@dataclasses.dataclass(frozen=True)
class Miss:
    """A cache miss: a problem of calls without a record.

    Attributes:
      key: the key that its record would have.
      lowered: how often such a call was lowered and used a prediction or the library, or raised an error.
      first, last: time of the first and the last miss in UTC, as in `Environment.date`.
      line: the last line of user code with such a call, as ``file:line``; "" if no file is known.
      place: the name by which another process can `load` the operation; "" if its own name suffices or there is none.
    """

    key: Key
    lowered: int
    first: str
    last: str
    line: str = ""
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of one schedule, in seconds.

    Attributes:
      median_s: median of `samples_s`.
      samples_s: all repetitions, in order.
      clock: the clock of the times.
      l2: whether operands came from memory ("cold": buffers rotated) or may have been in the cache ("warm").
      worst_s: median of the slowest variant of the operands (`Problem.variants`), if there are several; each sample is
        then the mean over the variants.
    """

    median_s: float
    samples_s: tuple[float, ...]
    clock: Clock
    l2: L2
    worst_s: float | None = None

    @property
    def estimated(self) -> bool:
        """Whether the times are compiler estimates."""
        return self.clock == "static"

    @property
    def spread_s(self) -> float:
        """Interquartile range of the samples."""
        ordered = sorted(self.samples_s)
        return ordered[(3 * (len(ordered) - 1)) // 4] - ordered[(len(ordered) - 1) // 4]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a candidate has no time: the stage that failed, and its message."""

    stage: Stage
    detail: str

    def __post_init__(self) -> None:
        # The message of a candidate's exception may contain text that cannot be stored, which would lose the record.
        object.__setattr__(self, "detail", encodable(self.detail))

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}"


Outcome = Measurement | Failure


@dataclasses.dataclass(frozen=True)
class AllFailed:
    """A backend of which every candidate failed: the record has no entry of it, and the next search tries it again.

    Attributes:
      tried: number of its schedules that were tried.
      failure: one of the most frequent failures.
      alike: number of schedules with that failure.
    """

    backend: str
    tried: int
    failure: Failure
    alike: int

    @property
    def own(self) -> bool:
        """Whether its own code failed, as opposed to a lack of memory or a lost process."""
        return self.failure.stage not in ("memory", "worker")

    def __str__(self) -> str:
        share = "" if self.alike == self.tried else f", {self.alike} of them alike"
        return f"{self.tried} of {self.tried} schedules of {self.backend} failed{share}: {self.failure}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate that was tried.

    Attributes:
      number: order within its search, from 0.
      backend, version: the kernel and its version.
      schedule: field -> value, without fields at their defaults.
      outcome: its times, or why it failed.
      predicted_s: the model's prediction before the measurement, in seconds.
      fingerprint: of the candidate's jaxpr if its kernel's version is 0; otherwise, and after a failure, "".
    """

    number: int
    backend: str
    version: int
    schedule: Schedule
    outcome: Outcome
    predicted_s: float
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """Software and date of a measurement.

    Attributes:
      jax, jaxlib: versions.
      driver: the device driver's version, or "".
      date: UTC, ISO 8601, to the second.
    """

    jax: str
    jaxlib: str
    driver: str
    date: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule of a record, measured in the run-off together with the other entries.

    Attributes:
      fingerprint: of its jaxpr, as in `Trial`.
    """

    backend: str
    version: int
    schedule: Schedule
    measurement: Measurement
    predicted_s: float
    fingerprint: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Confidence in the choice of a winner. A record older than this class has zero rounds.

    Attributes:
      rounds: number of rounds in the run-off.
      tied: equally fast candidates as "backend schedule", the winner first; empty if the winner is alone.
      margin_low, margin_high: bounds of the runner-up's time over the winner's, minus one; None if unknown.
      drift: the slowest round over the fastest, minus one, of the finalist with the most similar rounds.
      notes: further events, one sentence each.
    """

    rounds: int = 0
    tied: tuple[str, ...] = ()
    margin_low: float | None = None
    margin_high: float | None = None
    drift: float = 0.0
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observation:
    """Error of the cost model for a kernel on one problem.

    Attributes:
      problem: `Problem.canonical()`.
      predicted_s: the predicted time of the model's top prediction, with the fitted constants.
      measured_s: the measured time of that prediction, or of the fastest schedule if the prediction was not measured;
        for a library, that of its fastest program.
    """

    problem: str
    predicted_s: float
    measured_s: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of the cost model, fitted to recorded trials of one kernel on one chip.

    Attributes:
      hardware, operation, backend: `Hardware.id`, and the kernel of the trials.
      version: the kernel's version at that time.
      constants: name -> value of the fitted constants (`cost.Constants`, `constants.Covariance`).
      problems, trials: number of problems and trials in the fit.
      error: median of |log(predicted / measured)| over these trials.
      environment: of the newest trial.
      observations: measurements of each problem, against the model with these constants.
      variants: the kernel's variants among the fast trials (`variant_of`).
    """

    hardware: str
    operation: str
    backend: str
    version: int
    constants: Mapping[str, float]
    problems: int
    trials: int
    error: float
    environment: Environment
    observations: tuple[Observation, ...] = ()
    variants: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Imported:
    """The origin of an imported record: a file or URL without credentials, and its SHA-256 digest in hexadecimal."""

    source: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of one search.

    Attributes:
      key: the key of the record.
      entries: the winner first, then the runner-up, then the best of every other backend that ran; the library is
        always included. Each backend's best is kept so that calls restricted to some backends can use the record.
      versions: backend -> kernel version, for all backends in the search. A newer kernel makes the record stale.
      environment: where and when it was measured.
      budget: maximum number of trials.
      tried: number of trials, including failed ones.
      space: number of schedules in the whole space, before any rule.
      confidence: confidence in the winner.
      excluded: number of schedules that were skipped because their lower bound exceeds the fastest time.
      stopped: why the search ended; "" in an old record.
      failed: backends without an entry because all their candidates failed; empty in an old record.
      library: the backend of the baseline.
      reference: the fingerprint of the reference's jaxpr if the version of a kernel is 0; otherwise "".
      legal: the fingerprint of the legal schedules of kernels with version 0; "" without such a kernel.
      notes: what users must know about the results of these schedules, one sentence each.
      imported: its source if it was not verified on this machine, else None. Exported text omits it.
    """

    key: Key
    entries: tuple[Entry, ...]
    versions: Mapping[str, int]
    environment: Environment
    budget: int
    tried: int
    space: int
    confidence: Verdict = Verdict()
    excluded: int = 0
    stopped: str = ""
    failed: tuple[AllFailed, ...] = ()
    library: str = LIBRARY
    reference: str = ""
    legal: str = ""
    notes: tuple[str, ...] = ()
    imported: Imported | None = None

    @property
    def winner(self) -> Entry:
        return self.entries[0]

    @property
    def estimated(self) -> bool:
        """Whether the times are compiler estimates; measured records have priority over estimates."""
        return self.winner.measurement.estimated

    @property
    def precedence(self) -> int:
        """0 for a measured record, 1 if imported, 2 for an estimate, 3 if imported. The lowest is used and stored."""
        return 2 * self.estimated + (self.imported is not None)

    @property
    def origin(self) -> str:
        """Describes how the times were obtained, before a date or a place."""
        if self.estimated:
            return "estimated by the compiler, not measured,"
        return "measured" if self.imported is None else "measured elsewhere, not verified here,"

    @property
    def library_entry(self) -> Entry | None:
        """The library's fastest program, or None if none ran."""
        return self.best(frozenset({self.library}))

    @property
    def undecided(self) -> bool:
        """Whether the run-off ended before a winner or a tie was statistically certain."""
        low = self.confidence.margin_low
        raced = self.confidence.rounds > 0 and len(self.entries) > 1
        return raced and not self.confidence.tied and (low is None or low <= 0)

    def best(self, backends: frozenset[str]) -> Entry | None:
        """Returns the fastest entry of `backends`, or None if none of them ran."""
        return next((entry for entry in self.entries if entry.backend in backends), None)

    def __str__(self) -> str:
        """Formats the record in about five lines."""
        return value_of("scheduler.inspect.provenance:record_text")(self)

    def _repr_html_(self) -> str:
        """Formats the record for a notebook."""
        return value_of("scheduler.inspect.report.article:record_html")(self)


class Keyed(Protocol):
    """A record, or its summary from database columns."""

    @property
    def key(self) -> Key: ...
    @property
    def estimated(self) -> bool: ...
    @property
    def precedence(self) -> int: ...


K = TypeVar("K", bound=Keyed)


def preferred(records: Iterable[K]) -> dict[Key, K]:
    """Returns one record per key: the first one of the lowest precedence (`Record.precedence`)."""
    found: dict[Key, K] = {}
    for record in records:
        if record.key not in found or record.precedence < found[record.key].precedence:
            found[record.key] = record
    return found


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Header of a recorded sweep over the schedules of a problem.

    Attributes:
      problem: `Problem.canonical()`.
      platform, kind, architecture, cores: the chip, as in `Target`.
      environment: where and when it started.
      versions: backend -> kernel version, for every measured backend.
      refused: backend -> why it does not support this problem on this chip.
      space: number of schedules of those kernels before any rule.
      dropped: reason -> number of schedules that the rule removed.
      legal: number of remaining schedules, including the library's.
      sample: number of schedules to measure, drawn at random in addition to the library; None means all.
      seed: of that draw, and of the order of measurements.
      repetitions: of each measurement.
      again: number of fastest schedules that are measured again at the end, together with the library's, interleaved.
      rounds: number of rounds of that second pass.
      library: the backend of the library's programs.
    """

    operation: str
    problem: str
    platform: str
    kind: str
    architecture: str
    cores: int
    environment: Environment
    versions: Mapping[str, int]
    refused: Mapping[str, str]
    space: int
    dropped: Mapping[str, int]
    legal: int
    sample: int | None
    seed: int
    repetitions: int
    again: int = 0
    rounds: int = 0
    library: str = LIBRARY


# ------------------------------------------------------------------------------
# Identity of problems and candidates: equality, and the names under which they are stored.

# A hashable schedule; a schedule of a backend; a schedule of one version of a backend's kernel.
Fields = tuple[tuple[str, Choice], ...]
Point = tuple[str, Fields]
Versioned = tuple[Point, int]


class Candidate(Protocol):
    """A schedule of a kernel: a candidate, a trial or an entry of a record."""

    @property
    def backend(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...


def key_of(operation: Operation[Any], problem: Problem, hardware: Hardware) -> Key:
    """Returns the key of a problem on a chip in stores."""
    return Key(operation.name, hardware.id, problem.canonical())


def fields_of(schedule: Schedule) -> Fields:
    return tuple(sorted(schedule.items()))


def point_of(backend: str, schedule: Schedule) -> Point:
    """Returns the identity of a candidate among those of one problem and one version of the kernels."""
    return backend, fields_of(schedule)


def versioned(candidate: Candidate) -> Versioned:
    """Returns the identity of a candidate across kernel versions."""
    return point_of(candidate.backend, candidate.schedule), candidate.version


def schedule_to_text(schedule: Schedule) -> str:
    """Returns JSON, deterministic for the same schedule."""
    return json.dumps(dict(sorted(schedule.items())))


def label_of(backend: str, schedule: Schedule) -> str:
    """Returns the label of a candidate in a run-off, in `Verdict.tied` and its notes; stored, so it must not change."""
    return f"{backend} {schedule_to_text(schedule)}"
