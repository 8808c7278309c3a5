"""Lowers and compiles one candidate, and moves compiled programs between processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import serialize_executable

from scheduler.core import interrupts
from scheduler.core.errors import CandidateFailed
from scheduler.core.hardware import Hardware
from scheduler.core.identity import label_of
from scheduler.core.records import Failure, Schedule, Stage
from scheduler.measure.blame import blamed
from scheduler.measure.lowered import asked_onchip_bytes
from scheduler.model.feasibility import onchip_bytes
from search_spaces import jax_compat
from search_spaces.fingerprint import digest
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem, Tolerance, as_tuple

# The step that a process is about to begin: "wait" waits for the device lock, "run" runs on the device.
Step = Literal["prepare", "lower", "compile", "wait", "run"]
# A finalist is traced this many more times. State that a kernel keeps between traces may first show in the third trace.
RETRACED = 2


class Built(NamedTuple):
    """A compiled candidate.

    Attributes:
      run: a compiled function of the result buffers and the operands.
      tolerance: the allowed error of the results.
      traced: a digest of the jaxpr.
    """

    run: Any
    tolerance: Tolerance | tuple[Tolerance, ...]
    traced: str


class Builder:
    """Lowers and compiles candidates in this process.

    Args:
      hardware: the chip to compile for.
      announce: called with each step before the step begins.
      device: a device that is absent from this process and that XLA compiles for (`absent_gpu.device`).
    """

    def __init__(
        self,
        hardware: Hardware,
        announce: Callable[[Step], None] = lambda step: None,
        device: jax.Device | None = None,
    ) -> None:
        self._hardware, self._announce = hardware, announce
        self._sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def build(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, *, raising: bool = False
    ) -> Built | Failure:
        """Compiles one candidate.

        While JAX traces, lowers and compiles, only code of the kernel and of the compiler runs. Any exception at that
        time is therefore a failure of the candidate, even a process exit or an interrupt that the candidate raises.

        Args:
          raising: raise an exception of the candidate instead of returning a `Failure`.

        Raises:
          CandidateFailed: the candidate raised an exception and `raising` is set; chained to that exception.
        """
        traced = self._trace(kernel, problem, schedule, raising)
        return traced if isinstance(traced, Failure) else self._compile(kernel, problem, schedule, traced, raising)

    def traced_again(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, digest_before: str
    ) -> Iterator[Built | Failure]:
        """Traces a candidate `RETRACED` more times; yields failures, and programs with another digest."""
        for _ in range(RETRACED):
            traced = self._trace(kernel, problem, schedule)
            if isinstance(traced, Failure):
                yield traced
            elif digest(traced.jaxpr) != digest_before:
                yield self._compile(kernel, problem, schedule, traced)

    def _trace(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, raising: bool = False
    ) -> jax.stages.Traced | Failure:
        target, wanted = self._hardware.target, problem.results()
        point = kernel.space(problem, target).decode(schedule)
        self._announce("lower")
        run = jax_compat.writing_over(lambda *args: kernel.results(problem, point, target, *args))
        try:
            traced = run.trace(self._placed(wanted), *self._placed(problem.operands()))
        except BaseException as error:
            return _failed(kernel, schedule, "lower", error, raising)
        if (found := _described(as_tuple(traced.out_info))) != _described(wanted):
            return Failure("verify", f"the result is {found} instead of {_described(wanted)}")
        return traced

    def _compile(
        self,
        kernel: Kernel[Any, Any],
        problem: Problem,
        schedule: Schedule,
        traced: jax.stages.Traced,
        raising: bool = False,
    ) -> Built | Failure:
        point = kernel.space(problem, self._hardware.target).decode(schedule)
        try:
            lowered = traced.lower()
            tolerance = kernel.tolerance(problem, point)
        except BaseException as error:
            return _failed(kernel, schedule, "lower", error, raising)
        if not kernel.library and onchip_bytes(kernel, problem, self._hardware, schedule) == 0:  # no footprint
            asked, has = asked_onchip_bytes(lowered) or 0, self._hardware.onchip_bytes
            if asked > has:
                what = f"asks for {asked} bytes of on-chip memory; a block of {self._hardware.kind} has {has}"
                return Failure("lower", what)
        self._announce("compile")
        try:
            compiled = lowered.compile()
        except BaseException as error:
            return _failed(kernel, schedule, "compile", error, raising)
        return Built(compiled, tolerance, digest(traced.jaxpr))

    def _placed(self, arrays: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        if self._sharding is None:
            return tuple(arrays)
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding) for x in arrays)


def save(built: Built, path: Path) -> bool:
    """Writes a compiled candidate to a file atomically; returns False if JAX cannot serialize it.

    JAX cannot serialize a program that calls Python, such as an interpreted GPU kernel.
    """
    try:
        executable = serialize_executable.serialize(built.run)
        content = pickle.dumps((executable, built.tolerance, built.traced))
    except Exception:  # any exception of a backend
        return False
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
    return True


def load(path: Path) -> Built:
    """Loads the candidate from a file that `save` wrote, onto the first device of this process.

    Raises:
      Exception: this backend cannot load the program.
    """
    (payload, arguments, results), tolerance, traced = pickle.loads(path.read_bytes())
    here = jax.local_devices()[:1]
    run = serialize_executable.deserialize_and_load(payload, arguments, results, execution_devices=here)
    return Built(run, tolerance, traced)


def saved_digest(path: Path) -> str:
    """Returns `Built.traced` of a file that `save` wrote."""
    return str(pickle.loads(path.read_bytes())[2])


def _failed(kernel: Kernel[Any, Any], schedule: Schedule, stage: Stage, error: BaseException, raising: bool) -> Failure:
    interrupts.reraise(error)
    failure = Failure(stage, blamed(error))
    if raising:
        raise CandidateFailed(f"{label_of(kernel.backend, schedule)}: {failure}") from error
    return failure


def _described(results: Sequence[Any]) -> str:
    return " and ".join(
        f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"no array but {type(x).__name__}" for x in results
    )
