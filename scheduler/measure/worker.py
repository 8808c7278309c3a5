"""The main of a worker process: requests come in, announcements and answers go out, until the pipe closes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp

from scheduler.core import hardware as chips
from scheduler.core.errors import CandidateFailed
from scheduler.core.records import L2, Failure, Outcome, Stage
from scheduler.measure.bench import Bench, Step, first_line
from scheduler.measure.gpu import Gpu
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
from scheduler.measure.subprocess_pipe import die_with_parent
from search_spaces import load
from search_spaces.kernel import Target
from search_spaces.reference_programs import shared_in

# How XLA and CUDA call it when no memory is left on the device.
OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY", re.IGNORECASE)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to standard output; the answers keep it to themselves

    def say(message: Message) -> None:
        answers.write(encode(message))
        answers.flush()

    first = sys.stdin.readline()
    if not first:
        return
    hello = decode(first)
    assert isinstance(hello, Hello)
    try:
        # By its name: among several platforms JAX passes over one that does not start.
        target = chips.target_of(jax.devices(hello.platform)[0])
    except Exception as error:
        say(Unable(first_line(error)))
        return
    say(Ready(target))
    service = _Service(target, Gpu("", hello.uuid, "", 0), lambda step: say(Announcement(step)))
    with shared_in(hello.programs):
        _serve(service, say)


def _serve(service: _Service, say: Callable[[Message], None]) -> None:
    for line in sys.stdin:
        reply: Reply
        try:
            request = decode(line)
            assert isinstance(request, Request)
            reply = service.answer(request)
        except CandidateFailed as failed:  # as the task wanted
            reply = Raised(str(failed), "".join(traceback.format_exception(failed.__cause__)))
        except Exception:  # the parent raises it: a defect, with its whole trace
            reply = Defect(traceback.format_exc())
        say(reply)
        if isinstance(reply, Answer) and reply.fatal:
            os._exit(0)  # what a broken context would do in its destructors, nobody knows


class _Service:
    """What answers requests: the bench of the problem at hand, and whether it can still be trusted."""

    def __init__(self, target: Target, gpu: Gpu, announce: Callable[[Step], None]) -> None:
        self._target, self._gpu, self._announce = target, gpu, announce
        self._bench: Bench | None = None
        self._what: tuple[str, str, L2] | None = None
        self._used = False

    def answer(self, request: Request) -> Answer:
        try:
            outcome = self._do(request)
            if isinstance(outcome, Failure) and outcome.stage == "verify" and self._used:
                # A candidate before this one may have written into the operands: only a fresh bench proves it wrong.
                self._bench = None
                outcome = self._do(request)
        except jax.errors.JaxRuntimeError as error:  # outside of any candidate's compilation or run
            lost = first_line(error)
            stage: Stage = "memory" if OUT_OF_MEMORY.search(lost) else "worker"
            return Answer(Failure(stage, lost), retryable=True, fatal=lost)
        self._used = True
        if not isinstance(outcome, Failure):
            return Answer(outcome)
        if OUT_OF_MEMORY.search(outcome.detail):
            return Answer(Failure("memory", outcome.detail), retryable=True, fatal=outcome.detail)
        if outcome.stage != "lower" and (why := self._device_error()):
            return Answer(outcome, retryable=outcome.stage == "compile", fatal=why)
        return Answer(outcome)

    def _do(self, request: Request) -> Outcome | None:
        what = request.operation, request.problem, request.l2
        if self._bench is None or self._what != what:
            self._announce("prepare")
            self._bench, self._used = None, False  # frees the operands of the one before
            operation = load(request.operation)
            self._bench = Bench(
                operation,
                operation.problem.from_canonical(request.problem),
                chips.describe(self._target),
                l2=request.l2,
                exclusive=self._gpu.exclusive,
                announce=self._announce,
            )
            self._what = what
        bench, backend, schedule, repetitions = self._bench, request.backend, request.schedule, request.repetitions
        match request.do:
            case "measure":
                return bench.measure(
                    backend, schedule, repetitions, incumbent_s=request.incumbent_s, raising=request.raising
                )
            case "again":
                return bench.again(backend, schedule, repetitions)
            case "confirm":
                return bench.confirm(backend, schedule)

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


if __name__ == "__main__":
    main()
