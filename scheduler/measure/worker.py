"""The main program of a measuring process, the only process of a pool that has a context on the device.

It loads candidates from files that compile processes wrote, verifies them and times them.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import Failure, Outcome, Schedule, Stage
from scheduler.measure import build
from scheduler.measure.bench import Bench
from scheduler.measure.bench_cache import BenchCache
from scheduler.measure.build import Built, CandidateBuilder, first_line
from scheduler.measure.conversation import converse, mismatch_reason
from scheduler.measure.fork_server import channel_to_parent
from scheduler.measure.gpu import Gpu
from scheduler.measure.protocol import Answer, Finding, Init, Programs, Request, ReservedProblem, Step
from search_spaces import load
from search_spaces.kernel import Kernel
from search_spaces.lowering_compat import infer_layouts_sooner
from search_spaces.problem import Problem

# The messages of XLA and CUDA when device memory is exhausted.
OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY", re.IGNORECASE)


class Measuring:
    """Serves requests for candidates on the device that `init` names."""

    def __init__(self, init: Init, announce: Callable[[Step], None]) -> None:
        # Name the platform: given several platforms, JAX silently skips one that does not start.
        self.target = chips.target_of(jax.devices(init.platform)[0])
        infer_layouts_sooner()
        if init.platform == "cuda":
            # The executable of a Mosaic GPU kernel refers to functions of this library.
            importlib.import_module("jax.experimental.mosaic.gpu")
        self._exclusive, self._announce = Gpu("", init.uuid, "", 0).exclusive, announce
        hardware = chips.describe(self.target)
        self._loader = _Loader(hardware, announce, Path(init.programs))
        self._benches = BenchCache(functools.partial(self._make_bench, hardware))

    def answer(self, request: Request) -> Answer:
        self._announce("prepare")
        if request.do == "confirm" and (other := mismatch_reason(request, self.target)):
            return Answer(Failure("verify", other))
        key = ReservedProblem(request.operation, request.problem, request.l2)
        self._loader.use(request)
        try:
            outcome = self._benches.ask(key, lambda bench: _run_request(bench, request), others=request.others)
        except jax.errors.JaxRuntimeError as error:  # raised outside of the candidate's compilation and run
            lost = first_line(error)
            stage: Stage = "memory" if OUT_OF_MEMORY.search(lost) else "worker"
            return Answer(Failure(stage, lost), retryable=True, fatal=lost)
        if not isinstance(outcome, Failure):
            return Answer(outcome, refused=self._loader.refused)
        if OUT_OF_MEMORY.search(outcome.detail):
            return Answer(Failure("memory", outcome.detail), retryable=True, fatal=outcome.detail)
        if outcome.stage != "lower" and (why := self._device_error()):
            return Answer(outcome, retryable=outcome.stage == "compile", fatal=why)
        return Answer(outcome)

    def _make_bench(self, hardware: Hardware, key: ReservedProblem) -> Bench:
        operation = load(key.operation)
        return Bench(
            operation,
            operation.problem.from_canonical(key.problem),
            hardware,
            l2=key.l2,
            builder=self._loader,
            exclusive=self._exclusive,
            announce=self._announce,
        )

    def _device_error(self) -> str | None:
        """Returns why the device no longer runs programs, or None if it does.

        An illegal memory access makes a CUDA context permanently unusable.
        """
        self._announce("wait")
        with self._exclusive():
            self._announce("run")
            try:
                jax.block_until_ready(jnp.arange(8) + 1)
            except jax.errors.JaxRuntimeError as error:
                return first_line(error)
        return None


class _Loader(CandidateBuilder):
    """Loads candidates from files, and compiles those without a file.

    Args:
      directory: the directory of the files.

    Attributes:
      refused: why a file of the last request was not loaded; "" if all were loaded.
    """

    def __init__(self, hardware: Hardware, announce: Callable[[Step], None], directory: Path) -> None:
        super().__init__(hardware, announce)
        self._directory, self._problem, self._programs, self.refused = directory, "", Programs(), ""

    def use(self, request: Request) -> None:
        """Sets the request: from now on, its candidate is built from its files."""
        self._problem, self._programs, self.refused = request.problem, request.programs or Programs(), ""

    def build(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, *, raising: bool = False
    ) -> Built | Failure:
        own = problem.canonical() == self._problem
        name = self._programs.candidate if own else self._programs.neighbour
        return self._load(name) or super().build(kernel, problem, schedule, raising=raising)

    def traced_again(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, digest_before: str
    ) -> Iterator[Built | Failure]:
        if not self._programs.candidate:
            yield from super().traced_again(kernel, problem, schedule, digest_before)
        for name in self._programs.again:
            yield self._load(name) or Failure("compile", "its program cannot be loaded")

    def _load(self, name: str) -> Built | None:
        if not name:
            return None
        try:
            return build.load(self._directory / name)
        except Exception as error:  # any exception of a backend; the candidate is then compiled here
            self.refused = first_line(error)
            return None


def _run_request(bench: Bench, request: Request) -> Outcome | Finding:
    backend, schedule, repetitions = request.backend, request.schedule, request.repetitions
    match request.do:
        case "measure":
            return bench.measure(
                backend, schedule, repetitions, incumbent_s=request.incumbent_s, raising=request.raising
            )
        case "again":
            return bench.again(backend, schedule, repetitions)
        case "confirm":
            return bench.confirm(backend, schedule)
        case "prepare" | "trace":
            raise AssertionError(f"a measuring process does not serve {request.do!r} requests")


if __name__ == "__main__":
    converse(Measuring, channel_to_parent())
