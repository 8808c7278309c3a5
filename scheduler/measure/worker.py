"""The life of a worker process: tasks come in as lines, steps and outcomes go out, until the pipe closes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core import hardware as chips
from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import Hardware
from scheduler.core.records import L2, Failure, Measurement, Outcome
from scheduler.measure.bench import Bench, Step, first_line
from scheduler.measure.pool import Gpu
from scheduler.measure.subprocess_pipe import die_with_parent
from search_spaces import load

# How XLA and CUDA call it when no memory is left on the device.
OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY", re.IGNORECASE)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; the answers keep it to themselves

    def say(words: dict[str, Any]) -> None:
        print(json.dumps(words), file=answers, flush=True)

    first = sys.stdin.readline()
    if not first:
        return
    hello = json.loads(first)
    try:
        # By its name: among several platforms JAX passes over one that does not start.
        here = chips.detect(jax.devices(hello["platform"])[0])
    except Exception as error:
        say({"unable": first_line(error)})
        return
    facts = {"platform": here.platform, "kind": here.kind, "architecture": here.architecture, "cores": here.cores}
    say({"facts": facts})
    gpu = Gpu("", hello["uuid"], "", 0)
    desk = _Desk(here, gpu, lambda step: say({"step": step}))
    for line in sys.stdin:
        try:
            reply = desk.answer(json.loads(line))
        except CandidateFailed as failed:  # as the task wanted
            reply = {"raised": str(failed), "trace": "".join(traceback.format_exception(failed.__cause__))}
        except Exception:  # the parent raises it: a defect, with its whole trace
            reply = {"error": traceback.format_exc()}
        say(reply)
        if "leaving" in reply:
            os._exit(0)  # what a broken context would do in its destructors, nobody knows


class _Desk:
    """Where tasks are worked off: the bench of the problem at hand, and whether it can still be trusted.

    A reply is a measurement or a failure. `leaving` is why this process can serve no longer; `doubtful`, that something
    else than the candidate may be at fault, so that it deserves another attempt in another process.
    """

    def __init__(self, hardware: Hardware, gpu: Gpu, announce: Callable[[Step], None]) -> None:
        self._hardware, self._gpu, self._announce = hardware, gpu, announce
        self._bench: Bench | None = None
        self._what: tuple[str, str, L2] | None = None
        self._used = False

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            outcome = self._do(message)
            if isinstance(outcome, Failure) and outcome.stage == "verify" and self._used:
                # A candidate before this one may have written into the operands: only a fresh bench proves it wrong.
                self._bench = None
                outcome = self._do(message)
        except jax.errors.JaxRuntimeError as error:  # outside of any candidate's compilation or run
            lost = first_line(error)
            stage = "memory" if OUT_OF_MEMORY.search(lost) else "worker"
            return {"failure": [stage, lost], "leaving": lost, "doubtful": True}
        self._used = True
        if outcome is None:
            return {}
        if isinstance(outcome, Measurement):
            return {"measurement": dataclasses.asdict(outcome)}
        if OUT_OF_MEMORY.search(outcome.detail):
            return {"failure": ["memory", outcome.detail], "leaving": outcome.detail, "doubtful": True}
        reply: dict[str, Any] = {"failure": [outcome.stage, outcome.detail]}
        if outcome.stage != "lower" and (why := self._poison()):
            reply |= {"leaving": why, "doubtful": outcome.stage == "compile"}
        return reply

    def _do(self, message: dict[str, Any]) -> Outcome | None:
        what = message["operation"], message["problem"], message["l2"]
        if self._bench is None or self._what != what:
            self._announce("prepare")
            self._bench, self._used = None, False  # frees the operands of the one before
            operation = load(message["operation"])
            problem = operation.problem.from_canonical(message["problem"])
            self._bench = Bench(
                operation,
                problem,
                self._hardware,
                l2=message["l2"],
                exclusive=self._gpu.exclusive,
                announce=self._announce,
            )
            self._what = what
        bench, backend, schedule = self._bench, message["backend"], message["schedule"]
        match message["do"]:
            case "measure":
                return bench.measure(
                    backend,
                    schedule,
                    message["repetitions"],
                    incumbent_s=message["incumbent_s"],
                    raising=message["raising"],
                )
            case "again":
                return bench.again(backend, schedule, message["repetitions"])
            case "confirm":
                return bench.confirm(backend, schedule)
        raise ValueError(f"a worker is asked to measure, again or confirm, not {message['do']!r}")

    def _poison(self) -> str | None:
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
