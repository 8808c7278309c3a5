"""Whether a kernel and its reference still trace to what was measured, where no version kept by hand tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

from scheduler.core.records import Schedule, choice_text
from scheduler.core.threads import in_fresh_thread
from search_spaces.fingerprint import fingerprint
from search_spaces.kernel import Kernel, Target
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The version of a kernel that has none kept by hand.
BY_PROGRAM = 0


class Changed(str):
    """Why a stored answer no longer holds: the kernel or its reference was edited after it was measured."""

    __slots__ = ()


class Fingerprinted(Protocol):
    """A schedule with the fingerprint that it had when it was measured: an entry, or a trial."""

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def fingerprint(self) -> str: ...


def of_schedule(kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, target: Target) -> str:
    """The fingerprint of one schedule as it is traced now; "" where the kernel's version is kept by hand."""
    if kernel.version != BY_PROGRAM:
        return ""

    def run(*args: Any) -> Any:
        return kernel.results(problem, kernel.space(problem, target).decode(schedule), target, *args)

    return _apart(lambda: _traced(run, problem.operands()))


def of_reference(operation: Operation[Any], problem: Problem) -> str:
    """The fingerprint of the reference as it is traced now; "" where all versions are kept by hand."""
    if all(kernel.version != BY_PROGRAM for kernel in operation.kernels):
        return ""
    return _apart(lambda: _traced(problem.reference, problem.operands()))


def of_candidate(operation: Operation[Any], problem: Problem, backend: str, schedule: Schedule, target: Target) -> str:
    """Those of a schedule and of the reference, as one text, by which two processes compare what they have loaded."""
    kernel = operation.kernel(backend)
    return f"{of_schedule(kernel, problem, schedule, target)} {of_reference(operation, problem)}".strip()


def changed(
    operation: Operation[Any],
    problem: Problem,
    target: Target,
    measured: Iterable[Fingerprinted],
    *,
    reference: str,
    jax_version: str,
) -> Changed | None:
    """What was edited since these schedules were measured, in words; None where nothing was.

    Schedules without a fingerprint are not compared. Those of another version of JAX cannot be, unless they are the
    same: what such a record says holds as it does for kernels whose versions are kept by hand.

    Args:
      reference: the fingerprint of the reference then, "" where none was kept.
      jax_version: under which the fingerprints were made.
    """
    for then in measured:
        if then.fingerprint and then.backend in operation.backends:
            now = of_schedule(operation.kernel(then.backend), problem, then.schedule, target)
            if now and now != then.fingerprint:
                what = f"the {then.backend} kernel ({choice_text(then.backend, then.schedule)})"
                return _changed(what, jax_version)
    if reference and of_reference(operation, problem) not in (reference, ""):
        return _changed("the reference", jax_version)
    return None


def _apart(call: Callable[[], str]) -> str:
    """What `call` returns, in a thread without the caller's mesh, traces and settings.

    While a module is imported, its own thread holds a lock that an import within a kernel would wait for: it calls.
    """
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    importing = any(getattr(spec, "_initializing", False) for spec in specs)
    return call() if importing else in_fresh_thread(call)


def _changed(what: str, jax_version: str) -> Changed | None:
    if jax_version != jax.__version__:
        return None
    return Changed(f"{what} computes something else than when it was measured")


def _traced(run: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> str:
    try:
        return fingerprint(run, operands)
    except Exception as error:  # whatever a kernel raises; a call then raises it, too, or never asks the kernel
        return f"raises {type(error).__name__}"
