"""What a pool and its worker processes say to each other: one message a line, typed, encoded and decoded here alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule
from scheduler.measure.bench import Step
from search_spaces.kernel import Target

# What a worker may be asked to do with a candidate.
Do = Literal["measure", "again", "confirm"]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first line to a worker: the device to serve, by its `uuid`, its `bus` and JAX's name of its platform.

    Attributes:
      programs: the directory of programs that the workers of a pool share.
      kind: the chip to compile for, by its driver's name, where that is not here.
    """

    uuid: str
    platform: str
    bus: str = ""
    programs: str = ""
    kind: str = ""


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
class Request:
    """A `runner.Task`, its operation by name and its problem as canonical JSON, and what to do with it.

    Attributes:
      beside: other problems that are under way: what the process holds of these it keeps, and of no others.
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


@dataclasses.dataclass(frozen=True)
class Announcement:
    """Said before each step of a request, so that whoever watches knows what a process hangs in."""

    step: Step


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a request.

    Attributes:
      outcome: None where a candidate was confirmed.
      retryable: something else than the candidate may be at fault: it deserves another attempt in another process.
      fatal: why this process ends now and can serve no longer; "" where it goes on.
      program: `Bench.program` of what was measured; "" where it was not.
    """

    outcome: Outcome | None
    retryable: bool = False
    fatal: str = ""
    program: str = ""


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
    for cls in (Hello, Ready, Unable, Held, Request, Announcement, Answer, Raised, Defect, Target, Measurement, Failure)
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
