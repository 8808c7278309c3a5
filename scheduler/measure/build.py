"""Lowers and compiles one candidate, describes its exceptions, and moves compiled programs between processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jaxlib.mlir import ir

from scheduler.core import interrupts
from scheduler.core.errors import CandidateFailed
from scheduler.core.frames import calls
from scheduler.core.hardware import Hardware
from scheduler.core.records import Failure, Schedule, Stage, label_of
from scheduler.measure.protocol import Step
from scheduler.model.pruning import onchip_bytes
from search_spaces import configuration, jax_compat
from search_spaces.fingerprint import all_equations, digest
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem, Tolerance, as_tuple
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Reads the on-chip memory that a lowered kernel requests from its program, before it is compiled or run.

# Names in Mosaic GPU's lowering, in every version: the kernel's call target, and the launch operation in its module.
_MOSAIC_GPU = "mosaic_gpu"
_LAUNCH = ".gpu.launch"


def lower_candidate(kernel: Kernel[Any, Any], problem: Problem, schedule: Any, target: Target) -> jax.stages.Lowered:
    """Lowers a candidate for a chip that may be absent; raises any exception of the kernel or of JAX."""
    run = jax.jit(lambda *args: kernel.results(problem, schedule, target, *args))
    return run.trace(*problem.operands()).lower(lowering_platforms=(target.platform,))


def requested_onchip_bytes(lowered: jax.stages.Lowered) -> int | None:
    """Returns the bytes of on-chip memory that one block requests; the maximum over all launches of the program.

    Returns None if the program does not contain the size. Triton determines it when it compiles, and an interpreter has
    no on-chip memory.
    """
    module = lowered.compiler_ir("stablehlo")
    if not isinstance(module, ir.Module):
        return None
    calls = (op for op in _operations(module.operation) if op.name == "stablehlo.custom_call")
    kernels = (call for call in calls if _MOSAIC_GPU in str(call.attributes["call_target_name"]))
    try:
        return max((size for kernel in kernels for size in _launch_bytes(kernel, module.context)), default=None)
    except ir.MLIRError:  # the module has a version that this jaxlib cannot parse
        return None


def _launch_bytes(kernel: Any, context: ir.Context) -> Iterator[int]:
    """Yields the bytes that each launch of a Mosaic GPU kernel requests; nothing if this JAX stores them elsewhere.

    `context` belongs to the enclosing program, in which the kernel's types are registered.
    """
    if "mhlo.backend_config" not in kernel.attributes:
        return
    settings = kernel.attributes["mhlo.backend_config"]
    if not isinstance(settings, ir.DictAttr) or "module" not in settings:
        return
    serialized = ir.StringAttr(settings["module"]).value_bytes
    with _allowing_other_dialects(context):  # the serialized module has its own dialect
        module = ir.Module.parse(serialized, context)
    for op in _operations(module.operation, but=_LAUNCH):
        if op.name.endswith(_LAUNCH):
            # The extents of grid, block and cluster have type index. The on-chip memory is the only i32 operand.
            made_by = (operand.owner for operand in op.operands if str(operand.type) == "i32")
            yield from (ir.IntegerAttr(o.attributes["value"]).value for o in made_by if not isinstance(o, ir.Block))


@contextlib.contextmanager
def _allowing_other_dialects(context: ir.Context) -> Iterator[None]:
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        yield
    finally:
        context.allow_unregistered_dialects = before


def _operations(within: Any, but: str | None = None) -> Iterator[Any]:
    """Yields all operations in pre-order, without the contents of operations with a name that ends with `but`."""
    for region in within.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                if but is None or not op.operation.name.endswith(but):
                    yield from _operations(op.operation, but)


# ------------------------------------------------------------------------------
# Describes an exception of a candidate: its type, its message, and its location in the kernel source.


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if the message is empty.

    For an exception in a callback, XLA's message is a whole traceback: the line is that of the exception there.
    """
    try:
        text = str(error).strip()
    except BaseException:  # `__str__` of a user-defined exception may raise anything
        text = ""
    lines = (text or type(error).__name__).splitlines()
    if "Traceback (most recent call last)" in lines[0]:
        calls = [number for number, line in enumerate(lines) if line.startswith('  File "')]
        below = lines[calls[-1] + 1 :] if calls else lines[1:]
        lines = [line for line in below if not line.startswith("    ")] or lines[-1:]
    return lines[0][:300]


def raised_in_callback(error: BaseException) -> str:
    """Returns in one line the exception at the end of a message, from the traceback's last line without an indent."""
    lines = [line for line in str(error).strip().splitlines() if "object at 0x" not in line]
    last = max(number for number, line in enumerate(lines) if not line.startswith(" "))
    return " ".join(line.strip() for line in lines[last:])


def describe_exception(error: BaseException) -> str:
    """Describes an exception of a candidate in one line: its type, message, and location in the kernel source."""
    name, message = type(error).__name__, first_line(error)
    location = _location(error)
    return (name if message == name else f"{name}: {message}") + (f" ({location})" if location else "")


def _location(error: BaseException | None) -> str:
    """Returns ``file:line`` of the innermost call in a kernel; "" if there is none."""
    seen: list[BaseException] = []
    while error is not None and not any(error is other for other in seen):  # causes may form a cycle
        for call in calls(error):
            if call.owner != "scheduler":
                return f"{_relative_path(call.file)}:{call.line}"
        seen.append(error)
        # JAX gives the location of an error in lowering in a separate exception (`JaxStackTraceBeforeTransformation`).
        error = error.__cause__ or error.__context__
    return ""


def _relative_path(file: str) -> str:
    try:
        below = os.path.relpath(file)
    except OSError:  # the working directory was removed
        return file
    return file if below.startswith(os.pardir) else below


# Primitives that JAX lowers only for a device of its process.
_CALLS_PYTHON = {"pure_callback", "io_callback", "debug_callback", "debug_print"}
# A finalist is traced this many more times. State that a kernel keeps between traces may first show in the third trace.
RETRACED = 2


class Built(NamedTuple):
    """A compiled candidate.

    Attributes:
      run: a compiled function of the result buffers and the operands; None if the program calls Python, and the device
        is absent.
      tolerance: the allowed error of the results.
      traced: a digest of the jaxpr.
    """

    run: Any
    tolerance: Tolerance | tuple[Tolerance, ...]
    traced: str


class CandidateBuilder:
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

    @contextlib.contextmanager
    def strictly_interpreted(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule
    ) -> Iterator[Built | None]:
        """Context manager with a candidate, compiled to run on a CPU in Pallas's strict interpreter.

        The strict interpreter of TPU kernels takes the place of ``interpret=True``, and detection of races is added to
        ``InterpretGPUParams()``. The value is None if the candidate has none of these, more than `STRICT_STEPS` grid
        steps, results that alias operands (which are then whole arrays, as on a GPU), or code that the interpreter does
        not support.
        """
        built, traced = None, self._trace(kernel, problem, schedule)
        strict = None if isinstance(traced, Failure) else _strict_interpreter(traced.jaxpr)
        log = logging.getLogger("jax._src.callback")  # it repeats what the interpreter raises
        log.addFilter(_silent)
        try:
            with contextlib.nullcontext() if strict is None else strict:
                if strict is not None:
                    traced = self._trace(kernel, problem, schedule)
                    built = traced if isinstance(traced, Failure) else self._compile(kernel, problem, schedule, traced)
                yield built if isinstance(built, Built) else None
        finally:
            log.removeFilter(_silent)

    def _trace(
        self, kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, raising: bool = False
    ) -> jax.stages.Traced | Failure:
        target, expected = self._hardware.target, problem.results()
        point = kernel.space(problem, target).decode(schedule)
        self._announce("lower")
        run = jax_compat.writing_over(lambda *args: kernel.results(problem, point, target, *args))
        try:
            traced = run.trace(self._placed(expected), *self._placed(problem.operands()))
        except BaseException as error:
            return _failed(kernel, schedule, "lower", error, raising)
        if (found := _types_text(as_tuple(traced.out_info))) != _types_text(expected):
            return Failure("verify", f"the result is {found} instead of {_types_text(expected)}")
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
        absent = self._sharding is not None
        try:
            if absent and _CALLS_PYTHON & {equation.primitive.name for equation in all_equations(traced.jaxpr)}:
                return Built(None, kernel.tolerance(problem, point), digest(traced.jaxpr))
            lowered = traced.lower()
            tolerance = kernel.tolerance(problem, point)
        except BaseException as error:
            return _failed(kernel, schedule, "lower", error, raising)
        if not kernel.library and onchip_bytes(kernel, problem, self._hardware, schedule) == 0:  # no footprint
            requested, available = requested_onchip_bytes(lowered) or 0, self._hardware.onchip_bytes
            if requested > available:
                reason = (
                    f"asks for {requested} bytes of on-chip memory; a block of {self._hardware.kind} has {available}"
                )
                return Failure("lower", reason)
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


# More steps take minutes in the strict interpreter, which takes 3 ms for a step of two small blocks.
STRICT_STEPS = 512
# What the strict interpreters raise for wrong kernels; the other exceptions are about code that they do not support.
STRICT_ERRORS = ("Out-of-bounds", "Revisited block", "RACE DETECTED")


def _silent(record: logging.LogRecord) -> bool:
    return False


def _strict_interpreter(jaxpr: Any) -> contextlib.AbstractContextManager[None] | None:
    """Returns the context in which all interpreted kernels of a jaxpr are interpreted strictly, or None."""
    calls = [equation.params for equation in all_equations(jaxpr) if equation.params.get("interpret")]
    kinds = {type(params["interpret"]).__name__ for params in calls}
    if kinds == {"InterpretGPUParams"}:
        return jax_compat.gpu_interpreter(detect_races=True)
    if kinds != {"bool"} or any(params.get("input_output_aliases") for params in calls):
        return None
    grids = [params["grid_mapping"].grid for params in calls if "grid_mapping" in params]
    few = len(grids) == len(calls) and all(type(n) is int for grid in grids for n in grid)
    return configuration.interpreting() if few and sum(map(math.prod, grids)) <= STRICT_STEPS else None


def save(built: Built, path: Path) -> bool:
    """Writes a compiled candidate to a file atomically; returns False if JAX cannot serialize it.

    JAX cannot serialize a program that calls Python, such as an interpreted GPU kernel.

    Raises:
      OSError: the file cannot be written.
    """
    try:
        executable = serialize_executable.serialize(built.run)
        content = pickle.dumps((executable, built.tolerance, built.traced))
    except Exception:  # any exception of a backend
        return False
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError:  # a full disk keeps nothing of it
        unfinished.unlink(missing_ok=True)
        raise
    return True


def load(path: Path) -> Built:
    """Loads the candidate from a file that `save` wrote, onto the first device of this process.

    Raises:
      Exception: this backend cannot load the program.
    """
    (payload, arguments, results), tolerance, traced = pickle.loads(path.read_bytes())
    devices = jax.local_devices()[:1]
    run = serialize_executable.deserialize_and_load(payload, arguments, results, execution_devices=devices)
    return Built(run, tolerance, traced)


def saved_digest(path: Path) -> str:
    """Returns `Built.traced` of a file that `save` wrote."""
    return str(pickle.loads(path.read_bytes())[2])


def _failed(kernel: Kernel[Any, Any], schedule: Schedule, stage: Stage, error: BaseException, raising: bool) -> Failure:
    interrupts.reraise(error)
    failure = Failure(stage, describe_exception(error))
    if raising:
        raise CandidateFailed(f"{label_of(kernel.backend, schedule)}: {failure}") from error
    return failure


def _types_text(results: Sequence[Any]) -> str:
    return " and ".join(
        f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"no array but {type(x).__name__}" for x in results
    )
