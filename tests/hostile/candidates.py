"""Candidates that hang, die, fork, speak on the workers' channel, answer otherwise than at first, or damage inputs.

Each is blamed for what it did, no innocent is, every trial ends once, and the fastest right one wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from attack import Tried, seeded
from operations import FAULTS, RIGHT, DoubleLibrary, Faulty, FaultyProblem, FaultySchedule, _call_on_host

from scheduler.core.hardware import GIB
from scheduler.core.records import Failure, Measurement
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import Pool
from scheduler.measure.runner import RunnerOptions
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, Target


def _channels() -> list[int]:
    """Every pipe and socket that this process has open: what a candidate finds that looks for the one to its parent."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(("pipe:", "socket:")):
                found.append(int(name))
        except OSError:  # it was that of the listing
            continue
    return found


def _speak(words: bytes) -> None:
    for channel in _channels():
        try:
            os.write(channel, words)
        except OSError:  # one to read from
            continue


def _fork() -> None:
    """Both processes go on from here."""
    os.fork()


def _leave_behind() -> None:
    """A process that outlives the worker's whole group, holding whatever the worker holds; and then the worker dies."""
    if not os.fork():
        os.setsid()
        time.sleep(20)
        os._exit(0)
    os._exit(3)


def _read_requests() -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1 << 16)


def _close_everything() -> None:
    os.closerange(3, 256)


def _close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def _take_all_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    raise OSError("no file can be opened")


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scheduler"]:
        del sys.modules[name]


# What it does when it is traced -> the stage at which it is to be caught; None where it harms nobody.
WHEN_TRACED: dict[str, tuple[Callable[[], None], str | None]] = {
    "babbling": (lambda: _speak(b"hello\n"), "worker"),
    "forging": (lambda: _speak(b'{"$type": "Answer", "outcome": 7}\n'), "worker"),
    "shouting": (lambda: _speak(b"\xff" * 4096 + b"\n"), "worker"),
    "forking": (_fork, None),
    "leaving": (_leave_behind, "worker"),
    "reading": (_read_requests, None),
    "closing": (_close_everything, "worker"),
    "printing": (lambda: print("x" * 10_000), None),
    "muting": (_close_streams, None),
    "starving": (_take_all_files, "lower"),
    "forgetting": (_forget_modules, None),
    "moving": (lambda: os.chdir("/"), None),
    "ringing": (lambda: signal.setitimer(signal.ITIMER_REAL, 3600), None),
}
# What it returns in place of an array of the right shape.
RETURNED: dict[str, Callable[[jax.Array], Any]] = {
    "none": lambda x: None,
    "two": lambda x: (x, x),
    "empty": lambda x: (),
    "a string": lambda x: "x",
    "a number": lambda x: 1.0,
    "a dict": lambda x: {"x": x},
    "a row more": lambda x: x[None],
    "integers": lambda x: x.astype("int32"),
    "numbers of NumPy": lambda x: np.zeros(x.shape, np.float64),
}
STAGES: dict[str, str | None] = (
    dict(FAULTS) | {name: stage for name, (_, stage) in WHEN_TRACED.items()} | dict.fromkeys(RETURNED, "built")
    | {"flaky": "verify"}
)  # fmt: skip
# Each of those here once, but for what waits long; of other faults each is in tests/test_faults.py.
EACH_ONCE = [*(set(WHEN_TRACED) - {"leaving"}), *RETURNED, "flaky", *RIGHT]


class Hostile(Faulty):
    def run(
        self, problem: FaultyProblem, schedule: FaultySchedule, target: Target, /, *args: Any, **params: Any
    ) -> Any:
        behave = problem.behaviours[schedule.number].replace("-", " ")
        if behave in WHEN_TRACED:
            WHEN_TRACED[behave][0]()
        elif behave in RETURNED:
            return RETURNED[behave](args[0] * 2)
        elif behave == "flaky":
            calls = iter(range(10**9))
            return _call_on_host(lambda y: y.__imul__(1 if next(calls) < 2 else random.choice((1, 3))), args[0] * 2)
        named = dataclasses.replace(
            problem, script=" ".join("ok" if b in WHEN_TRACED else b for b in problem.behaviours)
        )
        return super().run(named, schedule, target, *args, **params)


HOSTILE = Operation("hostile", FaultyProblem, (Hostile(), DoubleLibrary()))


def tries(seed: int, count: int) -> Tried:
    """So many searches, each over a dozen candidates, most of them hostile; a single one over each that is quick."""
    tried = Tried()
    gpu = Gpu(index="", uuid="hostile", driver="", free_bytes=4 * GIB)
    with Pool(gpu, RunnerOptions(workers=2, compile_timeout_s=30, run_timeout_s=10)) as pool:
        for number, draw in seeded(seed, count):
            script = [*draw.sample(sorted(STAGES), 8), *draw.choices(RIGHT, k=4)] if count > 1 else sorted(EACH_ONCE)
            draw.shuffle(script)
            try:
                tried.add(_searched(script, pool))
            except Exception as error:
                tried.expect(False, f"{number}, {script}: the search ended with {type(error).__name__}: {error}"[:600])
    return tried


def _searched(script: list[str], pool: Pool) -> Tried:
    problem, store, tried = (
        FaultyProblem(8, " ".join(name.replace(" ", "-") for name in script)),
        Store(":memory:"),
        Tried(),
    )
    record = tune(HOSTILE, problem, budget=64, store=store, runner=pool)
    trials = {trial.schedule.get("number", -1): trial for trial in store.trials(record.key)}
    tried.expect(sorted(trials) == list(range(-1, len(script))), f"{script}: {sorted(trials)} have ended")
    for number, trial in trials.items():
        name = "the library" if number < 0 else script[int(number)]
        match trial.outcome:
            case Measurement():
                held = STAGES.get(name) is None
            case Failure(stage):
                wanted = STAGES.get(name)
                held = stage == wanted or (wanted == "built" and stage in ("lower", "verify"))
        tried.expect(held, f"{script}: {name} ended as {trial.outcome}"[:600])
    return tried
