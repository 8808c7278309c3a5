"""Whole compiled functions timed in turns: wall time in interleaved rounds, on a device that is kept busy."""

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
from scheduler.search.final_comparison import FEWEST_ROUNDS, Margin, median_interval

# One sample is as many calls as take this long: launches overlap, clocks do not recover in between, and its first call,
# which finds an idle device, weighs little, as do the functions before it in a round (H200, 0.75 ms a call: one and the
# same function, twice in a round, was 2.4 % apart by samples of 0.02 s, 0.06 % by samples of 0.1 s).
SAMPLE_S = 0.1
# Calls on their way at once: so many that the device has work while the host is late, which it is by a millisecond now
# and then, and two at least. Results of more would not fit in beside each other where a call takes long.
QUEUED_S = 0.003
FEWEST_AHEAD, MOST_AHEAD = 2, 32
# The clock follows the chip's power: it has settled when two rounds of all functions differ by less.
SETTLED = 0.01
WARM_UP_SHARE = 0.25
SECONDS = 4.0


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What a function took, a call.

    Attributes:
      samples_s: of each round in turn, so that those of two functions belong together by their places.
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


def compare(
    runs: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = SECONDS,
    at_least_rounds: int = FEWEST_ROUNDS,
    devices: Sequence[jax.Device] = (),
    seed: int = 0,
) -> dict[str, Seconds]:
    """Times all `runs` in rounds, in another random order each, until they are decided or `seconds` are used up.

    They are decided when each is slower than the fastest beyond doubt, or as fast within `TIE` beyond doubt. Meanwhile
    no other process of those that take turns (searches above all) measures on these devices.

    Args:
      runs: label -> calls a compiled function, returns its results, and can do so again.
      seconds: of rounds after the warm-up; `at_least_rounds` are taken however long they last.
      devices: that are kept busy; () is JAX's default device.

    Raises:
      ValueError: there is nothing to time.
      WorkerError: there is no place for the locks of turns.
      whatever one of `runs` raises.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one function to time")
    order = random.Random(seed)
    with turns_on(devices or jax.devices()[:1]):
        sizes = {label: _calls_and_ahead(run) for label, run in runs.items()}

        def one_round() -> dict[str, float]:
            return {label: sample(runs[label], *sizes[label]) for label in order.sample(list(runs), len(runs))}

        _settle(one_round, WARM_UP_SHARE * seconds)
        rounds: list[dict[str, float]] = []
        until = time.perf_counter() + seconds
        while len(rounds) < at_least_rounds or (time.perf_counter() < until and not _decided(_times(runs, rounds))):
            rounds.append(one_round())
    return _times(runs, rounds)


def margin(one: Seconds, other: Seconds) -> Margin:
    """By which share `other` is slower than `one`, from the ratio within each round, and between what it surely lies.

    Both are results of one `compare`.
    """
    ratios = [theirs / mine - 1 for mine, theirs in zip(one.samples_s, other.samples_s, strict=True)]
    low, high = median_interval(ratios)
    return Margin(low, statistics.median(ratios), high)


def faster(one: Seconds, other: Seconds) -> bool:
    """Whether `one` is faster beyond doubt; otherwise they tie, or it is slower."""
    return margin(one, other).low > 0


@contextlib.contextmanager
def turns_on(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Within, this process alone measures on `devices`, among those that take turns."""
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
    margins = [margin(fastest, each) for each in times.values() if each is not fastest]
    return all(m.low > 0 or (m.low >= -TIE and m.high <= TIE) for m in margins)


def _settle(one_round: Callable[[], Mapping[str, float]], seconds: float) -> None:
    until, before = time.perf_counter() + seconds, math.inf
    for taken in itertools.count(1):
        now = sum(one_round().values())
        if time.perf_counter() > until or (taken > 1 and abs(now / before - 1) < SETTLED):
            return
        before = now


def _calls_and_ahead(run: Callable[[], Any]) -> tuple[int, int]:
    """How many calls a sample has, and how many of them are on their way at once."""
    for _ in range(2):  # whatever is done in a first call only
        jax.block_until_ready(run())
    took_s = sample(run, 2, 2)
    ahead = min(max(math.ceil(QUEUED_S / took_s), FEWEST_AHEAD), MOST_AHEAD)
    return max(1, math.ceil(SAMPLE_S / took_s)), ahead


def sample(run: Callable[[], Any], calls: int, ahead: int) -> float:
    """Seconds of each of so many calls, one after the other."""
    running: collections.deque[Any] = collections.deque()
    started = time.perf_counter()
    for _ in range(calls):
        if len(running) == ahead:
            jax.block_until_ready(running.popleft())
        running.append(run())
    jax.block_until_ready(list(running))  # JAX takes a deque for one leaf, and would not wait
    return (time.perf_counter() - started) / calls
