"""A process that compiles schedules for a TPU which is not here, and answers what its compiler says of each.

A line in is a question: the names of operation and backend, the problem, the schedule. A line out is the answer:
on-chip bytes, those of them that registers spill, and cycles; or what it was refused for. The compiler may take
minutes, or end its process: it does so over programs whose copies its estimator cannot follow (those of a grid of one
step, those under a condition), which another process then compiles without an estimate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.contrib.tpu import estimate
from scheduler.core.hardware import Hardware, find

ROOT = Path(__file__).resolve().parents[1]
# A process gives way to a new one after so many programs: the compiler keeps some of what it took for each.
MOST_PROGRAMS = 100
LIMIT_S = 180.0
ENDED = {"failed": "the compiler ended its process"}


class Compiler:
    """Asks a process, and where that ends, one that estimates no cycles. Threads have one each."""

    def __init__(self, hardware: Hardware) -> None:
        self._estimating = Asked(hardware)
        self._compiling = Asked(dataclasses.replace(hardware, static_cycles=False))

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What `Asked.ask` returns; "cycles" is None where the estimator ended its process."""
        said = self._estimating.ask(question)
        return said if said != ENDED else self._compiling.ask(question)

    def close(self) -> None:
        self._estimating.close()
        self._compiling.close()


class Asked:
    """Asks a process of its own, one question at a time."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._reports = tempfile.mkdtemp(prefix="tile-scheduler-")
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """Of the process that answers; None where none does."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What it says: "onchip_bytes", "spill_bytes" and "cycles", "refused_bytes", or "failed" in words."""
        if self._asked == MOST_PROGRAMS:
            self.close()
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=LIMIT_S)
        except queue.Empty:
            self.close()
            return {"failed": f"compiling it took more than {LIMIT_S:.0f} s"}
        except BrokenPipeError:
            line = ""
        if line:
            return dict(json.loads(line))
        self.close()
        return dict(ENDED)

    def close(self) -> None:
        """Ends the process; the next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process = None
        shutil.rmtree(self._reports, ignore_errors=True)

    def _start(self) -> None:
        reports = Path(self._reports)
        reports.mkdir(exist_ok=True)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), self._hardware.kind],
            env=os.environ | estimate.profile_environment(reports, self._hardware) | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libtpu writes the source of every program that it refuses
            text=True,
        )
        self._answers, self._asked = queue.SimpleQueue(), 0
        threading.Thread(target=_forward, args=(self._process, self._answers), daemon=True).start()


def _forward(process: subprocess.Popen[str], answers: queue.SimpleQueue[str]) -> None:
    """Each line that it writes, and "" at its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def answer(question: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
    """In a process started with `estimate.profile_environment`."""
    import jax

    from search_spaces import load

    operation = load(question["operation"])
    problem = operation.problem.from_canonical(question["problem"])
    kernel = operation.kernel(question["backend"])

    def run(*operands: Any) -> Any:
        return kernel.run(problem, schedule, hardware.target, *operands)

    try:
        schedule = kernel.space(problem, hardware.target).decode(question["schedule"])
        return vars(estimate.static_profile(run, problem.operands(), hardware)).copy()
    except estimate.OutOfOnchipMemory as refusal:
        return {"refused_bytes": refusal.asked}
    except Exception as error:  # whatever lowering and compiling raise is news of this schedule
        return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"}
    finally:
        jax.clear_caches()


def main() -> None:
    hardware = find(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a kernel or the compiler prints is no answer
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), hardware)), file=answers, flush=True)


if __name__ == "__main__":
    main()
