"""Measures the time of one compiled call in seconds: device time if the device has a clock, else wall time."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scheduler.core.chip_table import Clock
from scheduler.core.records import L2, Measurement
from search_spaces import jax_compat

WARM_UP_S = 0.003
WARM_UP_CALLS = 2
# One of the first three calls without gaps takes up to 6.6 % longer than the mean of ten (H200, 40 to 150 us a call).
# Therefore calls are timed after others have run for this time, but after so many at most.
SETTLE_S, MOST_SETTLING = 0.001, 6
# Elements and steps of the program that runs on the device while the host launches calls: 2 ms on an H200.
OCCUPYING_ELEMENTS, OCCUPYING_STEPS = 2**29, 32
# After this many repetitions, `measure` decides whether the candidate is worth more.
FIRST_REPETITIONS = 3


def attach(clock: Clock) -> None:
    """Starts the device clock. Call this before taking the device lock: starting takes longer than measuring."""
    if clock == "cupti":
        x = jnp.zeros(8)
        _occupy()
        with contextlib.suppress(RuntimeError):  # `measure` reports a broken clock
            jax_compat.device_seconds(lambda: x + 1, 1)


def measure(
    *calls: Callable[[], Any], repetitions: int, clock: Clock, l2: L2, slow_s: float | None = None
) -> Measurement:
    """Times `repetitions` calls of a compiled function, after a warm-up that also raises the clocks.

    On a device with a clock, calls follow one another without gaps, as the kernels of a program do: the device is
    occupied until all are launched.

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
    warm_up, call_s = 0, math.inf
    while warm_up < WARM_UP_CALLS * len(calls) or time.perf_counter() - started < WARM_UP_S:
        call_s = min(call_s, _wall_seconds(calls[warm_up % len(calls)]))
        warm_up += 1
    settling = MOST_SETTLING if MOST_SETTLING * call_s <= SETTLE_S else math.ceil(SETTLE_S / call_s)
    sample = functools.partial(_sample, clock, settling)
    first = repetitions if slow_s is None else min(FIRST_REPETITIONS, repetitions)
    each = [sample(call, first) for call in calls]
    if slow_s is not None and first < repetitions and statistics.median(_means(each)) <= slow_s:
        each = [samples + sample(call, repetitions - first) for samples, call in zip(each, calls, strict=True)]
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


def _sample(clock: Clock, settling: int, call: Callable[[], Any], repetitions: int) -> list[float]:
    """Returns the seconds of each of `repetitions` calls, after `settling` calls if the device has a clock."""
    if clock == "cupti":
        return jax_compat.device_seconds(call, settling + repetitions, ahead=_ahead())[settling:]
    return [_wall_seconds(call) for _ in range(repetitions)]


@functools.cache
def _ahead() -> jax_compat.Ahead:
    """Returns work that occupies the device while calls are launched. The first call runs it, to count its kernels."""
    program = _occupy()
    (kernels,) = jax_compat.device_kernels(program, 1)
    return jax_compat.Ahead(program, len(kernels))


@functools.cache
def _occupy() -> Callable[[], Any]:
    """Returns a compiled program of arithmetic alone, which takes neither memory nor bandwidth."""

    def hashed(seed: jax.Array) -> jax.Array:
        x = lax.iota(jnp.uint32, OCCUPYING_ELEMENTS) + seed
        for _ in range(OCCUPYING_STEPS):
            x = (x * jnp.uint32(1664525)) ^ (x >> jnp.uint32(16))
        return jnp.sum(x)

    seed = jnp.uint32(1)
    return functools.partial(jax.jit(hashed).lower(seed).compile(), seed)


def _wall_seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started
