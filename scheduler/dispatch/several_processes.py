"""A job of several processes compiles the same kernels everywhere, or says that it cannot."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import jax

from scheduler.core import safe_text
from scheduler.core.errors import SchedulerError
from search_spaces import __file__ as search_spaces_file
from search_spaces import jax_compat

_guard = threading.Lock()
# What was found to be the same everywhere, in the order in which it was asked: the plans' digests, "" for no plan.
_agreed: list[str] = []


def require_one_code(plan: str = "") -> None:
    """Processes of one job choose alike only by the same: compared once for each plan, and once without any.

    Without a plan that is code, constants and shipped records; with one, code and the plan.

    Args:
      plan: the digest of the one that answers here; "" for none.

    Raises:
      SchedulerError: this process has another than process 0.
    """
    with _guard:
        if plan in _agreed:
            return
        own = f"{plan} {digest_of_code() if plan else _digest()}"
        try:
            first = jax_compat.value_of_first_process(f"digest/{len(_agreed)}", own)
        except RuntimeError as error:
            safe_text.warn(f"cannot tell whether all processes choose the same schedules: {error}")
            first = own
        if first != own:
            raise SchedulerError(f"process {jax.process_index()} {_difference(plan, first.partition(' ')[0])}")
        _agreed.append(plan)


def _difference(own: str, first: str) -> str:
    if own == first:
        what = "code" if own else "code or other shipped records"
        return (
            f"has other {what} than process 0 and could choose another schedule; install the same tile-scheduler and "
            "the same jax everywhere"
        )
    here, there = (f"by the plan {plan}" if plan else "without a plan" for plan in (own, first))
    return f"answers {here}, and process 0 {there}; give all processes the same plan"


def _digest() -> str:
    """Of all that decides an answer which is neither the user's own nor measured now."""
    from scheduler.store import store

    shipped = store.shipped()
    return digest_of_code(*([Path(shipped.location)] if shipped else []))


def digest_of_code(*others: Path) -> str:
    """Of this package and of JAX's version, and of these files."""
    packages = [Path(__file__).parents[1], Path(search_spaces_file).parent]
    files = sorted(file for package in packages for file in package.rglob("*.py"))
    digest = hashlib.sha256(jax.__version__.encode())
    for file in [*files, *others]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
