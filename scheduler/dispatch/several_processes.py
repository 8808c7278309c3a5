"""Checks that all processes of a job select the same schedules."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import jax

from scheduler.core import text
from scheduler.core.errors import SchedulerError
from search_spaces import __file__ as search_spaces_file
from search_spaces import jax_compat

_guard = threading.Lock()
# Plan digests for which all processes agree, in the order of comparison; "" means no plan.
_agreed: list[str] = []


def require_one_code(plan: str = "") -> None:
    """Compares all inputs to the selection with process 0, once per plan and once without a plan.

    Without a plan, the inputs are code, constants and shipped records. With a plan, the inputs are code and the plan.

    Args:
      plan: the digest of the active plan; "" for none.

    Raises:
      SchedulerError: the inputs of this process differ from those of process 0.
    """
    with _guard:
        if plan in _agreed:
            return
        own = f"{plan} {digest_of_code() if plan else _digest()}"
        try:
            first = jax_compat.value_of_first_process(f"digest/{len(_agreed)}", own)
        except RuntimeError as error:
            text.warn_safely(f"cannot check whether all processes select the same schedules: {error}")
            first = own
        if first != own:
            raise SchedulerError(f"process {jax.process_index()} {_difference(plan, first.partition(' ')[0])}")
        _agreed.append(plan)


def _difference(own: str, first: str) -> str:
    if own == first:
        kinds = "code" if own else "code or other shipped records"
        return (
            f"has other {kinds} than process 0 and could select another schedule; install the same tile-scheduler and "
            "the same jax everywhere"
        )
    here, there = (f"with the plan {plan}" if plan else "without a plan" for plan in (own, first))
    return f"runs {here}, and process 0 {there}; give all processes the same plan"


def _digest() -> str:
    """Returns the digest of code and shipped records.

    Excludes the user's own records and new measurements.
    """
    from scheduler.store import store

    shipped = store.shipped()
    return digest_of_code(*([Path(shipped.location)] if shipped else []))


def digest_of_code(*others: Path) -> str:
    """Returns the digest of the project's two packages, the version of JAX, and the files `others`."""
    packages = [Path(__file__).parents[1], Path(search_spaces_file).parent]
    files = sorted(file for package in packages for file in package.rglob("*.py"))
    digest = hashlib.sha256(jax.__version__.encode())
    for file in [*files, *others]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
