"""The main program of a process that estimates times on an absent chip with the compiler of the chip."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable

from scheduler.contrib.tpu.ahead_of_time import elsewhere
from scheduler.contrib.tpu.estimate import estimate, interpreted
from scheduler.core import hardware as chips
from scheduler.core.hardware import GIB
from scheduler.measure.conversation import converse
from scheduler.measure.fork_server import channel_to_parent
from scheduler.measure.protocol import Answer, Init, Request, Step
from search_spaces import load

# The compiler leaks some memory with each program. A process that holds more than this is replaced.
MOST_BYTES = 4 * GIB


def main() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, kill this process before its parent
    converse(_Estimating, channel_to_parent())


class _Estimating:
    """Serves requests for the chip that `init` names."""

    def __init__(self, init: Init, announce: Callable[[Step], None]) -> None:
        self._hardware = elsewhere(chips.find(init.kind))
        self.target = self._hardware.target
        self._announce = announce

    def answer(self, request: Request) -> Answer:
        self._announce("prepare")
        operation = load(request.operation)
        subject = operation, operation.problem.from_canonical(request.problem), self._hardware
        candidate = request.backend, request.schedule
        if request.do == "confirm":
            wrong = interpreted(*subject, *candidate)
            # A wrong candidate may leave the interpreter in an undefined state, so the process ends.
            return Answer(wrong, fatal="" if wrong is None else str(wrong))
        outcome = estimate(*subject, *candidate, announce=self._announce, raising=request.raising)
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Answer(outcome, fatal=f"it held {resident_bytes / GIB:.1f} GiB" if resident_bytes > MOST_BYTES else "")


if __name__ == "__main__":
    main()
