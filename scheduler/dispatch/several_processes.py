"""A job of several processes compiles the same kernels everywhere, or says that it cannot."""

from __future__ import annotations

import functools
import hashlib
import warnings
from pathlib import Path

import jax

from scheduler.core.errors import SchedulerError
from search_spaces import __file__ as search_spaces_file
from search_spaces import jax_compat


@functools.cache
def require_one_code() -> None:
    """Processes of one job choose alike only with the same code, constants and shipped records: compared once.

    Raises:
      SchedulerError: this process has others than process 0.
    """
    own = _digest()
    try:
        first = jax_compat.value_of_first_process("digest", own)
    except RuntimeError as error:
        warnings.warn(f"cannot tell whether all processes choose the same schedules: {error}", RuntimeWarning, 2)
        return
    if own != first:
        raise SchedulerError(
            f"process {jax.process_index()} has other code or other shipped records than process 0 and could choose "
            "another schedule; install the same tile-scheduler and the same jax everywhere"
        )


def _digest() -> str:
    """Of all that decides an answer which is neither the user's own nor measured now."""
    from scheduler.store import store

    packages = [Path(__file__).parents[1], Path(search_spaces_file).parent]
    files = sorted(file for package in packages for file in package.rglob("*.py"))
    shipped = store.shipped()
    digest = hashlib.sha256(jax.__version__.encode())
    for file in [*files, *([Path(shipped.location)] if shipped else [])]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
