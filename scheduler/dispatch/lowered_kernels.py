"""Lowers each kernel of a GPU once in a process, however many programs call it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from scheduler.dispatch.dispatch import Decision
from search_spaces.fingerprint import digest
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from jax import export

# The lowering of a Pallas kernel by Mosaic GPU infers its layouts in Python: 0.1 to 0.6 s, of which tracing takes a
# tenth (JAX 0.10 to 0.12). Lowered kernels have some 50 KB each.
_MOST_KERNELS = 256
# Kernel's equations, chip -> the exported kernel; None if `jax.export` refuses it.
_lowered: dict[tuple[str, str], export.Exported | None] = {}
_lock = threading.Lock()


def results(found: Decision, problem: Problem, params: Mapping[str, Any], *operands: Any) -> tuple[jax.Array, ...]:
    """Returns the results of a selected kernel, as ``found.kernel.results`` does, while a program is lowered.

    The key is the content of the traced kernel, so that a changed kernel is lowered again.
    """

    def run(*args: Any) -> tuple[jax.Array, ...]:
        return found.kernel.results(problem, found.schedule, found.target, *args, **params)

    if found.kernel.library or found.kernel.vendor or found.target.platform != "cuda":
        return run(*operands)
    jitted = jax.jit(run)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    key = digest(jitted.trace(*avals).jaxpr), repr(found.target)
    if key not in _lowered:
        exported = _exported(jitted, avals)
        with _lock:
            _lowered[key] = exported
            for oldest in list(_lowered)[:-_MOST_KERNELS]:
                del _lowered[oldest]
    known = _lowered.get(key)
    return run(*operands) if known is None else tuple(known.call(*operands))


def _exported(jitted: Any, avals: list[jax.ShapeDtypeStruct]) -> export.Exported | None:
    from jax import export  # only programs of GPUs need it

    kernels = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
    try:
        return export.export(jitted, platforms=("cuda",), disabled_checks=kernels)(*avals)
    except ValueError:  # a call of a compiler other than Mosaic GPU
        return None
