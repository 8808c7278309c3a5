"""Simulates a mesh of devices on the CPU, to see how a function is partitioned without the real devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from scheduler.core.errors import SchedulerError


def mesh(extents: Mapping[str, int]) -> Mesh:
    """Returns a mesh with these axes, all automatic. JAX runs on the CPU in this process from then on.

    Raises:
      SchedulerError: JAX has already started with fewer devices.
    """
    devices = math.prod(extents.values())
    with contextlib.suppress(RuntimeError):  # JAX has already started: use the devices that it has
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
