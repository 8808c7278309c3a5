"""What benchmarks of whole functions share: wall times in turns as a row has them, and distances from float32."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core import hardware
from scheduler.rewriting import interleaved
from search_spaces import jax_compat

Run = Callable[[], Any]
# Seconds of rounds for each version of a function.
SECONDS_OF_VERSION = 3.0
# Calls that the device's clock takes the kernels of, and how many kernels are told.
DEVICE_CALLS, MOST_KERNELS = 5, 24


def wall_times(
    runs: Mapping[str, Run], layers: int, devices: Sequence[jax.Device] = (), seconds: float = 0.0
) -> dict[str, Any]:
    """Microseconds a layer of each version, by name: ``jnp_us``, its spread and every sample; and each over jnp's.

    Args:
      runs: as `interleaved.time_interleaved` takes them; the first is what the others are compared with.
      layers: in a call.
      devices: that are kept busy; () is JAX's default device.
      seconds: of rounds for each version; 0 is `SECONDS_OF_VERSION`.
    """
    first, *others = runs
    walls = interleaved.time_interleaved(
        runs, seconds=(seconds or SECONDS_OF_VERSION) * len(runs), at_least_rounds=12, devices=devices
    )
    line: dict[str, Any] = {}
    for name, wall in walls.items():
        line[f"{name}_us"] = wall.median_s / layers * 1e6
        line[f"{name}_spread_us"] = wall.spread_s / layers * 1e6
        line[f"{name}_samples_us"] = [round(sample / layers * 1e6, 3) for sample in wall.samples_s]
    return line | {f"{name}_vs_{first}": line[f"{first}_us"] / line[f"{name}_us"] for name in others}


def kernel_times(run: Run, layers: int) -> dict[str, float]:
    """Microseconds a layer by the kernel's name, the longest first, the shortest together; on a CPU none.

    Raises:
      RuntimeError: as `jax_compat.device_kernels`.
    """
    if hardware.detect().platform == "cpu":
        return {}
    seconds: dict[str, float] = collections.defaultdict(float)
    for kernels in jax_compat.device_kernels(run, DEVICE_CALLS):
        for name, s in kernels:
            seconds[name[:80]] += s / DEVICE_CALLS
    ordered = sorted(seconds.items(), key=lambda one: -one[1])
    others = sum(s for _, s in ordered[MOST_KERNELS:])
    longest = dict(ordered[:MOST_KERNELS]) | ({"others": others} if others else {})
    return {name: round(s / layers * 1e6, 3) for name, s in longest.items()}


def distances(written: Callable[..., Any], args: Sequence[Any], results: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of each result and each array of it: the norm of its distance from float32, over that array's norm.

    Args:
      written: the function in plain jnp, which `args` in float32 are given to.
      results: of any version of it for `args`, by name.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    with jax.default_matmul_precision("highest"):
        exact = jax.tree.leaves(jax.jit(written)(*wide))

    @jax.jit
    def distance(x: Any, right: Any) -> Any:
        x, right = x.astype(jnp.float32), right.astype(jnp.float32)
        return jnp.linalg.norm((x - right).ravel()) / (jnp.linalg.norm(right.ravel()) + 1e-30)

    return {
        name: [float(distance(x, right)) for x, right in zip(jax.tree.leaves(result), exact, strict=True)]
        for name, result in results.items()
    }


def worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest of our distances over theirs, of the same array."""
    return max(a / b if b else float(a > 0) + 1.0 for a, b in zip(ours, theirs, strict=True))
