"""Defines the typed messages between a pool and its processes, and encodes them as one JSON message per line."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from scheduler.core.records import L2, Failure, Measurement, Outcome, Schedule
from search_spaces.space import as_choice
from search_spaces.target import Target


@dataclasses.dataclass(frozen=True)
class Caution:
    """A confirmed candidate whose results differ from the reference for special operands that are disputed."""

    detail: str


# What confirming a candidate found; None if it is correct.
Finding = Failure | Caution | None


# The step that a process is about to begin: "wait" waits for the device lock, "run" runs on the device.
Step = Literal["prepare", "lower", "compile", "wait", "run"]
# The kinds of request. A compile process compiles a candidate ("measure"), the further programs that confirming it runs
# ("confirm"), or the programs that check the results of a problem ("prepare"). The measuring process does all other
# work. Any process traces a candidate to find its fingerprint ("trace").
Do = Literal["measure", "again", "confirm", "prepare", "trace"]


@dataclasses.dataclass(frozen=True)
class Init:
    """The first message to a process.

    Attributes:
      uuid: the device.
      platform: JAX's name for the platform of the device.
      programs: the directory of compiled programs that the processes of a pool share.
      kind: the driver's name of the chip for which times are estimated, if the chip is absent.
      target: the chip to compile for.
    """

    uuid: str
    platform: str
    programs: str = ""
    kind: str = ""
    target: Target | None = None


@dataclasses.dataclass(frozen=True)
class Ready:
    """The reply to `Init`: the chip that was found."""

    target: Target


@dataclasses.dataclass(frozen=True)
class InitFailed:
    """The reply to `Init` if no device was found."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ReservedProblem:
    """A problem (canonical JSON) with the name of its operation and the cache state of its operands."""

    operation: str
    problem: str
    l2: L2


@dataclasses.dataclass(frozen=True)
class Programs:
    """The files of one candidate's compiled programs, by name within the shared directory.

    Attributes:
      candidate: "" if the program cannot be moved between processes; the measuring process then compiles it.
      again: the different programs that the candidate gave when it was traced again.
      neighbour: the candidate compiled for the neighbour of the problem; "" if its schedule is not legal there.
      fingerprint: of the candidate, if the request was to trace it.
    """

    candidate: str = ""
    again: tuple[str, ...] = ()
    neighbour: str = ""
    fingerprint: str = ""

    @property
    def names(self) -> list[str]:
        """All file names."""
        return [name for name in (self.candidate, *self.again, self.neighbour) if name]


@dataclasses.dataclass(frozen=True)
class Request:
    """A `runner.Task` and the work to do with it; operation by name, problem as canonical JSON.

    Attributes:
      others: other problems that are being searched; the process keeps its state for these problems and drops all
        other.
      reference: `Problem.reference_text`.
      programs: files of compiled programs: the candidate's own; to confirm it, also those in `Answer.programs`.
      part: the part to prepare (`buffers.prepare`).
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
    others: tuple[ReservedProblem, ...] = ()
    fingerprint: str = ""
    reference: str = ""
    programs: Programs | None = None
    part: int = 0


@dataclasses.dataclass(frozen=True)
class StepStarted:
    """Sent before each step of a request, so that a watching process knows in which step this one hangs."""

    step: Step


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a request.

    Attributes:
      outcome: None if a candidate is correct, or was compiled.
      retryable: the cause may not be the candidate; the request should be retried in another process.
      fatal: why this process ends now; "" if it continues to serve requests.
      programs: the programs that a compile process compiled.
      refused: why the measuring process compiled a program instead of loading it, or why a compile process stored none;
        "" otherwise.
    """

    outcome: Outcome | Finding
    retryable: bool = False
    fatal: str = ""
    programs: Programs | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Raised:
    """The end of a request with `raising` set: the exception and its traceback."""

    text: str
    trace: str


Reply = Answer | Raised
Message = Init | Ready | InitFailed | Request | StepStarted | Reply
_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Init,
        Ready,
        InitFailed,
        ReservedProblem,
        Programs,
        Request,
        StepStarted,
        Answer,
        Raised,
        Target,
        Measurement,
        Failure,
        Caution,
    )
}
# The key that holds the type name of a JSON object. No field of a message or schedule has this name.
_TYPE = "$type"


def encode(message: Message) -> bytes:
    """Encodes a message as one line, including the newline."""
    return json.dumps(message, default=lambda value: {_TYPE: type(value).__name__, **vars(value)}).encode() + b"\n"


def decode(line: str | bytes) -> Message:
    """Decodes a line that `encode` wrote.

    Raises:
      ValueError: `line` is not a message.
    """
    try:
        message = json.loads(line, object_hook=_typed)
    except (ValueError, KeyError, TypeError, RecursionError):
        message = None
    if isinstance(message, Answer) and not isinstance(message.outcome, Measurement | Failure | Caution | None):
        message = None
    if not isinstance(message, Message):
        raise ValueError(f"no message: {line[:60]!r}")
    return message


def _typed(fields: dict[str, Any]) -> Any:
    # Sequences of messages and of schedules are tuples, which JSON does not have.
    values = {name: as_choice(value) for name, value in fields.items()}
    return _TYPES[values.pop(_TYPE)](**values) if _TYPE in values else values
