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
    *calls: Callable[[], Any], repetitions: int, clock: Clock, l2: L2, slow_s: float | None = None
) -> Measurement:
    """Times `repetitions` calls of a compiled function, after a warm-up that also raises the clocks.

    Args:
      calls: each runs the function once, with its own variant of the operands. It rotates through them, so that no call
        finds the previous call's operands. Each sample is the mean over the variants.
      clock: "cupti" times kernels on the device and excludes launch overhead; "wall" times a blocking call.
      l2: the cache state that this rotation causes; stored in the result.
      slow_s: in seconds; if the median of the first few repetitions is above it, no more repetitions are made.

    Raises:
      RuntimeError: the device clock reported no kernel, or different kernels for different calls.
    """
    started = time.perf_counter()
    warm_up = 0
    while warm_up < WARM_UP_CALLS * len(calls) or time.perf_counter() - started < WARM_UP_S:
        jax.block_until_ready(calls[warm_up % len(calls)]())
        warm_up += 1
    first = repetitions if slow_s is None else min(FIRST_REPETITIONS, repetitions)
    each = [_sample(call, first, clock) for call in calls]
    if slow_s is not None and first < repetitions and statistics.median(_means(each)) <= slow_s:
        each = [samples + _sample(call, repetitions - first, clock) for samples, call in zip(each, calls, strict=True)]
    samples, worst_s = _means(each), max(map(statistics.median, each)) if len(each) > 1 else None
    return Measurement(statistics.median(samples), tuple(samples), clock, l2, worst_s)


def _means(each: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean over variants of each repetition."""
    return [sum(samples) / len(samples) for samples in zip(*each, strict=True)]


def join(parts: Sequence[Measurement]) -> Measurement:
    """Joins several measurements of the same schedule, such as interleaved rounds, into one."""
    samples = tuple(sample for part in parts for sample in part.samples_s)
    worst = [part.worst_s for part in parts if part.worst_s is not None]
    worst_s = statistics.median(worst) if worst else None
    return Measurement(statistics.median(samples), samples, parts[0].clock, parts[0].l2, worst_s)


def _sample(call: Callable[[], Any], repetitions: int, clock: Clock) -> list[float]:
    if clock == "cupti":
        return jax_compat.device_seconds(call, repetitions)
    return [_wall_seconds(call) for _ in range(repetitions)]


def _wall_seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started
