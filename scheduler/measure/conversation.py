"""The main loop of a pool process: it answers requests one by one until its channel closes."""

from __future__ import annotations

import functools
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from scheduler.core import fingerprints
from scheduler.core.errors import CandidateFailed
from scheduler.measure.blame import first_line
from scheduler.measure.build import Step
from scheduler.measure.protocol import (
    Announcement,
    Answer,
    Defect,
    Hello,
    Message,
    Raised,
    Ready,
    Reply,
    Request,
    Unable,
    decode,
    encode,
)
from scheduler.measure.subprocess_pipe import channel_to_parent
from search_spaces import load
from search_spaces.configuration import measurements
from search_spaces.kernel import Target
from search_spaces.reference_programs import shared_in


class Service(Protocol):
    """Answers the requests to a process.

    Attributes:
      target: the chip that the answers refer to.
    """

    target: Target

    def answer(self, request: Request) -> Answer: ...


# Creates the service of a process from the first message. An exception means that the process cannot be used.
Begin = Callable[[Hello, Callable[[Step], None]], Service]


def converse(begin: Begin) -> None:
    """Answers the requests to this process until the channel closes."""
    channel = channel_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a KeyboardInterrupt then comes from a candidate
    requests = channel.makefile("r", encoding="utf-8")
    own = os.getpid()

    def say(message: Message) -> None:
        if os.getpid() != own:
            os._exit(0)  # a candidate forked, and this is the forked process
        channel.sendall(encode(message))

    first = requests.readline()
    if not first:
        return
    hello = decode(first)
    assert isinstance(hello, Hello)
    try:
        service = begin(hello, lambda step: say(Announcement(step)))
    except Exception as error:
        say(Unable(first_line(error)))
        return
    say(Ready(service.target))
    with shared_in(hello.programs), measurements():
        _serve(service, requests, say)


def loads_otherwise(request: Request, target: Target) -> str:
    """Explains why this process loads a different candidate than the requesting process; "" if it does not."""
    if not request.fingerprint:
        return ""
    operation = load(request.operation)
    problem = operation.problem.from_canonical(request.problem)
    own = fingerprints.of_candidate(operation, problem, request.backend, request.schedule, target)
    if own == request.fingerprint:
        return ""
    return (
        f"a worker process that loads {request.operation} computes something else than the process that tunes it: "
        "something was changed after the import there, or the file was edited meanwhile"
    )


def replied(answer: Callable[[], Answer]) -> Reply:
    """Returns the answer, or the message for the exception that it raised."""
    try:
        return answer()
    except CandidateFailed as failed:  # the task has `raising` set
        return Raised(str(failed), "".join(traceback.format_exception(failed.__cause__)))
    except BaseException:  # a defect: the parent raises it, with the whole traceback
        return Defect(traceback.format_exc())


def _serve(service: Service, requests: Iterable[str], say: Callable[[Message], None]) -> None:
    def answer(line: str) -> Answer:
        request = decode(line)
        assert isinstance(request, Request)
        return service.answer(request)

    for line in requests:
        reply = replied(functools.partial(answer, line))
        say(reply)
        if isinstance(reply, Answer) and reply.fatal:
            os._exit(0)  # skips destructors: their behaviour with a broken CUDA context is undefined
