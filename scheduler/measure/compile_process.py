"""The main program of a compile process.

It compiles candidates for a chip that it does not see, and writes them to files.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import resource
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from scheduler.core import hardware as chips
from scheduler.core.hardware import CPU, GIB
from scheduler.core.records import Failure
from scheduler.measure import absent_gpu
from scheduler.measure.buffers import prepare
from scheduler.measure.build import Built, CandidateBuilder, save, saved_digest
from scheduler.measure.conversation import converse, mismatch_reason
from scheduler.measure.fork_server import serve
from scheduler.measure.protocol import Answer, Init, Programs, Request, Step
from scheduler.model.pruning import illegal
from search_spaces import load
from search_spaces.kernel import Kernel
from search_spaces.lowering_compat import infer_layouts_sooner
from search_spaces.problem import Problem

# A compiler leaks some memory with each program. A process that holds more than this is replaced.
MOST_BYTES = 2 * GIB
# A Linux nice value, with a third of the weight of the default 0 (sched_prio_to_weight in kernel/sched/core.c). The
# lowest priority, 19, has 1/68: beside another user's busy process, a search would stand still.
LOWER_PRIORITY = 5


class Compiling:
    """Compiles candidates for the chip that `init` names.

    The process does not access the chip: it creates no CUDA context and takes no device memory.
    """

    def __init__(self, init: Init, announce: Callable[[Step], None]) -> None:
        assert init.target is not None
        self.target, self._announce, self._directory = init.target, announce, Path(init.programs)
        self._hardware = chips.describe(init.target)
        infer_layouts_sooner()
        self._lowering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if self.target.platform == CPU.platform:
            self._device, self._builder = jax.devices("cpu")[0], CandidateBuilder(self._hardware, announce)
        else:
            self._device = absent_gpu.device(self._hardware)
            self._builder = CandidateBuilder(self._hardware, announce, self._device)
            self._lowering = lambda: absent_gpu.compiling_for(self._hardware)

    def answer(self, request: Request) -> Answer:
        """Compiles the requested programs.

        The answer holds the program files of the candidate, or the reason why it failed. If files cannot be stored, it
        holds none, and the measuring process compiles.
        """
        self._announce("prepare")
        refused = ""
        try:
            found = self._compiled(request)
        except OSError as error:  # the shared directory is full, or was removed
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            found, refused = Programs(), f"{error}; free space in {self._directory.parent}, or set TMPDIR"
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        fatal = f"it held {resident_bytes / GIB:.1f} GiB" if resident_bytes > MOST_BYTES else ""
        if isinstance(found, Failure):
            return Answer(found, fatal=fatal)
        return Answer(None, fatal=fatal, programs=found, refused=refused)

    def _compiled(self, request: Request) -> Programs | Failure:
        operation = load(request.operation)
        problem, kernel = operation.problem.from_canonical(request.problem), operation.kernel(request.backend)
        if request.do == "prepare":
            prepare(problem, self._device, request.part)
            return Programs()
        if request.do == "measure":
            with self._lowering():
                built = self._builder.build(kernel, problem, request.schedule, raising=request.raising)
            return built if isinstance(built, Failure) else Programs(self._save(built))
        if other := mismatch_reason(request, self.target):
            return Failure("verify", other)
        with self._lowering():
            return self._confirmation_programs(kernel, problem, request)

    def _confirmation_programs(
        self, kernel: Kernel[Any, Any], problem: Problem, request: Request
    ) -> Programs | Failure:
        assert request.programs is not None
        first, neighbour_name = request.programs.candidate, ""
        again: list[str] = []
        digest_before = saved_digest(self._directory / first)
        for built in self._builder.traced_again(kernel, problem, request.schedule, digest_before):
            if isinstance(built, Failure):
                return Failure("verify", f"traced again {built}")
            if not (name := self._save(built)):
                return Failure("verify", "traced again it is another program, which no other process can load")
            again.append(name)
        neighbour = problem.neighbour()
        if neighbour is not None and illegal(kernel, neighbour, self._hardware, request.schedule) is None:
            built_neighbour = self._builder.build(kernel, neighbour, request.schedule)
            if isinstance(built_neighbour, Failure):
                return Failure("verify", f"on {neighbour} {built_neighbour}")
            neighbour_name = self._save(built_neighbour)
        return Programs(first, tuple(again), neighbour_name)

    def _save(self, built: Built) -> str:
        name = uuid.uuid4().hex
        return name if save(built, self._directory / name) else ""


def _yield_to_others() -> None:
    """Gives this process a lower CPU priority, so that the measuring process rarely waits for it.

    Each process of a pool is the leader of its own Unix session. If Linux groups processes by Unix session (autogroup),
    as on desktops, the priority of the group applies, so it is set too.
    """
    os.nice(LOWER_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LOWER_PRIORITY))


def _main(channel: socket.socket) -> None:
    _yield_to_others()
    converse(Compiling, channel)


if __name__ == "__main__":
    # Once for all processes that are forked: importing it takes a third as long as importing JAX.
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    # The objects that exist after the imports live as long as the process. The garbage collector does not search them.
    gc.freeze()
    serve(_main)
