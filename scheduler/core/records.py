"""The values that travel: a key, what was measured, what failed, and the record of who won."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, TypeVar

from scheduler.core.safe_text import encodable, one_line
from search_spaces import spelled
from search_spaces.space import Choice
from search_spaces.space import choice_text as text_of

Clock = Literal["cupti", "wall", "static"]
L2 = Literal["cold", "warm"]
L2S: tuple[L2, ...] = typing.get_args(L2)
# "implausible": a time that no kernel can take; "estimate": without its chip, nothing tells a time; "timeout": a step
# did not end in time; "memory": the device had none left; "worker": the process was lost.
Stage = Literal["lower", "compile", "verify", "time", "implausible", "estimate", "timeout", "memory", "worker"]
Schedule = Mapping[str, Choice]
# The library's backend, where a record or a recording does not name it.
LIBRARY = "xla"
# Times closer than this share are one time: what differs between two measurements of one schedule.
TIE = 0.01


def schedule_text(schedule: Schedule) -> str:
    """A schedule as a person reads it, ``stages=4 tile_m=128``: sorted by name, and so the same everywhere."""
    return " ".join(f"{name}={text_of(value)}" for name, value in sorted(schedule.items()))


def variant_of(schedule: Schedule) -> str:
    """Which code a whole schedule runs, whatever its sizes: its fields that are no numbers, as text."""
    return schedule_text({name: value for name, value in schedule.items() if isinstance(value, bool | str | None)})


def choice_text(backend: str, schedule: Schedule) -> str:
    """The same after its backend, which is all there is of a schedule at its defaults."""
    return f"{backend} {schedule_text(schedule)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Key:
    """What a schedule is stored under.

    Attributes:
      operation: its name.
      hardware: `Hardware.id`: kind, cores and memory, because slices and variants of one chip differ.
      problem: `Problem.canonical()`.
    """

    operation: str
    hardware: str
    problem: str

    def __str__(self) -> str:
        return one_line(f"{self.operation} {spelled(self.operation, self.problem)} on {self.hardware}")


@dataclasses.dataclass(frozen=True)
class Miss:
    """A problem that calls posed and no record answered.

    Attributes:
      key: what its record would be stored under.
      lowered: how often such a call was lowered, and answered by a prediction, by the library or by an error.
      first, last: when, in UTC, as in `Environment.date`.
      line: of the user's code that asked last, as ``file:line``; "" where no file is known.
      place: the name under which another process can `load` the operation; "" where its own name, or none, will do.
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
      median_s: of `samples_s`.
      samples_s: every repetition, in the order taken.
      clock: "cupti" is time on the device; "wall" includes the launch; "static" is none that was taken: cycles that the
        compiler of the chip estimates.
      l2: whether operands came from memory ("cold": buffers rotated) or may have stayed in the cache ("warm").
    """

    median_s: float
    samples_s: tuple[float, ...]
    clock: Clock
    l2: L2

    @property
    def estimated(self) -> bool:
        """Whether nothing ran."""
        return self.clock == "static"

    @property
    def spread_s(self) -> float:
        """Interquartile range of the samples."""
        ordered = sorted(self.samples_s)
        return ordered[(3 * (len(ordered) - 1)) // 4] - ordered[(len(ordered) - 1) // 4]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a candidate has no time: the stage that refused it, and that stage's own words."""

    stage: Stage
    detail: str

    def __post_init__(self) -> None:
        # What a candidate raised may be no text that can be stored, and would keep the record of its search out.
        if (detail := encodable(self.detail)) != self.detail:
            object.__setattr__(self, "detail", detail)

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}"


Outcome = Measurement | Failure


@dataclasses.dataclass(frozen=True)
class AllFailed:
    """A backend none of whose candidates ran: there is no answer from it, and another search tries it again.

    Attributes:
      backend: its name.
      tried: how many of its schedules were tried.
      failure: why the most of them failed, in the words of one of those...
      alike: ...which are so many.
    """

    backend: str
    tried: int
    failure: Failure
    alike: int

    @property
    def own(self) -> bool:
        """Whether its own code is to blame, rather than a lack of memory or a lost process."""
        return self.failure.stage not in ("memory", "worker")

    def __str__(self) -> str:
        share = "" if self.alike == self.tried else f", {self.alike} of them alike"
        return f"{self.tried} of {self.tried} schedules of {self.backend} failed{share}: {self.failure}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate that was tried.

    Attributes:
      number: order within its search, from 0.
      backend, version: the kernel, and which version of it.
      schedule: field -> value, those at their defaults left out.
      outcome: its times, or why it has none.
      predicted_s: the model's time before measuring, seconds.
      fingerprint: of the candidate's jaxpr, where its kernel's version is 0; "" elsewhere, and of one that failed.
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
    """What a measurement depends on besides the chip.

    Attributes:
      jax, jaxlib: versions.
      driver: the device driver's version, "" where there is none.
      date: UTC, ISO 8601, to the second.
    """

    jax: str
    jaxlib: str
    driver: str
    date: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule's place in a record: measured in the run-off, beside the others.

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
    """How sure the choice of a winner is. A record from before this was kept has zero rounds.

    Attributes:
      rounds: of the run-off.
      tied: who were equally fast, "backend schedule" each, the winner first; empty where the winner was alone.
      margin_low, margin_high: the runner-up's time over the winner's, minus one, lies between these; None where nothing
        can be said.
      drift: the slowest round of one and the same schedule over its fastest, minus one.
      notes: what else happened, a sentence each.
    """

    rounds: int = 0
    tied: tuple[str, ...] = ()
    margin_low: float | None = None
    margin_high: float | None = None
    drift: float = 0.0
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observation:
    """How far off the model is for a kernel on one problem.

    Attributes:
      problem: `Problem.canonical()`.
      predicted_s: the model's time of its top prediction there, with the constants that were fitted.
      measured_s: what that took, or the fastest schedule where it was not measured; of a library its fastest program.
    """

    problem: str
    predicted_s: float
    measured_s: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of the cost model as fitted to recorded trials of one kernel on one chip.

    Attributes:
      hardware, operation, backend: `Hardware.id`, and whose trials they were.
      version: of that kernel then.
      constants: name -> value, of those that were fitted (`overheads.Constants`, `residuals.Covariance`).
      problems, trials: how many it was fitted to.
      error: median of |log(predicted / measured)| over these trials.
      environment: of the newest of them.
      observations: what was measured of each problem, against the model with these constants.
      variants: of the kernel, those that were among the fast trials (`variant_of`).
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
class Record:
    """The outcome of one search.

    Attributes:
      key: what it answers.
      entries: the winner first, then the runner-up, then the best of every other backend that ran, the library's always
        among them. Each backend's best is here, so that an answer kept to some backends is here too.
      versions: backend -> kernel version, of every backend that competed: a newer kernel reopens the race.
      environment: where and when it was measured.
      budget: trials allowed.
      tried: trials measured or failed.
      space: schedules in the whole space, before any rule.
      confidence: how sure the winner is.
      excluded: schedules left untried because their lower bound exceeds the fastest time.
      stopped: why the search ended, in words; "" where a record is older than that.
      failed: the backends that have no entry because each of their candidates failed; a record from before this was
        kept names none.
      library: the backend whose programs are the answer to beat.
      brief: few schedules were tried, above all those that won at the two next points of a range: it answers calls,
        and makes no search needless.
      reference: the fingerprint of the reference's jaxpr, where the version of a kernel is 0; "" elsewhere.
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
    brief: bool = False
    reference: str = ""

    @property
    def winner(self) -> Entry:
        return self.entries[0]

    @property
    def estimated(self) -> bool:
        """Whether its times are the compiler's estimates: what was measured goes before it."""
        return self.winner.measurement.estimated

    @property
    def library_entry(self) -> Entry | None:
        """The library's fastest program, None where none ran."""
        return self.best(frozenset({self.library}))

    @property
    def undecided(self) -> bool:
        """Whether the run-off ended before anybody was the fastest, or as fast as another, beyond doubt."""
        low = self.confidence.margin_low
        raced = self.confidence.rounds > 0 and len(self.entries) > 1
        return raced and not self.confidence.tied and (low is None or low <= 0)

    def best(self, backends: frozenset[str]) -> Entry | None:
        """The fastest entry among `backends`, or None where none of them ran."""
        return next((entry for entry in self.entries if entry.backend in backends), None)

    def __str__(self) -> str:
        """The record in about five lines, for a person."""
        return str(importlib.import_module("scheduler.inspect.notebook").record_text(self))

    def _repr_html_(self) -> str:
        """What a notebook shows. Found by its name: whatever shows a record imports this file."""
        return str(importlib.import_module("scheduler.inspect.notebook").record_html(self))


class Keyed(Protocol):
    """A record, or what its columns tell of it."""

    @property
    def key(self) -> Key: ...
    @property
    def estimated(self) -> bool: ...


K = TypeVar("K", bound=Keyed)


def preferred(records: Iterable[K]) -> dict[Key, K]:
    """One of each key: the first of them that was measured, or, for want of any, the first estimate."""
    found: dict[Key, K] = {}
    for record in records:
        if record.key not in found or (found[record.key].estimated and not record.estimated):
            found[record.key] = record
    return found


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep of a problem's schedules measures: the head of its recording.

    Attributes:
      operation: its name.
      problem: `Problem.canonical()`.
      platform, kind, architecture, cores: the chip, as in `Target`.
      environment: where and when it was begun.
      versions: backend -> kernel version, of every backend that is measured.
      refused: backend -> why it cannot do this problem there.
      space: schedules of those kernels before any rule.
      dropped: reason -> how many of them it removed.
      legal: how many are left, the library's included.
      sample: how many of these, drawn at random besides the library, are to be measured; None is all.
      seed: of that draw, and of the order of measuring.
      repetitions: of each measurement.
      again: how many of the fastest, and the library's, are measured once more when all are done, in turns...
      rounds: ...of so many rounds.
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
