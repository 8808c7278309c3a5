"""Times candidates as a search times them, without verifying them: what a question about the model needs, in seconds.

Libraries and vendors' programs compile in threads, several at once, and never while a candidate is timed, because XLA
tries algorithms on the device. All other candidates compile in processes without a device (`Compilers`), at any time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import queue
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from harness import environment, write_result

from scheduler.core import hardware as chips
from scheduler.core.hardware import CPU, Hardware
from scheduler.core.records import Failure, Measurement, Schedule
from scheduler.measure import absent_gpu, buffers, build, runner, timer
from scheduler.measure.build import Built, CandidateBuilder
from scheduler.measure.gpu import Gpu
from scheduler.measure.worker_process import WITHOUT_GPU
from scheduler.rewriting.interleaved import interleaves_on
from search_spaces import Kernel, Operation, Problem
from search_spaces.lowering_compat import infer_layouts_sooner
from search_spaces.target import Target

REPETITIONS = 10
ANSWER = "answer: "


class Operands(NamedTuple):
    """The operands of a problem on the device, and what copies them and fills its results; all of it is compiled."""

    inputs: tuple[jax.Array, ...]
    copy: buffers.Copy
    poison: buffers.Poison


def operands_of(problem: Problem) -> Operands:
    inputs = jax.block_until_ready(problem.inputs(0))
    copy, poison = buffers.copying(inputs), buffers.poisoning(problem)
    jax.block_until_ready((copy(inputs), poison()))  # compiles them
    return Operands(inputs, copy, poison)


def timed(
    problem: Problem, operands: Operands, built: Mapping[str, Built | Failure], hardware: Hardware
) -> dict[str, Measurement | Failure]:
    """Times candidates on one device, each after the other: sets of operands and results rotate as in a search."""
    clock, l2 = buffers.timing_conditions(problem, hardware)
    many = buffers.rotating_sets(problem, hardware) if l2 == "cold" else 1
    copies = [operands.inputs, *(operands.copy(operands.inputs) for _ in range(many - 1))]
    sets = jax.block_until_ready([jax.tree.map(jax.numpy.asarray, problem.variants(each)) for each in copies])
    found: dict[str, Measurement | Failure] = {}
    for name, candidate in built.items():
        if isinstance(candidate, Failure):
            found[name] = candidate
            continue
        results = collections.deque(
            operands.poison() for _ in range(buffers.rotating_results(problem, hardware, len(sets)))
        )
        number = 0

        def call(variant: int, run: Any = candidate.run, results: Any = results) -> Any:
            nonlocal number
            number += 1
            results.append(run(results.popleft(), *sets[number % len(sets)][variant]))
            return results[-1]

        calls = [functools.partial(call, variant) for variant in range(len(sets[0]))]
        try:
            found[name] = timer.measure(*calls, repetitions=REPETITIONS, clock=clock, l2=l2)
        except RuntimeError as error:
            found[name] = Failure("time", build.first_line(error))
        results.clear()
    return found


class Case(Protocol):
    """A problem with the programs of libraries to time, and perhaps other candidates."""

    operation: Operation[Any]
    problem: Problem


def on_device(kernel: Kernel[Any, Any]) -> bool:
    """Whether the kernel compiles only where the device is."""
    return kernel.library or kernel.vendor


def programs(operation: Operation[Any], problem: Problem, hardware: Hardware) -> dict[str, tuple[str, Schedule]]:
    """Returns the programs of the library and of vendors by a name: the backend, and its number if it has several."""
    found: dict[str, tuple[str, Schedule]] = {}
    for kernel in operation.kernels_on(hardware.platform):
        if on_device(kernel) and not kernel.supports(problem, hardware.target):
            space = kernel.space(problem, hardware.target)
            points, _ = space.legal()
            for row in range(len(points)) if kernel.library else (0,):
                found[f"{kernel.backend}/{row}" if row else kernel.backend] = kernel.backend, points.row(row)
    return found


Prepared = tuple[Operands | Failure, dict[str, Built | Failure]]


def prepared(cases: Sequence[Case], hardware: Hardware) -> list[Prepared]:
    """Compiles the programs of libraries and of vendors for several problems, and draws their operands, in threads."""
    builder = CandidateBuilder(hardware)

    def operands(case: Case) -> Operands | Failure:
        try:
            return operands_of(case.problem)
        except (RuntimeError, MemoryError) as error:
            return Failure("time", build.first_line(error))

    def library(case: Case, backend: str, schedule: Schedule) -> Built | Failure:
        return builder.build(case.operation.kernel(backend), case.problem, schedule)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        drawn = [threads.submit(operands, case) for case in cases]
        compiled: list[dict[str, Future[Built | Failure]]] = [
            {
                name: threads.submit(library, case, *program)
                for name, program in programs(case.operation, case.problem, hardware).items()
            }
            for case in cases
        ]
    return [
        (one.result(), {name: future.result() for name, future in some.items()})
        for one, some in zip(drawn, compiled, strict=True)
    ]


@contextlib.contextmanager
def exclusive(hardware: Hardware) -> Iterator[None]:
    """Context manager in which no other process of the host measures on the device."""
    with contextlib.nullcontext() if hardware.platform == CPU.platform else interleaves_on(jax.devices()[:1]):
        timer.attach(hardware.abilities.clock)
        yield


def conclude(
    name: str,
    cases: Sequence[Case],
    hardware: Hardware,
    rows: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Any],
    directory: Path,
) -> None:
    """Says how many cases have no row yet, and writes the result of the others."""
    if left := len(cases) - len(rows):
        print(f"{left} of {len(cases)} problems are left: the same command goes on from here")
    operations = {case.operation.name: case.operation for case in cases}
    driver = "" if hardware.platform == CPU.platform else Gpu.query(0).driver
    versions = environment(runner.environment(driver), *operations.values()) | ({"left": left} if left else {})
    write_result(name, hardware, summary=figures, rows=rows, environment=versions, directory=directory)


class Compilers:
    """Processes without a device that answer requests, each one at a time.

    Args:
      command: of a process, which calls `serve`.
    """

    def __init__(self, command: Sequence[str], processes: int, hardware: Hardware) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | WITHOUT_GPU
        init = [
            *command,
            "--serve",
            json.dumps({"target": dataclasses.asdict(hardware.target), "folder": self._folder.name}),
        ]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(init, env=own, text=True, stdin=pipe, stdout=pipe) for _ in range(processes)
        ]
        self._idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(processes)

    def ask(self, request: Mapping[str, Any]) -> Future[Any]:
        """Sends a request to the next process that is idle; an answer of None is that of a process that ended."""
        return self._threads.submit(self._answer, json.dumps(request))

    def _answer(self, request: str) -> Any:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(request, file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith(ANSWER):
                    self._idle.put(process)
                    return json.loads(line.removeprefix(ANSWER))
        except BrokenPipeError:
            pass
        if all(each.poll() is not None for each in self._processes):
            raise SystemExit("all processes that compile have ended")
        return None

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)  # those that wait find the end of a pipe
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


class Compiler:
    """Compiles candidates for a chip that this process does not see, and writes them to files."""

    def __init__(self, hardware: Hardware, folder: Path) -> None:
        self.hardware, self._folder = hardware, folder
        infer_layouts_sooner()
        absent = hardware.platform != CPU.platform
        self._builder = CandidateBuilder(hardware, device=absent_gpu.device(hardware) if absent else None)
        self._lowering = functools.partial(absent_gpu.compiling_for, hardware) if absent else contextlib.nullcontext

    def compile(self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule) -> dict[str, str]:
        """Returns the file of a candidate, or why it failed; neither if no other process can load it."""
        with self._lowering():
            built = self._builder.build(kernel, problem, schedule)
        if isinstance(built, Failure):
            return {"failure": f"{built}"}
        path = self._folder / uuid.uuid4().hex
        return {"path": str(path)} if build.save(built, path) else {}


def serve(init: str, answer: Callable[[Compiler, Mapping[str, Any]], Any]) -> None:
    """The main program of a process of `Compilers`: answers each line of its standard input."""
    told = json.loads(init)
    compiler = Compiler(chips.describe(Target(**told["target"])), Path(told["folder"]))
    for line in sys.stdin:
        print(ANSWER + json.dumps(answer(compiler, json.loads(line))), flush=True)


def loaded(found: Mapping[str, str], kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule) -> Built | Failure:
    """Loads what `Compiler.compile` returned, or compiles it here."""
    if "failure" in found:
        stage, _, reason = found["failure"].partition(": ")
        return Failure(stage, reason)  # type: ignore[arg-type]
    if "path" not in found:
        return CandidateBuilder(chips.detect()).build(kernel, problem, schedule)
    path = Path(found["path"])
    try:
        return build.load(path)
    except Exception as error:  # any of a backend
        return Failure("compile", build.first_line(error))
    finally:
        path.unlink(missing_ok=True)
