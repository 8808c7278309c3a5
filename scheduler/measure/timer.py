"""Measures the time of one compiled call in seconds: device time if the device has a clock, else wall time."""

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
# After this many repetitions, `measure` decides whether the candidate is worth more.
FIRST_REPETITIONS = 3


def attach(clock: Clock) -> None:
    """Starts the device clock. Call this before taking the device lock: starting takes longer than measuring."""
    if clock == "cupti":
        x = jnp.zeros(8)
        with contextlib.suppress(RuntimeError):  # `measure` reports a broken clock
            jax_compat.device_seconds(lambda: x + 1, 1)


def measure(
    call: Callable[[], Any], *, repetitions: int, clock: Clock, l2: L2, slow_s: float | None = None
) -> Measurement:
    """Times `repetitions` calls of a compiled function, after a warm-up that also raises the clocks.

    Args:
      call: runs the function once. It rotates through its operands, so that no call finds the previous call's operands.
      clock: "cupti" times kernels on the device and excludes launch overhead; "wall" times a blocking call.
      l2: the cache state that this rotation causes; stored in the result.
      slow_s: in seconds; if the median of the first few repetitions is above it, no more repetitions are made.

    Raises:
      RuntimeError: the device clock reported no kernel, or different kernels for different calls.
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
    """Joins several measurements of the same schedule, such as interleaved rounds, into one."""
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
