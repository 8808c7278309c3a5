"""Seconds of one compiled call: device time where the device keeps a clock, wall time elsewhere."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core.records import L2, Clock, Measurement
from search_spaces import jax_compat

WARM_UP_S = 0.003
WARM_UP_CALLS = 2
# So many repetitions tell whether a candidate is worth more of them.
FIRST_REPETITIONS = 3


def attach(clock: Clock) -> None:
    """Starts the clock of the device, before the lock of the device is taken: starting takes longer than measuring."""
    if clock == "cupti":
        x = jnp.zeros(8)
        with contextlib.suppress(RuntimeError):  # a clock that does not work is for `measure` to tell
            jax_compat.device_seconds(lambda: x + 1, 1)


def measure(
    call: Callable[[], Any], *, repetitions: int, clock: Clock, l2: L2, slow_s: float | None = None
) -> Measurement:
    """Times `repetitions` calls of a compiled function, after a warm-up that also raises the clocks.

    Args:
      call: runs it once. It rotates through its operands by itself, so that no call finds those of the one before.
      clock: "cupti" times kernels on the device and leaves launches out; "wall" times a blocking call.
      l2: what that rotation makes of the cache; goes into the result.
      slow_s: where the median of the first few repetitions is above this many seconds, they are all.

    Raises:
      RuntimeError: the device's clock reported no kernel, or not the same kernels for each call.
    """
    started = time.perf_counter()
    calls = 0
    while calls < WARM_UP_CALLS or time.perf_counter() - started < WARM_UP_S:
        jax.block_until_ready(call())
        calls += 1
    samples = _sample(call, repetitions if slow_s is None else min(FIRST_REPETITIONS, repetitions), clock)
    if slow_s is not None and len(samples) < repetitions and statistics.median(samples) <= slow_s:
        samples += _sample(call, repetitions - len(samples), clock)
    return Measurement(statistics.median(samples), tuple(samples), clock, l2)


def join(parts: Sequence[Measurement]) -> Measurement:
    """One measurement from several of the same schedule, as interleaved rounds leave them."""
    samples = tuple(sample for part in parts for sample in part.samples_s)
    return Measurement(statistics.median(samples), samples, parts[0].clock, parts[0].l2)


def _sample(call: Callable[[], Any], repetitions: int, clock: Clock) -> list[float]:
    if clock == "cupti":
        return jax_compat.device_seconds(call, repetitions)
    return [_wall_seconds(call) for _ in range(repetitions)]


def _wall_seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started
