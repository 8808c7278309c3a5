"""A host of a fleet without a GPU, which compiles candidates for the GPUs of other hosts."""

from __future__ import annotations

import functools
import socket
from typing import Any

from scheduler.core import hardware as chips
from scheduler.core.records import Failure
from scheduler.fleet.messages import versions
from scheduler.measure.compilers import Compilers, count_of, read_files, write_files
from scheduler.measure.conversation import replied
from scheduler.measure.limits import Limits
from scheduler.measure.protocol import Answer, Request, decode, encode
from scheduler.measure.runner import RunnerOptions
from scheduler.measure.runner import Task as MeasureTask
from search_spaces import load
from search_spaces.kernel import Target


class CompileAgent:
    """Compile processes of one host, used by the measuring processes of other hosts.

    Args:
      options: the number of processes, and their timeouts.
    """

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self._compilers = Compilers(count_of(options.workers))
        self._limits: Limits | None = None

    def describe(self) -> dict[str, Any]:
        """Returns `host`, `versions`, and the `count` of processes."""
        return {"host": socket.gethostname(), "versions": versions(), "count": self._compilers.count}

    def begin(self, target: Target) -> None:
        """Starts the processes, which compile for `target`."""
        self._limits = Limits(self._options, chips.describe(target))
        self._compilers.start()
        self._compilers.aim(target)

    def compile(self, message: bytes, files: dict[str, bytes]) -> tuple[bytes, dict[str, bytes]]:
        """Serves an encoded request; returns the encoded reply and the content of its files, by name.

        `files` holds the files that the request names. May be called from any thread.
        """
        request = decode(message)
        assert isinstance(request, Request)
        assert self._limits is not None, "`begin` comes first"
        write_files(files, self._compilers.directory)
        reply = replied(functools.partial(self._answer, request, self._limits))
        if not isinstance(reply, Answer) or reply.programs is None:
            return encode(reply), {}
        made = read_files(reply.programs, self._compilers.directory)
        self._compilers.forget(reply.programs)
        return encode(reply), made

    def _answer(self, request: Request, limits: Limits) -> Answer:
        operation = load(request.operation)
        task = MeasureTask(
            operation,
            operation.problem.from_canonical(request.problem),
            request.backend,
            request.schedule,
            request.repetitions,
            request.l2,
            raising=request.raising,
            fingerprint=request.fingerprint,
        )
        found = self._compilers.compile(task, request.do, limits, request.programs)
        return Answer(found) if isinstance(found, Failure) else Answer(None, programs=found)
