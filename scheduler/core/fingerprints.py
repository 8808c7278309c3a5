"""Change detection for kernels and references without a version number: compares their traces with stored ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax

from scheduler.core import interrupts
from scheduler.core.records import Schedule, choice_text
from search_spaces.fingerprint import digest, fingerprint
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.space import DeclarationError
from search_spaces.target import Target

# The version of a kernel that has no manual version number.
BY_PROGRAM = 0


class Changed(str):
    """Reason why a stored record is stale: the kernel or its reference changed after it was measured."""

    __slots__ = ()


class Chosen(Protocol):
    """A schedule of a backend."""

    @property
    def backend(self) -> str: ...
    @property
    def schedule(self) -> Schedule: ...


class Fingerprinted(Chosen, Protocol):
    """A schedule with the fingerprint from its measurement: an entry or a trial."""

    @property
    def fingerprint(self) -> str: ...


# Returns the current fingerprint of a schedule of one problem.
Tracer = Callable[[Chosen], str]


def of_schedule(kernel: Kernel[Any, Any], problem: Problem, schedule: Schedule, target: Target) -> str:
    """Returns the current fingerprint of a schedule; "" for a kernel with a manual version."""
    if kernel.version != BY_PROGRAM:
        return ""

    def run(*args: Any) -> Any:
        return kernel.results(problem, kernel.space(problem, target).decode(schedule), target, *args)

    return _isolated(lambda: _traced(run, problem.operands()))


def of_reference(operation: Operation[Any], problem: Problem) -> str:
    """Returns the current fingerprint of the reference; "" if all kernels have manual versions."""
    if not operation.by_program:
        return ""
    return _isolated(lambda: _traced(problem.reference, problem.operands()))


def of_legal(operation: Operation[Any], problem: Problem, target: Target) -> str:
    """Returns a digest of the legal schedules of the kernels without a manual version; "" if there is no such kernel.

    Choices and rules change it if they change which schedules are legal for `problem`.
    """
    own = operation.by_program
    try:
        spaces = {each.backend: each.space(problem, target) for each in own if each.supports(problem, target) is None}
        return digest({backend: space.legal()[0].values() for backend, space in spaces.items()}) if own else ""
    except DeclarationError:
        return "raises"


def of_candidate(operation: Operation[Any], problem: Problem, backend: str, schedule: Schedule, target: Target) -> str:
    """Returns the fingerprints of a schedule and of the reference as one text, to compare two processes' code."""
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
    legal: str = "",
    tracer: Tracer | None = None,
) -> Changed | None:
    """Returns which kernel or reference changed since these schedules were measured, or None.

    Schedules without a fingerprint are not compared. A fingerprint that differs under another version of JAX proves
    nothing, so the record then counts as unchanged, as it does for kernels with manual versions.

    Args:
      reference: the stored fingerprint of the reference, or "".
      jax_version: the version of JAX that made the stored fingerprints.
      legal: the stored digest of the legal schedules, or "".
      tracer: traces schedules; None traces them in this process.
    """
    if legal and of_legal(operation, problem, target) not in (legal, ""):
        return Changed("the choices or rules have changed since it was measured")
    tracer = tracer or (lambda one: of_schedule(operation.kernel(one.backend), problem, one.schedule, target))
    for then in measured:
        if then.fingerprint and then.backend in operation.backends:
            now = tracer(then)
            if now and now != then.fingerprint:
                subject = f"the {then.backend} kernel ({choice_text(then.backend, then.schedule)})"
                return _changed(subject, jax_version)
    if reference and of_reference(operation, problem) not in (reference, ""):
        return _changed("the reference", jax_version)
    return None


def _isolated(call: Callable[[], str]) -> str:
    """Calls `call` in a new thread, without the caller's mesh, traces and settings.

    During the import of a module, `call` runs in the current thread: that thread holds the import lock, so an import
    inside a kernel would block a new thread forever.
    """
    specs = (getattr(module, "__spec__", None) for module in sys.modules.copy().values())
    importing = any(getattr(spec, "_initializing", False) for spec in specs)
    return call() if importing else interrupts.in_fresh_thread(call)


def _changed(subject: str, jax_version: str) -> Changed | None:
    if jax_version != jax.__version__:
        return None
    return Changed(f"{subject} has changed since it was measured")


def _traced(run: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> str:
    try:
        return fingerprint(run, operands)
    except BaseException as error:  # kernels raise anything; a call raises the same error, or never selects the kernel
        interrupts.reraise(error)
        return f"raises {type(error).__name__}"
