"""What decides how the devices that a call is divided over are answered, as a digest: the same in every process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from scheduler.core import codec
from scheduler.core.errors import UnknownChip
from scheduler.core.fingerprints import BY_PROGRAM
from scheduler.core.hardware import Hardware
from scheduler.core.ranges import range_to_text
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.listening import Listening
from scheduler.dispatch.several_processes import digest_of_code, require_one_code
from scheduler.model import constants
from scheduler.store.layered import Cache
from search_spaces.operation import Operation, Params
from search_spaces.problem import Problem
from search_spaces.unfolded import Shape

# By the stores as calls see them since the last `reload`.
_known: weakref.WeakKeyDictionary[Cache, dict[Any, str]] = weakref.WeakKeyDictionary()
_code = functools.cache(digest_of_code)


def digest(
    operation: Operation[Any],
    problem: Problem,
    shapes: Sequence[Shape],
    params: Params,
    platform: str,
    options: Options,
) -> str:
    """Of all that decides how the parts of a call are answered.

    JAX's compilation cache tells programs apart by it, whose schedules are chosen only when they are compiled.

    Raises:
      SchedulerError: processes of one job could choose apart.
    """
    if isinstance(options, Listening):
        return uuid.uuid4().hex  # a program from that cache would ask nothing
    if any(kernel.version == BY_PROGRAM for kernel in operation.kernels):
        return uuid.uuid4().hex  # what they compute is known when a part is traced
    plan = options.plan and (options.plan.plan.digest, options.plan.missing)
    among = options.backends and sorted(options.backends)
    versions = [(kernel.backend, kernel.version) for kernel in operation.kernels]
    asked = (operation.name, versions, problem.canonical(), tuple(shapes), params, platform)
    how = (options.on_miss, options.sure, among, options.schedule, options.target, plan)
    text = f"{asked!r} {how!r} {_all_known(operation, platform, options)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _all_known(operation: Operation[Any], platform: str, options: Options) -> str:
    """Of what is stored of an operation on a chip, and of the code that chooses by it.

    Read once, before any part is decided: what is decided by more than it tells is only compiled once more.
    """
    plan = "" if options.plan is None else options.plan.plan.digest
    several = jax.process_count() > 1
    if several:  # here, where every process comes: which of them compiles is for JAX's cache to decide
        require_one_code(plan)
    known = _known.setdefault(dispatch.user_cache(), {})
    key = (operation, platform, options.target, plan)
    if key not in known:
        found = hashlib.sha256(_code().encode())
        with contextlib.suppress(UnknownChip):  # the library answers, whatever is stored
            hardware = dispatch.hardware_for(platform, options.target)
            found.update(hardware.id.encode())
            for line in () if plan else _stored(operation, hardware, shared_only=several):
                found.update(line.encode())
        known[key] = found.hexdigest()
    return known[key]


def _stored(operation: Operation[Any], hardware: Hardware, *, shared_only: bool) -> list[str]:
    cache = dispatch.user_cache()
    records = cache.records(operation=operation.name, hardware=hardware.id, shared_only=shared_only)
    ranges = cache.ranges(operation=operation.name, hardware=hardware.id, shared_only=shared_only)
    fitted = constants.calibrations(operation.name, hardware, shared_only=shared_only)
    lines = (map(codec.record_to_text, records), map(range_to_text, ranges))
    return [
        *(line for each in lines for line in sorted(each)),
        *sorted(map(codec.calibration_to_text, fitted.values())),
    ]
