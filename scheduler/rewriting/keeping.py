"""Finds the kernels that make a function faster: times the function without each group of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from scheduler.rewriting import comparison, decided, interleaved
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Lowered, Replaced
from scheduler.rewriting.rewrite import OTHER_CHANGES, Refuses
from scheduler.search.runoff import Margin

Run = Callable[[], Any]  # a compiled function with its arrays
# Maximum number of groups, each of which costs a compilation.
MOST_GROUPS = 4
# Rounds of the comparison without each group. Many rounds keep the confidence interval of each group narrow.
ROUNDS = 12
# Groups are timed if all kernels together gain less than this share of the predicted gain.
AS_PREDICTED = 0.9
# Why replacements are not made, as reports have it.
DROPPED = "the function is not slower without it"
WITHIN_DROPPED = "it computes a part of equations that are left to XLA"
# Labels of versions in rounds of timing.
PLAIN, ALL, REST = "plain", "tuned", "rest"


@dataclasses.dataclass(frozen=True)
class Version:
    """A compiled version of a function with kernels. `run` calls it with copies of the donated arguments."""

    lowered: Lowered
    compiled: Any
    run: Run

    @functools.cached_property
    def peak_bytes(self) -> int | None:
        return decided.peak_bytes(self.compiled)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The fastest version.

    Attributes:
      tuned, plain: Its seconds per call and those of the plain function, from the same rounds.
      groups: What was timed without a group of kernels, as text.
    """

    version: Version
    tuned: Seconds
    plain: Seconds
    groups: tuple[str, ...] = ()

    @property
    def is_faster(self) -> bool:
        return interleaved.is_faster(self.tuned, self.plain)


@dataclasses.dataclass(frozen=True)
class Group:
    """Kernels, or the changes without a kernel, that are left out together.

    Attributes:
      keys: What leaves them out (`lowering.lower_with_kernels`).
      texts: Each of them as text.
      xla_s: Seconds per call of the function that XLA takes for what they replace, by times alone; 0 if unknown.
    """

    keys: frozenset[str]
    texts: tuple[str, ...]
    xla_s: float

    def __str__(self) -> str:
        return "; ".join(self.texts)


def predicted_gain_s(replaced: Iterable[Replaced]) -> float:
    """Returns the seconds per call of a function that its kernels save by their times alone.

    A kernel counts the time of XLA minus its own, by the record or the model that selected it, as often as it runs. A
    kernel without such times counts nothing.
    """
    return sum(each.times * (each.alone.library_s - each.alone.kernel_s) for each in replaced if each.alone)


def gains_as_predicted(tuned: Seconds, plain: Seconds, replaced: Iterable[Replaced]) -> bool:
    """Returns whether the version with these kernels is faster, by at least `AS_PREDICTED` of the predicted gain."""
    gain_s = plain.median_s - tuned.median_s
    return interleaved.is_faster(tuned, plain) and gain_s >= AS_PREDICTED * predicted_gain_s(replaced)


def groups(lowered: Lowered) -> list[Group]:
    """Returns the groups to time: those for which XLA takes longest alone, and the rest as the last one.

    A kernel with its problem and schedule is a group, wherever it runs. Kernels of one region, such as attention and
    its backward pass, are one group. All changes without a kernel are another one.
    """
    kinds = list[Group]()
    for each in lowered.replaced:
        group = Group(frozenset(each.keys), (each.name,), each.times * each.alone.library_s if each.alone else 0.0)
        shared = [kind for kind in kinds if kind.keys & group.keys]
        kinds = [kind for kind in kinds if kind not in shared] + [_union([*shared, group])]
    if lowered.changes:
        kinds.append(Group(frozenset({OTHER_CHANGES}), lowered.changes, 0.0))
    kinds.sort(key=lambda kind: -kind.xla_s)
    single, rest = kinds[: MOST_GROUPS - 1], kinds[MOST_GROUPS - 1 :]
    return single + ([_union(rest)] if rest else [])


def _union(of: Sequence[Group]) -> Group:
    keys = frozenset(key for each in of for key in each.keys)
    return Group(keys, tuple(text for each in of for text in each.texts), sum(each.xla_s for each in of))


class Time(Protocol):
    """`interleaved.time_interleaved`, for the devices and the time limit of a trial."""

    def __call__(self, runs: Mapping[str, Run], *, at_least_rounds: int = ...) -> Mapping[str, Seconds]: ...


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What is needed to try versions of a function with fewer kernels.

    Attributes:
      plain: Calls the plain function.
      noisy: Computes the plain results with rounding noise, for a seed.
      lower: Lowers the function without what is refused. It compares and searches nothing.
      calling: Returns what calls a compiled version.
      step: Says what is waited for.
    """

    plain: Run
    noisy: Callable[[int], Any]
    lower: Callable[[Refuses], Lowered]
    calling: Callable[[Any], Run]
    time: Time
    step: Callable[[str], None]

    def fastest(self, everything: Version) -> Kept:
        """Returns the fastest version with kernels: `everything`, or one without groups of its kernels.

        Groups are timed only if `everything` gains less than predicted. A group is dropped if the function is faster
        without it at 99 % confidence, or if it ties and needs no less memory. At most `MOST_GROUPS` + 1 versions are
        compiled. The results of each are compared with those of the plain function.
        """
        self.step("timing both versions")
        times = self.time({PLAIN: self.plain, ALL: everything.run})
        tested = {f"without {group}": group for group in groups(everything.lowered)}
        if len(tested) < 2 or gains_as_predicted(times[ALL], times[PLAIN], everything.lowered.replaced):
            return Kept(everything, times[ALL], times[PLAIN])
        self.step("compiling without each group of kernels")
        versions, verdicts = self._usable(everything, {label: [group] for label, group in tested.items()})
        self.step("timing without each group of kernels")
        versions = {ALL: everything, **versions}
        times = self._times(versions, at_least_rounds=ROUNDS)
        dropped = list[str]()
        for label in (label for label in tested if label in versions):
            margin = interleaved.margin_of(times[ALL], times[label])
            sizes = everything.peak_bytes, versions[label].peak_bytes
            verdicts[label] = f"{_without_it(margin)}{decided.share_text(*sizes, 'memory')}"
            is_tie = margin.low <= 0 <= margin.high
            if margin.high < 0 or (is_tie and decided.share_percent(*sizes) <= 0):
                dropped.append(label)
        preferred = {0: ALL, 1: "".join(dropped)}.get(len(dropped), REST)
        if 1 < len(dropped) < len(tested):
            self.step("compiling without the dropped groups")
            rest, _ = self._usable(everything, {REST: [tested[label] for label in dropped]})
            if rest:
                self.step("timing without the dropped groups")
                best = min(versions, key=lambda label: times[label].median_s)
                versions = {best: versions[best], **rest}
                times = self._times(versions)
        chosen = _chosen(times, versions, preferred)
        kept = Kept(versions[chosen], times[chosen], times[PLAIN])
        refused = kept.version.lowered.refused
        texts = []
        for label, group in tested.items():
            used = kept.is_faster and refused.keys().isdisjoint(group.keys)
            texts.append(f"{group}: {verdicts[label]}, {'kept' if used else 'left to XLA'}")
        return dataclasses.replace(kept, groups=tuple(texts))

    def _times(self, versions: Mapping[str, Version], **how: int) -> Mapping[str, Seconds]:
        return self.time({PLAIN: self.plain, **{label: version.run for label, version in versions.items()}}, **how)

    def _usable(
        self, everything: Version, without: Mapping[str, Sequence[Group]]
    ) -> tuple[dict[str, Version], dict[str, str]]:
        """Compiles a version without these groups for each label.

        Returns:
          The versions that can be used, and the reasons why others cannot.
        """
        lowered, compiled = dict[str, Lowered](), dict[str, concurrent.futures.Future[Any]]()
        with concurrent.futures.ThreadPoolExecutor() as beside:  # XLA compiles without the interpreter's lock
            for label, left_out in without.items():
                lowered[label] = self._without(everything, left_out)
                compiled[label] = beside.submit(lowered[label].lowered.compile)
        expected = jax.block_until_ready(self.plain())
        versions, reasons = dict[str, Version](), dict[str, str]()
        for label, future in compiled.items():
            try:
                version = Version(lowered[label], future.result(), self.calling(future.result()))
                why = comparison.disagreement(expected, jax.block_until_ready(version.run()), self.noisy)
            except Exception as error:  # any error of a kernel, compiler or device: XLA's version already ran
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if why is None:
                versions[label] = version
            else:
                reasons[label] = f"the function cannot be used without it: {why}"
        return versions, reasons

    def _without(self, everything: Version, left_out: Iterable[Group]) -> Lowered:
        """Lowers the function without groups, and without kernels that only what they replace would make possible."""
        known = {OTHER_CHANGES, *(key for each in everything.lowered.replaced for key in each.keys)}
        refused = {**everything.lowered.refused, **{key: DROPPED for group in left_out for key in group.keys}}
        return self.lower(lambda key: refused.get(key) or (None if key in known else WITHIN_DROPPED))


def _without_it(margin: Margin) -> str:
    """Returns by what share the function is slower without a group of kernels, with the confidence interval."""
    direction, sign = ("slower", 1) if margin.middle > 0 else ("faster", -1)
    low, high = sorted((100 * sign * margin.low, 100 * sign * margin.high))
    share = 100 * abs(margin.middle)
    return f"the function is {share:.1f} % {direction} without it (99 % confidence: {low:.1f} to {high:.1f} %)"


def _chosen(times: Mapping[str, Seconds], versions: Iterable[str], preferred: str) -> str:
    """Returns the fastest version that is faster than the plain function, or the fastest if none is.

    The preferred one is returned if it is faster than the plain function, and no other one is faster than it.
    """
    faster = [label for label in versions if interleaved.is_faster(times[label], times[PLAIN])]
    fastest = min(faster or versions, key=lambda label: times[label].median_s)
    if preferred in faster and not interleaved.is_faster(times[fastest], times[preferred]):
        return preferred
    return fastest
