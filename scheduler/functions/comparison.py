"""Compares functions and parts of them: whether two runs agree up to rounding, and which version is faster."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core.hardware import CPU
from scheduler.core.records import TIE
from scheduler.measure.gpu import Gpu
from scheduler.measure.verification import SENSITIVITY, rounded_differently
from scheduler.search.final_comparison import FEWEST_ROUNDS, Margin, median_interval
from search_spaces import recognise
from search_spaces.checking import VALUE_KINDS, with_special_values
from search_spaces.configuration import measurements
from search_spaces.problem import Problem
from search_spaces.recognise import Node, Region, Value

T = TypeVar("T")

# ------------------------------------------------------------------------------
# Checks whether two runs of a function agree up to rounding.

# Tolerances in units in the last place (ULP): root mean square, and largest error relative to the largest element.
AVERAGE, WORST = 8.0, 64.0
# Relative rounding of matmuls whose arithmetic is coarser than their operands, and of long float32 sums.
PRODUCTS = {"tf32": 2.0**-10, "bf16_3x": 2.0**-16}
FINEST = 2.0**-20


def rounding(problems: Iterable[Problem]) -> float:
    """Returns the coarsest relative rounding of the operands, matmuls and results of these problems."""
    found = [FINEST]
    for problem in problems:
        dtypes = {s.dtype for s in (*problem.operands(), *problem.results())}
        found += [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        found.append(PRODUCTS.get(problem.arithmetic, 0.0))
    return max(found)


def disagreement(expected: Any, actual: Any, eps: float, sensitivity: Callable[[], Any]) -> str | None:
    """Describes where `actual` differs from `expected` by more than rounding; returns None if it does not.

    A result may differ by `AVERAGE` units of its own last place, or of `eps`, in the root mean square, and by `WORST`
    units in one element. The first is relative to the root mean square of the result, the second to its largest
    element. Elements that are not finite must match. A result may consist of rounding errors alone, such as a gradient
    that is zero, or the index of the larger of two equal numbers. It may therefore differ by `SENSITIVITY` times its
    change when the inputs are rounded differently.

    Args:
      eps: Relative rounding of the computation.
      sensitivity: Computes the results for inputs rounded differently. Called only if a result exceeds the tolerances.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True))
    off = [_off(right, got) for right, got in pairs]
    wrong = [i for i, (right, _) in enumerate(pairs) if not _within(off[i], _allowed(right, eps))]
    if not wrong:
        return None
    moved = jax.tree.leaves(sensitivity())
    for i in wrong:
        right, _ = pairs[i]
        by_rounding = SENSITIVITY * _off(right, moved[i])
        if not _within(off[i], np.maximum(_allowed(right, eps), by_rounding)):
            return _difference_text(names[i], right, off[i])
    return None


def _within(off: Any, allowed: Any) -> bool:
    return bool(np.all(off <= allowed))  # False for NaN


def _allowed(right: Any, eps: float) -> Any:
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        return np.zeros(3)
    unit = max(eps, float(jnp.finfo(right.dtype).eps))
    return np.array([AVERAGE * unit, WORST * unit, 0.0])


@measurements()
def _off(right: Any, got: Any) -> Any:
    """Returns the relative RMS error, the relative largest error, and the number of mismatched non-finite elements."""
    if not right.size or right.dtype == jax.dtypes.float0:  # float0: the derivative with respect to an integer
        return np.zeros(3)
    if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
        right, got = jax.random.key_data(right), jax.random.key_data(got)
    compare = _floats_off if jnp.issubdtype(right.dtype, jnp.inexact) else _others_off
    return np.asarray(jax.device_get(compare(right, got)), np.float64)


@jax.jit
def _others_off(right: jax.Array, got: jax.Array) -> jax.Array:
    share = (right != got).mean(dtype=jnp.float32)
    return jnp.array([share, share, 0.0])


@jax.jit
def _floats_off(right: jax.Array, got: jax.Array) -> jax.Array:
    wide = functools.partial(jnp.asarray, dtype=jnp.promote_types(right.dtype, jnp.float32))
    right, got = wide(right), wide(got)
    finite = jnp.isfinite(right)
    same = (right == got) | (jnp.isnan(right) & jnp.isnan(got))
    unlike = jnp.where(finite, ~jnp.isfinite(got), ~same).sum()
    size = jnp.where(finite, jnp.abs(right), 0.0)
    # Dividing by the largest element keeps squares from overflowing or underflowing.
    largest = size.max()
    scale = jnp.where(largest > 0, largest, 1.0)
    error = jnp.where(finite & jnp.isfinite(got), jnp.abs(right - got), 0.0) / scale
    mean = jnp.sqrt((error**2).mean()) / jnp.where(largest > 0, jnp.sqrt(((size / scale) ** 2).mean()), 1.0)
    return jnp.array([mean, error.max(), unlike.astype(mean.dtype)])


def _difference_text(name: str, right: Any, off: Any) -> str:
    result = f"result{name} {right.dtype}{list(right.shape)}"
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        return f"{off[0]:.2%} of the elements of {result} differ"
    if off[2]:
        return f"{off[2]:.0f} elements of {result} are finite in one of them alone"
    return f"{result} differs by {off[0]:.2g} of its size in the mean square and by {off[1]:.2g} of its largest element"


# ------------------------------------------------------------------------------
# Compares a region with the tuned calls that replace it: two random draws, and special operands.

# (operation, problem, params, operands) -> results of a tuned call.
TunedCall = Callable[..., Any]

# Random operands, with their seeds, and operands whose squares overflow or underflow float32 and bfloat16.
DRAWS = {"random": 0, "other random": 1}
SCALES = {"huge": 2.0**80, "minute": 2.0**-80}

_checked: dict[Any, str | None] = {}


def region_disagreement(
    region: Region, calls: Sequence[TunedCall], key: Any = None, differentiable: Sequence[TunedCall] = ()
) -> str | None:
    """Describes how tuned calls differ from the equations of a region by more than rounding; None if they do not.

    Both are computed once for each kind of region on this device, for inputs of the same shapes.

    Args:
      key: what else the calls depend on, such as their schedules.
      differentiable: calls whose gradients are compared with those of the equations, too. Other schedules than those of
        `calls` may run them: this compares the meaning of gradients.
    """
    nodes = recognise.equations_between((*region.inputs, *region.results), region.roots)
    text = recognise.program_text(nodes, region.roots, region.results)
    kind = text, tuple(stage.problem for stage in region.stages), key, bool(differentiable)
    if kind not in _checked:
        found = _RegionComparison(region, nodes)
        _checked[kind] = _outside_of_traces(lambda: found.disagreement(calls) or found.of_gradients(differentiable))
    return _checked[kind]


def _outside_of_traces(run: Callable[[], T]) -> T:
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return run()
    with concurrent.futures.ThreadPoolExecutor(1) as outside:  # a trace belongs to its thread
        return outside.submit(run).result()


class _RegionComparison:
    """The equations of a region as functions of its roots.

    Args:
      nodes: the equations from the roots to the inputs and results, in order.
    """

    def __init__(self, region: Region, nodes: Sequence[Node]) -> None:
        self._region, self._nodes = region, nodes
        self._rounding = rounding(stage.problem for stage in region.stages)

    def _evaluated(self, roots: Sequence[Any], results: Sequence[Value]) -> list[Any]:
        return recognise.evaluate(self._nodes, dict(zip(map(id, self._region.roots), roots, strict=True)), results)

    def _plain(self, *roots: Any) -> list[Any]:
        return self._evaluated(roots, self._region.results)

    def _tuned(self, calls: Sequence[TunedCall]) -> Callable[..., list[Any]]:
        def run(*roots: Any) -> list[Any]:
            values = iter(self._evaluated(roots, self._region.inputs))
            handed_on, results = None, list[Any]()
            for stage, call in zip(self._region.stages, calls, strict=True):
                found, handed_on = stage.run(call, handed_on, *(next(values) for _ in stage.inputs))
                results += found
            return results

        return run

    def disagreement(self, calls: Sequence[TunedCall]) -> str | None:
        return self._compared(self._plain, self._tuned(calls), (*DRAWS, *self._special()))

    def of_gradients(self, calls: Sequence[TunedCall]) -> str | None:
        if not calls:
            return None
        plain, tuned = _gradients_of(self._plain), _gradients_of(self._tuned(calls))
        try:
            wrong = self._compared(plain, tuned, tuple(DRAWS))
        except jax.errors.JaxRuntimeError:  # the gradients of the equations need more memory than the values
            return None
        return None if wrong is None else f"gradients: {wrong}"

    def _compared(self, plain: Callable[..., Any], tuned: Callable[..., Any], kinds: Sequence[str]) -> str | None:
        jitted, run = jax.jit(plain), jax.jit(tuned)
        for kind in kinds:
            roots = self._operands(kind)

            def moved(roots: Any = roots) -> Any:
                return jitted(*(rounded_differently(x, i) for i, x in enumerate(roots)))

            actual = run(*roots)
            wrong = disagreement(jitted(*roots), actual, self._rounding, moved)
            # Of 0 times infinity XLA makes 0 where it fuses a mask, but not if equations run one by one.
            if wrong and (kind in DRAWS or disagreement(plain(*roots), actual, self._rounding, moved)):
                return f"{wrong} ({kind} operands)"
        return None

    def _operands(self, kind: str) -> Sequence[jax.Array]:
        seed = DRAWS.get(kind, 0)
        drawn = [_normal(x, 10 * seed + i) for i, x in enumerate(self._region.roots)]
        if kind in SCALES:
            return [_scaled(x, SCALES[kind]) for x in drawn]
        return drawn if kind in DRAWS else with_special_values(drawn, kind, integers=False)

    def _special(self) -> Sequence[str]:
        """Returns the kinds of special operands on which the results must agree.

        A kernel may compute float16 in float32, and then overflows later. Where an operation excludes infinities, as
        attention does, a softmax of large logits would magnify their rounding.
        """
        dtypes = {x.dtype for x in (*self._region.roots, *(x for node in self._nodes for x in node.results))}
        if any(jnp.issubdtype(x, jnp.floating) and float(jnp.finfo(x).max) < max(SCALES.values()) for x in dtypes):
            return ()
        common = set.intersection(*(set(stage.problem.special()) for stage in self._region.stages))
        infinite = "inf" in common
        return [kind for kind in VALUE_KINDS if kind in common and (infinite or kind != "large")] + [*SCALES] * infinite


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x * jnp.asarray(factor, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _gradients_of(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns the gradients of results by floating-point arguments, for random cotangents."""

    def gradients(*arrays: Any) -> list[Any]:
        results, back = jax.vjp(run, *arrays)
        found = back([_normal(x, 100 + i) for i, x in enumerate(results)])
        return [x for x in found if x.dtype != jax.dtypes.float0]

    return gradients


def _normal(x: Any, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), x.shape, jnp.float32).astype(x.dtype)


# ------------------------------------------------------------------------------
# Times whole compiled functions by wall time, in interleaved rounds on a busy device.

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
