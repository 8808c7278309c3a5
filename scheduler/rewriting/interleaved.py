"""Times whole compiled functions by wall time, in interleaved rounds on a busy device."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scheduler.core.hardware import CPU
from scheduler.core.records import TIE
from scheduler.measure.gpu import Gpu
from scheduler.search.runoff import FEWEST_ROUNDS, Margin, median_interval

# A sample is a batch of calls of this duration. Launches overlap, and clocks do not recover in between. The first call,
# which finds an idle device, and the function that ran before carry little weight (H200, 0.75 ms a call, the same
# function twice in a round: 2.4 % apart with samples of 0.02 s, 0.06 % with samples of 0.1 s).
SAMPLE_S = 0.1
# Calls in flight at once: at least two, and enough to keep the device busy while the host is late, which occasionally
# happens by a millisecond. If calls are long, the results of more calls would not fit in memory together.
QUEUED_S = 0.003
FEWEST_AHEAD, MOST_AHEAD = 2, 32
# The clock follows the chip's power. It has settled once two rounds of all functions differ by less than this share.
SETTLED = 0.01
WARM_UP_SHARE = 0.25
INTERLEAVED_S = 4.0


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Measured seconds per call of a function.

    Attributes:
      samples_s: One sample per round. Samples of two functions at the same index come from the same round.
    """

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def rounds(self) -> int:
        return len(self.samples_s)

    @property
    def spread_s(self) -> float:
        """Interquartile range of the samples."""
        ordered = sorted(self.samples_s)
        return ordered[(3 * (len(ordered) - 1)) // 4] - ordered[(len(ordered) - 1) // 4]


def time_interleaved(
    runs: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = INTERLEAVED_S,
    at_least_rounds: int = FEWEST_ROUNDS,
    devices: Sequence[jax.Device] = (),
    seed: int = 0,
) -> dict[str, Seconds]:
    """Times all `runs` in rounds, in a new random order each round, until all are decided or `seconds` have passed.

    A run is decided once the 99 % confidence interval of its ratio to the fastest is entirely slower, or entirely
    within `TIE`. During the comparison, no other process that takes the device lock (such as a search) measures on
    these devices.

    Args:
      runs: Label -> function that calls a compiled function and returns its results. It must be callable repeatedly.
      seconds: Time limit of the rounds after the warm-up. `at_least_rounds` always complete.
      devices: The devices to lock; () is JAX's default device.

    Raises:
      ValueError: `runs` is empty.
      WorkerError: There is no directory for the lock files.
      Exception: Any error raised by one of `runs`.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one function to time")
    order = random.Random(seed)
    with interleaves_on(devices or jax.devices()[:1]):
        sizes = {label: _calls_and_ahead(run) for label, run in runs.items()}

        def one_round() -> dict[str, float]:
            return {label: sample_seconds(runs[label], *sizes[label]) for label in order.sample(list(runs), len(runs))}

        _settle(one_round, WARM_UP_SHARE * seconds)
        rounds: list[dict[str, float]] = []
        until = time.perf_counter() + seconds
        while len(rounds) < at_least_rounds or (time.perf_counter() < until and not _decided(_times(runs, rounds))):
            rounds.append(one_round())
    return _times(runs, rounds)


def margin_of(one: Seconds, other: Seconds) -> Margin:
    """Returns by what share `other` is slower than `one`: the median ratio over rounds, and its confidence interval.

    Both must be results of the same `compare`.
    """
    ratios = [theirs / mine - 1 for mine, theirs in zip(one.samples_s, other.samples_s, strict=True)]
    low, high = median_interval(ratios)
    return Margin(low, statistics.median(ratios), high)


def speed_text(one: Seconds, other: Seconds) -> str:
    """Returns how fast `one` is, by the median ratio over rounds: "1.93 times as fast"."""
    return f"{1 + margin_of(one, other).middle:.2f} times as fast"


def interval_text(one: Seconds, other: Seconds) -> str:
    """Returns the confidence interval of the ratio: "1.91 to 1.95 times as fast (99 % confidence, 12 rounds)"."""
    ahead = margin_of(one, other)
    if not math.isfinite(ahead.low):
        return f"{one.rounds} rounds are too few for an interval"
    return f"{1 + ahead.low:.3f} to {1 + ahead.high:.3f} times as fast (99 % confidence, {one.rounds} rounds)"


def is_faster(one: Seconds, other: Seconds) -> bool:
    """Returns whether `one` is faster at 99 % confidence. Otherwise they tie, or `one` is slower."""
    return margin_of(one, other).low > 0


@contextlib.contextmanager
def interleaves_on(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Holds the device locks, so that no other process that uses them measures on `devices`."""
    indices = sorted({d.local_hardware_id or 0 for d in devices if d.platform != CPU.platform})
    held = [Gpu.wanted(index) or Gpu.none() for index in indices] or [Gpu.none()]
    with contextlib.ExitStack() as stack:
        for gpu in {gpu.uuid: gpu for gpu in held}.values():
            stack.enter_context(gpu.exclusive())
        yield


def _times(runs: Mapping[str, Any], rounds: Sequence[Mapping[str, float]]) -> dict[str, Seconds]:
    return {label: Seconds(tuple(each[label] for each in rounds)) for label in runs}


def _decided(times: Mapping[str, Seconds]) -> bool:
    fastest = min(times.values(), key=lambda each: each.median_s)
    margins = [margin_of(fastest, each) for each in times.values() if each is not fastest]
    return all(m.low > 0 or (m.low >= -TIE and m.high <= TIE) for m in margins)


def _settle(one_round: Callable[[], Mapping[str, float]], seconds: float) -> None:
    until, before = time.perf_counter() + seconds, math.inf
    for taken in itertools.count(1):
        now = sum(one_round().values())
        if time.perf_counter() > until or (taken > 1 and abs(now / before - 1) < SETTLED):
            return
        before = now


def _calls_and_ahead(run: Callable[[], Any]) -> tuple[int, int]:
    """Returns the number of calls in a sample, and the number of calls in flight at once."""
    for _ in range(2):  # work done only in the first call
        jax.block_until_ready(run())
    took_s = sample_seconds(run, 2, 2)
    ahead = min(max(math.ceil(QUEUED_S / took_s), FEWEST_AHEAD), MOST_AHEAD)
    return max(1, math.ceil(SAMPLE_S / took_s)), ahead


def sample_seconds(run: Callable[[], Any], calls: int, ahead: int) -> float:
    """Returns the mean seconds per call over `calls` calls, with up to `ahead` calls in flight."""
    running: collections.deque[Any] = collections.deque()
    started = time.perf_counter()
    for _ in range(calls):
        if len(running) == ahead:
            jax.block_until_ready(running.popleft())
        running.append(run())
    jax.block_until_ready(list(running))  # JAX treats a deque as one leaf and would not wait
    return (time.perf_counter() - started) / calls
