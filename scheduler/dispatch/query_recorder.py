"""Records the problems that calls query, without a lookup; and digests what the selection for a sharded call reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from scheduler.core import codec
from scheduler.core.errors import UnknownChip
from scheduler.core.hardware import Hardware
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.several_processes import digest_of_code, require_one_code
from scheduler.model import constants
from scheduler.store.cache import Cache
from search_spaces.front_end import Shape
from search_spaces.operation import Operation, Params
from search_spaces.problem import Problem
from search_spaces.sharding import Spec

# Names and extents of the axes of a mesh, and the specs of arrays.
Shardings = tuple[tuple[tuple[str, int], ...], tuple[Spec, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class QueryRecorder:
    """The queries of one call while it is lowered and compiled. Compared by identity.

    Attributes:
      queries: the queried problems. For a call that XLA shards over devices, the problems of one device.
      not_recorded: the reasons why no kernel could be selected.
      shardings: how XLA divides the operands of a call over several devices, for each query.
    """

    queries: list[tuple[Operation[Any], Problem]] = dataclasses.field(default_factory=list)
    not_recorded: list[str] = dataclasses.field(default_factory=list)
    shardings: list[Shardings] = dataclasses.field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why there are no queries."""
        return "; ".join(dict.fromkeys(self.not_recorded)) or "XLA removes the call"


@dataclasses.dataclass(frozen=True)
class RecordingOptions(Options):
    """Options that replace the caller's own, and record queries in `recorder`."""

    recorder: QueryRecorder = dataclasses.field(default_factory=QueryRecorder)


# ------------------------------------------------------------------------------
# Digest of all inputs to the schedule selection for a sharded call, identical in all processes.

# Keyed by the stores that calls read since the last `reload`.
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
    """Returns the digest of all inputs to the schedule selection for the shards of a call.

    The digest is part of the key in JAX's compilation cache, because the schedules of these programs are selected only
    during compilation.

    Raises:
      SchedulerError: processes of one job could select different schedules.
    """
    if isinstance(options, RecordingOptions):
        return uuid.uuid4().hex  # unique: a program from the compilation cache would make no queries to record
    if operation.by_program:
        return uuid.uuid4().hex  # unique: the kernel's program is known only when a shard is traced
    plan = options.plan and (options.plan.plan.digest, options.plan.missing)
    allowed = options.backends and sorted(options.backends)
    versions = [(kernel.backend, kernel.version) for kernel in operation.kernels_on(platform)]
    excluded = options.excluded and sorted(options.excluded)
    # Other parameters only tell how a call is differentiated.
    of_kernels = tuple(named for named in params if named[0] in operation.params)
    question = (operation.name, versions, problem.canonical(), tuple(shapes), of_kernels, platform)
    option_values = (options.on_miss, options.loss_per_gain, allowed, excluded, options.schedule, options.target, plan)
    text = f"{question!r} {option_values!r} {_all_known(operation, platform, options)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _all_known(operation: Operation[Any], platform: str, options: Options) -> str:
    """Returns the digest of all stored data for an operation on a chip, and of the code that selects by it.

    The stores are read once, before any shard is decided. If a decision uses data stored later, the only cost is one
    more compilation.
    """
    plan = "" if options.plan is None else options.plan.plan.digest
    several = jax.process_count() > 1
    if several:  # Every process reaches this point. Which of them compile depends on JAX's compilation cache.
        require_one_code(plan)
    known = _known.setdefault(dispatch.user_cache(), {})
    key = (operation, platform, options.target, plan)
    if key not in known:
        found = hashlib.sha256(_code().encode())
        with contextlib.suppress(UnknownChip):  # the library is used, regardless of stored records
            hardware = dispatch.hardware_for(platform, options.target)
            found.update(hardware.id.encode())
            for line in () if plan else _stored(operation, hardware, shared_only=several):
                found.update(line.encode())
        known[key] = found.hexdigest()
    return known[key]


def _stored(operation: Operation[Any], hardware: Hardware, *, shared_only: bool) -> list[str]:
    """Returns stored records and calibrations as text. Records are not decoded, as there may be thousands."""
    cache, filters = dispatch.user_cache(), {"operation": operation.name, "hardware": hardware.id}
    own = [] if shared_only else map(codec.record_to_text, cache.remembered(**filters))
    stores = cache.ask(lambda store: store.texts(**filters), shared_only=shared_only)
    fitted = constants.calibrations(operation.name, hardware, shared_only=shared_only)
    lines = {*own, *(line for each in stores for line in each)}
    return [*sorted(lines), *sorted(map(codec.calibration_to_text, fitted.values()))]
