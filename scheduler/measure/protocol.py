"""The messages between a pool and its processes: one message a line, typed, encoded and decoded here alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule
from scheduler.measure.build import Step
from search_spaces.kernel import Target

# What a process may be asked to do. A compile process compiles a candidate to "measure" it, what else is run to
# "confirm" it, and what checks the answers to a problem, to "prepare" it. A measuring process does the rest.
Do = Literal["measure", "again", "confirm", "prepare"]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first line to a process: the device by its `uuid`, and JAX's name of its platform.

    Attributes:
      programs: the directory of compiled programs that the processes of a pool share.
      kind: the chip to estimate times for, by its driver's name, where that is not here.
      target: the chip to compile for.
    """

    uuid: str
    platform: str
    programs: str = ""
    kind: str = ""
    target: Target | None = None


@dataclasses.dataclass(frozen=True)
class Ready:
    """The answer to `Hello`: the chip that was found."""

    target: Target


@dataclasses.dataclass(frozen=True)
class Unable:
    """The answer to `Hello` where no device was found."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Held:
    """A problem, as canonical JSON, of an operation by name, and what its operands meet."""

    operation: str
    problem: str
    l2: L2


@dataclasses.dataclass(frozen=True)
class Programs:
    """Files of compiled programs of one candidate, by name within the shared directory.

    Attributes:
      candidate: "" where the candidate cannot be moved between processes: the measuring process compiles it.
      again: the different programs that the candidate became when it was traced again.
      neighbour: of the candidate on the neighbour of the problem; "" where it is not legal there.
    """

    candidate: str = ""
    again: tuple[str, ...] = ()
    neighbour: str = ""

    @property
    def names(self) -> list[str]:
        """Every file."""
        return [name for name in (self.candidate, *self.again, self.neighbour) if name]


@dataclasses.dataclass(frozen=True)
class Request:
    """A `runner.Task`, its operation by name and its problem as canonical JSON, and what to do with it.

    Attributes:
      beside: other problems that are under way: what the process holds of these it keeps, and of no others.
      programs: files of compiled programs: the candidate's; to confirm it, also the programs of `Answer.programs`.
      part: of what is to be prepared (`checks.prepare`).
    """

    do: Do
    operation: str
    problem: str
    backend: str
    schedule: Schedule
    repetitions: int
    l2: L2
    incumbent_s: float | None
    raising: bool
    beside: tuple[Held, ...] = ()
    fingerprint: str = ""
    programs: Programs | None = None
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Said before each step of a request, so that whoever watches knows what a process hangs in."""

    step: Step


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a request.

    Attributes:
      outcome: None where a candidate was confirmed, or compiled.
      retryable: something else than the candidate may be at fault: it deserves another attempt in another process.
      fatal: why this process ends now and can serve no longer; "" where it goes on.
      programs: what a compile process compiled.
      refused: why the measuring process did not load a program, but compiled it; "" where it loaded all.
    """

    outcome: Outcome | None
    retryable: bool = False
    fatal: str = ""
    programs: Programs | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Raised:
    """The end of a request that is `raising`: what the candidate raised, and its traceback."""

    text: str
    trace: str


@dataclasses.dataclass(frozen=True)
class Defect:
    """The end of a request that met a defect of the program, not of the candidate."""

    trace: str


Reply = Answer | Raised | Defect
Message = Hello | Ready | Unable | Request | Announcement | Reply
_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Hello,
        Ready,
        Unable,
        Held,
        Programs,
        Request,
        Announcement,
        Answer,
        Raised,
        Defect,
        Target,
        Measurement,
        Failure,
    )
}
# The key under which a JSON object names its type; no field of any message or schedule is called so.
_TYPE = "$type"


def encode(message: Message) -> bytes:
    """One line, its end included."""
    return json.dumps(message, default=lambda value: {_TYPE: type(value).__name__, **vars(value)}).encode() + b"\n"


def decode(line: str | bytes) -> Message:
    """The inverse of `encode`.

    Raises:
      ValueError: `line` is no message.
    """
    try:
        message = json.loads(line, object_hook=_typed)
    except (ValueError, KeyError, TypeError, RecursionError):
        message = None
    if isinstance(message, Answer) and not isinstance(message.outcome, Measurement | Failure | None):
        message = None
    if not isinstance(message, Message):
        raise ValueError(f"no message: {line[:60]!r}")
    return message


def _typed(fields: dict[str, Any]) -> Any:
    if _TYPE not in fields:
        return fields
    cls = _TYPES[fields.pop(_TYPE)]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
