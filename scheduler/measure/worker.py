"""The main of a worker process: requests come in, announcements and answers go out, until the channel closes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import jax.numpy as jnp

from scheduler.core import fingerprints
from scheduler.core import hardware as chips
from scheduler.core.errors import CandidateFailed
from scheduler.core.records import Failure, Outcome, Stage
from scheduler.measure import turns
from scheduler.measure.bench import Bench, Step
from scheduler.measure.benches_at_hand import BenchesAtHand
from scheduler.measure.blame import first_line
from scheduler.measure.gpu import Gpu
from scheduler.measure.protocol import (
    Announcement,
    Answer,
    Defect,
    Held,
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
from search_spaces.kernel import Target
from search_spaces.lowering_compat import infer_layouts_sooner
from search_spaces.reference_programs import shared_in

# How XLA and CUDA call it when no memory is left on the device.
OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY", re.IGNORECASE)


class Service(Protocol):
    """What answers the requests to a process.

    Attributes:
      target: the chip that it tells of.
    """

    target: Target

    def answer(self, request: Request) -> Answer: ...


# What a process becomes once it is told what for. Whatever it raises is why it cannot.
Begin = Callable[[Hello, Callable[[Step], None]], Service]


def main() -> None:
    converse(_on_device)


def _on_device(hello: Hello, announce: Callable[[Step], None]) -> Service:
    with turns.few_at_once("start") if hello.platform == "cuda" else contextlib.nullcontext():
        # By its name: among several platforms JAX passes over one that does not start.
        target = chips.target_of(jax.devices(hello.platform)[0])
    infer_layouts_sooner()
    return _Measuring(target, Gpu("", hello.uuid, "", 0, bus=hello.bus), announce)


def converse(begin: Begin) -> None:
    """Answers what this process is asked, until the channel closes."""
    channel = channel_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is then one that a candidate raised
    requests = channel.makefile("r", encoding="utf-8")
    own = os.getpid()

    def say(message: Message) -> None:
        if os.getpid() != own:
            os._exit(0)  # a candidate forked, and both processes came here
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
    with shared_in(hello.programs):
        _serve(service, requests, say)


def _serve(service: Service, requests: Iterable[str], say: Callable[[Message], None]) -> None:
    for line in requests:
        reply: Reply
        try:
            request = decode(line)
            assert isinstance(request, Request)
            reply = service.answer(request)
        except CandidateFailed as failed:  # as the task wanted
            reply = Raised(str(failed), "".join(traceback.format_exception(failed.__cause__)))
        except BaseException:  # the parent raises it: a defect, with its whole trace
            reply = Defect(traceback.format_exc())
        say(reply)
        if isinstance(reply, Answer) and reply.fatal:
            os._exit(0)  # what a broken context would do in its destructors, nobody knows


class _Measuring:
    """The benches of the problems at hand, and whether they can still be trusted."""

    def __init__(self, target: Target, gpu: Gpu, announce: Callable[[Step], None]) -> None:
        self.target, self._gpu, self._announce = target, gpu, announce
        self._benches = BenchesAtHand(self._made)

    def answer(self, request: Request) -> Answer:
        program = ""

        def asked(bench: Bench) -> Outcome | None:
            nonlocal program
            outcome = _asked(bench, request)
            program = bench.program(request.backend, request.schedule)
            return outcome

        if request.do == "confirm" and (other := self._other(request)):
            return Answer(Failure("verify", other))
        try:
            what = Held(request.operation, request.problem, request.l2)
            outcome = self._benches.ask(what, asked, beside=request.beside)
        except jax.errors.JaxRuntimeError as error:  # outside of any candidate's compilation or run
            lost = first_line(error)
            stage: Stage = "memory" if OUT_OF_MEMORY.search(lost) else "worker"
            return Answer(Failure(stage, lost), retryable=True, fatal=lost)
        if not isinstance(outcome, Failure):
            return Answer(outcome, program=program)
        if OUT_OF_MEMORY.search(outcome.detail):
            return Answer(Failure("memory", outcome.detail), retryable=True, fatal=outcome.detail)
        if outcome.stage != "lower" and (why := self._device_error()):
            return Answer(outcome, retryable=outcome.stage == "compile", fatal=why)
        return Answer(outcome)

    def _other(self, request: Request) -> str:
        """Why what this process measures is not what the process that asks has, in words; "" where it is."""
        if not request.fingerprint:
            return ""
        operation = load(request.operation)
        problem = operation.problem.from_canonical(request.problem)
        own = fingerprints.of_candidate(operation, problem, request.backend, request.schedule, self.target)
        if own == request.fingerprint:
            return ""
        return (
            f"a worker process that loads {request.operation} computes something else than the process that tunes it: "
            "something was changed after the import there, or the file was edited meanwhile"
        )

    def _made(self, what: Held) -> Bench:
        self._announce("prepare")
        operation = load(what.operation)
        return Bench(
            operation,
            operation.problem.from_canonical(what.problem),
            chips.describe(self.target),
            l2=what.l2,
            exclusive=self._gpu.exclusive,
            announce=self._announce,
        )

    def _device_error(self) -> str | None:
        """Why nothing runs on the device any more, or None: an illegal access ends a CUDA context for good."""
        self._announce("wait")
        with self._gpu.exclusive():
            self._announce("run")
            try:
                jax.block_until_ready(jnp.arange(8) + 1)
            except jax.errors.JaxRuntimeError as error:
                return first_line(error)
        return None


def _asked(bench: Bench, request: Request) -> Outcome | None:
    backend, schedule, repetitions = request.backend, request.schedule, request.repetitions
    match request.do:
        case "measure":
            return bench.measure(
                backend, schedule, repetitions, incumbent_s=request.incumbent_s, raising=request.raising
            )
        case "again":
            return bench.again(backend, schedule, repetitions)
        case "confirm":
            return bench.confirm(backend, schedule)


if __name__ == "__main__":
    main()
