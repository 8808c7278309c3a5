"""A mesh of devices that are made up on this CPU: how a function is divided is known without the real ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from scheduler.core.errors import SchedulerError


def mesh(extents: Mapping[str, int]) -> Mesh:
    """A mesh of these axes, all automatic; from then on this process's JAX runs on a CPU.

    Raises:
      SchedulerError: JAX has started with fewer devices.
    """
    devices = math.prod(extents.values())
    with contextlib.suppress(RuntimeError):  # it has started: with those that it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    if (here := len(jax.devices("cpu"))) < devices:
        raise SchedulerError(
            f"a mesh of {devices} devices wants as many, and JAX has started with {here}; start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    automatic = (AxisType.Auto,) * len(extents)
    return jax.make_mesh(
        tuple(extents.values()), tuple(extents), axis_types=automatic, devices=jax.devices("cpu")[:devices]
    )
