"""The main of a process that estimates times on a chip that is not here, by the compiler of the chip."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable

from scheduler.core import hardware as chips
from scheduler.core.hardware import GIB
from scheduler.measure.ahead_of_time import elsewhere
from scheduler.measure.build import Step
from scheduler.measure.conversation import converse
from scheduler.measure.estimate import estimate, interpreted
from scheduler.measure.protocol import Answer, Hello, Request
from search_spaces import load

# The compiler keeps some of what it took for each program: a process that has come to hold so much gives way to a new
# one.
MOST_BYTES = 4 * GIB


def main() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out, this process ends before whoever waits for it
    converse(_Compiling)


class _Compiling:
    """What answers for the chip that `hello` names."""

    def __init__(self, hello: Hello, announce: Callable[[Step], None]) -> None:
        self._hardware = elsewhere(chips.find(hello.kind))
        self.target = self._hardware.target
        self._announce = announce

    def answer(self, request: Request) -> Answer:
        self._announce("prepare")
        operation = load(request.operation)
        what = operation, operation.problem.from_canonical(request.problem), self._hardware
        candidate = request.backend, request.schedule
        if request.do == "confirm":
            wrong = interpreted(*what, *candidate)
            # After one that is wrong, the interpreter's state may be what that left.
            return Answer(wrong, fatal="" if wrong is None else str(wrong))
        outcome = estimate(*what, *candidate, announce=self._announce, raising=request.raising)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Answer(outcome, fatal=f"it held {held / GIB:.1f} GiB" if held > MOST_BYTES else "")


if __name__ == "__main__":
    main()
