"""Operations that tests search: a doubled array with schedules that are right, slow, wrong, or do not build."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import Columns, Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Problem, Space, Target


@dataclasses.dataclass(frozen=True)
class DoubleProblem(Problem):
    n: int

    @classmethod
    def of(cls, *args: Any, **params: Any) -> DoubleProblem:
        return cls(n=args[0].shape[0])

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.n,), jnp.dtype(jnp.float32)),)

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.n,), jnp.dtype(jnp.float32))

    def reference(self, *args: jax.Array) -> jax.Array:
        return args[0] * 2

    @property
    def flops(self) -> float:
        return float(self.n)


@dataclasses.dataclass(frozen=True)
class DoubleSchedule:
    """`tile` decides the prediction; `behave` what happens when it runs."""

    tile: int
    behave: str


class Double(Kernel[DoubleProblem, DoubleSchedule]):
    backend = "scripted"

    def space(self, problem: DoubleProblem, target: Target) -> Space[DoubleSchedule]:
        return Space(
            DoubleSchedule,
            {"tile": (1, 2, 4, 8), "behave": ("ok", "slow", "wrong", "unbuilt", "exit")},
            {"tile divides n": lambda s: problem.n % s.tile == 0},
        )

    def footprint(self, problem: DoubleProblem, schedules: Columns, target: Target) -> Footprint:
        tile = schedules.tile
        return Footprint(
            arithmetic="float32",
            grid=(problem.n / tile,),
            step=Phase(loads=(Operand(bytes=4.0 * tile, axes=(0,)),), flops=1.0 * tile),
            tile=Phase(bytes_written=4.0 * tile),
            onchip_bytes=np.asarray(8 * tile),
        )

    def run(
        self, problem: DoubleProblem, schedule: DoubleSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        (x,) = args
        match schedule.behave:
            case "unbuilt":
                raise ValueError(f"tile {schedule.tile} cannot be built")
            case "exit":
                os._exit(7)
            case "wrong":
                return x * 3
            case "slow":

                def pause(y: np.ndarray) -> np.ndarray:
                    time.sleep(0.01)
                    return np.asarray(y)

                return jax.pure_callback(pause, problem.result(), x * 2)
        return x * 2


class DoubleLibrary(LibraryKernel[DoubleProblem]):
    def run(self, problem: DoubleProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        return args[0] + args[0]


DOUBLE = Operation("double", DoubleProblem, (Double(), DoubleLibrary()))


# The scripted fault device: what can go wrong with a candidate, by name, and where a tuner must catch it.
FAULTS = {
    "wrong": "verify",  # wrong numbers
    "nan": "verify",  # one element is left unwritten
    "shifted": "verify",  # an index map that is off by one
    "forgetful": "verify",  # right on the first call alone
    "vandal": "verify",  # right at first, and damages what others read, too
    "misshapen": "verify",  # another shape than the problem's
    "unpicklable": "lower",  # an exception that neither travels nor says itself
    "defect": "lower",  # a bug of the kernel's code
    "assertion": "lower",  # a check of the kernel's author, without a word
    "quitting": "lower",  # it asks Python to end
    "interrupting": "lower",  # it raises what Ctrl-C raises
    "greedy": "lower",  # the host has no memory for it
    "circular": "lower",  # an exception that is its own cause
    "stuck": "timeout",  # a compiler that does not end
    "hang": "timeout",  # a kernel that does not end
    "exit": "worker",  # the process ends without a word
    "abort": "worker",  # the process is killed by a signal
    "sticky": "verify",  # a device error, and every later use of the device fails, too
    "memory": "memory",  # the device has not so much memory
    "zero": "implausible",  # the clock does not advance
}
# Which a device's own clock does not have, and what needs an address of the host to be one of the device.
CPU_FAULTS = frozenset({"zero", "vandal"})
# What is right, each with its own time.
RIGHT = ("ok", "slow", "noise", "drift")
STEP_S = 0.005


@dataclasses.dataclass(frozen=True)
class FaultyProblem(DoubleProblem):
    """`script` says how the candidates behave: one word each. A right one with a higher number takes longer."""

    script: str = "ok"

    @property
    def behaviours(self) -> list[str]:
        return self.script.split()

    @property
    def fastest(self) -> int | None:
        """The right candidate that takes the least time, or None where all are faulty."""
        times = {i: i + 20 * (b == "slow") for i, b in enumerate(self.behaviours) if b in RIGHT}
        return min(times, key=times.__getitem__, default=None)


@dataclasses.dataclass(frozen=True)
class FaultySchedule:
    number: int


class Faulty(Kernel[FaultyProblem, FaultySchedule]):
    backend = "scripted"

    def space(self, problem: FaultyProblem, target: Target) -> Space[FaultySchedule]:
        return Space(FaultySchedule, {"number": tuple(range(len(problem.behaviours)))}, {})

    def footprint(self, problem: FaultyProblem, schedules: Columns, target: Target) -> Footprint:
        return Footprint(
            arithmetic="float32",
            grid=(1 + schedules.number,),
            step=Phase(loads=(Operand(bytes=4.0, axes=(0,)),), flops=1.0),
            tile=Phase(bytes_written=4.0),
            onchip_bytes=np.asarray(8 + 0 * schedules.number),
        )

    def run(
        self, problem: FaultyProblem, schedule: FaultySchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        (x,) = args
        result = x * 2
        match behave := problem.behaviours[schedule.number]:
            case "wrong":
                return x * 3
            case "nan":
                return result.at[-1].set(jnp.nan)
            case "shifted":
                return jnp.roll(result, 1)
            case "misshapen":
                return result[:-1]
            case "assertion":
                raise AssertionError
            case "unpicklable":
                raise Unpicklable
            case "stuck":
                _sleep_forever()
            case "quitting":
                raise SystemExit("the kernel has had enough")
            case "interrupting":
                raise KeyboardInterrupt
            case "greedy":
                raise MemoryError
            case "circular":
                error = ValueError("it goes round")
                raise error from error
            case "exit":
                os._exit(7)
            case "forgetful":
                called = iter([True])
                return _call_on_host(lambda y: y.__imul__(1 if next(called, False) else 3), result)
            case "defect":
                raise KeyError("no such behaviour")
            case "zero":
                return _call_on_host(lambda _: _blunt_the_clock(), result)
            case "vandal":
                result = _call_on_host(_overwrite_equals, x) * 2
            case "hang" | "abort" | "sticky":
                break_ = {"hang": _sleep_forever, "abort": os.abort, "sticky": _lose_the_device}[behave]
                return _call_on_host(lambda _: break_(), result)
            case "memory":
                rows = jax.lax.broadcasted_iota(jnp.float32, (2**20, 2**20), 1) + x[0]  # 4 TiB
                return result + 0 * jnp.sort(rows, axis=1)[0, 0]
        steps = schedule.number + (20 if behave == "slow" else 0)
        if target.platform != "cpu":  # device time: a host's pauses are not in it
            waves = jnp.sin(x[0] + jnp.arange((1 + steps) * 2**22, dtype=jnp.float32))
            return result + 0 * waves.sum()
        calls = 0

        def wait(_: np.ndarray) -> None:
            nonlocal calls
            calls += 1
            extra = {"noise": random.random(), "drift": min(calls / 50, 1)}.get(behave, 0.0)
            _pass(STEP_S * (steps + extra / 2))

        return _call_on_host(wait, result)


class Unpicklable(ValueError):
    def __init__(self) -> None:
        self.held = lambda: None

    def __str__(self) -> str:
        raise RuntimeError("it cannot even say what it is")


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _serves(process: Path) -> bool:
    try:
        return b"scheduler.measure.worker" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _pass(seconds: float) -> None:
    """Takes so long by the clock of a worker; other processes sleep."""
    if not _serves(Path("/proc/self")):
        time.sleep(seconds)
        return
    global _precise
    pause(seconds)
    _precise = time.perf_counter = own_time


_paused_s = 0.0


def own_time() -> float:
    """Takes the place of `time.perf_counter`: the computing time of this process, and its pauses. A busy host is not
    in it."""
    return time.process_time() + _paused_s


def pause(seconds: float) -> None:
    """Takes so long by `own_time`, and no time by another clock."""
    global _paused_s
    _paused_s += seconds


def _sleep_forever() -> None:
    time.sleep(1e6)


def _lose_the_device() -> None:
    """As after an illegal access: nothing that was started ends well, and nothing can be started."""

    def lost(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")

    jax.block_until_ready = lost
    lost()


def _blunt_the_clock() -> None:
    """For a moment the clock ticks every 100 ms only: what is faster takes no time at all."""
    called, precise = _precise(), _precise

    def blunt() -> float:
        now = precise()
        return now if now > called + 0.005 else now // 0.1 * 0.1

    time.perf_counter = blunt


_precise = time.perf_counter


def _overwrite_equals(x: np.ndarray) -> None:
    """What a store out of bounds may hit: here, the operand itself, which later candidates read, too."""
    for array in jax.live_arrays():
        if array.shape == x.shape and array.dtype == x.dtype and np.array_equal(array, x):
            ctypes.memset(array.unsafe_buffer_pointer(), 0, array.nbytes)


def _call_on_host(function: Any, x: jax.Array) -> jax.Array:
    def call(y: np.ndarray) -> np.ndarray:
        y = np.array(y)
        function(y)
        return y

    return jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


FAULTY = Operation("faulty", FaultyProblem, (Faulty(), DoubleLibrary()))


@dataclasses.dataclass(frozen=True)
class NotedProblem(DoubleProblem):
    """Each process that traces a kernel of it leaves a file in the directory `place`."""

    n: int = 8
    place: str = ""

    def note(self) -> None:
        Path(self.place, str(os.getpid())).touch()


class Noted(LibraryKernel[NotedProblem]):
    """Has one schedule, as a library kernel has, but is not one."""

    backend = "scripted"
    library = False

    def run(self, problem: NotedProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        problem.note()
        return args[0] * 2


class NotedLibrary(LibraryKernel[NotedProblem]):
    def run(self, problem: NotedProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        problem.note()
        return args[0] + args[0]


NOTED = Operation("noted", NotedProblem, (Noted(), NotedLibrary()))


class Unnumbered(Noted):
    """Known by its program, which is traced to tell an edit."""

    version = 0


UNNUMBERED = Operation("unnumbered", NotedProblem, (Unnumbered(), DoubleLibrary()))


@dataclasses.dataclass(frozen=True)
class GreedyProblem(DoubleProblem):
    """Its kernel finds no memory while it runs, and says so after `waits_s` seconds, as XLA's allocator."""

    n: int = 8
    waits_s: int = 0


class Greedy(LibraryKernel[GreedyProblem]):
    """Has one schedule, as a library kernel has, but is not one."""

    backend = "scripted"
    library = False

    def run(self, problem: GreedyProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        def allocate() -> None:
            time.sleep(problem.waits_s)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

        _before_next_call(jax.stages.Compiled, "__call__", allocate)
        return _call_on_host(lambda _: None, args[0] * 2)  # which is compiled where it runs


def _before_next_call(cls: type, name: str, function: Callable[[], None]) -> None:
    """Calls `function` before the method's next call, in whose place it may raise."""
    method = getattr(cls, name)

    def once(*args: Any, **params: Any) -> Any:
        setattr(cls, name, method)
        function()
        return method(*args, **params)

    setattr(cls, name, once)


GREEDY = Operation("greedy", GreedyProblem, (Greedy(), DoubleLibrary()))


@dataclasses.dataclass(frozen=True)
class RepeatedSchedule:
    repeat: int


class Repeated(Kernel[DoubleProblem, RepeatedSchedule]):
    """Takes the longer, the more often it repeats its work; its program can be moved between processes."""

    backend = "scripted"

    def space(self, problem: DoubleProblem, target: Target) -> Space[RepeatedSchedule]:
        return Space(RepeatedSchedule, {"repeat": (1, 30, 300)})

    def footprint(self, problem: DoubleProblem, schedules: Columns, target: Target) -> None:
        return None

    def run(
        self, problem: DoubleProblem, schedule: RepeatedSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        (x,) = args
        steps = jax.lax.fori_loop(0, 10 * schedule.repeat, lambda _, y: jnp.sin(y) + 1, x)
        return x * 2 + 0 * steps


REPEATED = Operation("repeated", DoubleProblem, (Repeated(), DoubleLibrary()))
