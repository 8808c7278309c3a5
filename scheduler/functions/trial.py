"""Tries one call of a function with and without tuned kernels: compiles, compares, times, and keeps one version."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.core import safe_text
from scheduler.core.errors import SchedulerError
from scheduler.core.quantities import seconds_text
from scheduler.dispatch.dispatch import Options
from scheduler.functions import agreement, in_turns, replacing
from scheduler.functions.arguments import Arguments
from scheduler.functions.in_turns import Seconds
from scheduler.functions.replacing import Lowered, Replaced
from search_spaces.configuration import comparisons

# Reasons to use XLA's version without timing.
SEVERAL_PROCESSES = (
    "each process of a job would decide for itself, and perhaps another way than the others: give them one plan "
    "(scheduler.plan)"
)
PLANNED = "the plan answers, in every process of the job alike"
NOTHING_REPLACED = "no kernel answers any of its products, nor its attention"


@dataclasses.dataclass(frozen=True)
class Decided:
    """The version used for some arguments, and the reason.

    Attributes:
      function, arguments: The function's name, and its arguments as text.
      compiled: The tuned version (`jax.stages.Compiled`) if it is kept; None if XLA's version is kept.
      reason: Why this version is kept.
      replaced: Kernels of the tuned version, whichever version was kept.
      left: Why other equations are left to XLA -> number of kinds of such equations.
      plain, tuned: Seconds per call, from the same rounds; None if nothing was timed.
    """

    function: str
    arguments: str
    compiled: Any
    reason: str
    replaced: tuple[Replaced, ...] = ()
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain: Seconds | None = None
    tuned: Seconds | None = None

    @property
    def kept(self) -> str:
        """The version used: "tuned" or "plain"."""
        return "plain" if self.compiled is None else "tuned"

    def __str__(self) -> str:
        lines = [f"{self.function}({self.arguments})", f"  {self.kept}: {self.reason}"]
        lines += [f"  by a kernel: {each}" for each in self.replaced]
        lines += [
            f"  by XLA: {reason}" + (f" ({kinds} kinds)" if kinds > 1 else "") for reason, kinds in self.left.items()
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A jitted function and the arguments to try it with.

    Attributes:
      seconds: Maximum time spent on timing. None keeps the tuned version without timing if its results agree.
    """

    function: str
    jitted: Any
    given: Arguments
    options: Mapping[str, Options]
    seconds: float | None

    @comparisons()
    def decide(self) -> Decided:
        """Decides which version to keep.

        Raises:
          CacheMiss: A matmul or attention call has no record and the policy is "error".
          SchedulerError: The call is part of a trace.
          Exception: Any error raised while tracing the function.
        """
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise SchedulerError("an optimized function was called inside a traced one: optimize the outer function")
        traced = self.jitted.trace(*self.given.args, **self.given.kwargs)
        several = jax.process_count() > 1
        if several and any(options.plan is None for options in self.options.values()):
            return self._decided(SEVERAL_PROCESSES)
        if effects := getattr(traced.jaxpr, "effects", ()):
            kinds = ", ".join(sorted({type(effect).__name__ for effect in effects}))
            return self._decided(
                f"it has side effects ({kinds}), and trying it both ways would have them several times"
            )
        try:
            lowered = replacing.lower(traced, self.options)
            if not lowered.replaced:
                return self._decided(NOTHING_REPLACED, lowered)
            if several:
                return self._decided(PLANNED, lowered, lowered.lowered.compile())
            return self._tried(lowered, [leaf.donated for leaf in jax.tree.leaves(traced.args_info)])
        except SchedulerError:
            raise
        except Exception as error:  # falls back to XLA's version, which raises any error of its own
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return self._doubted(f"trying the tuned version failed: {what}")

    def _tried(self, lowered: Lowered, donated: Sequence[bool]) -> Decided:
        compiled = lowered.lowered.compile()

        def plain() -> Any:
            return self._plain(self.given.copied(donated))

        def tuned() -> Any:
            return self.given.copied(donated).call(compiled)

        def sensitivity() -> Any:
            return self._plain(self.given.changed(agreement.rounded_differently).copied(donated))

        expected = jax.block_until_ready(plain())
        if wrong := agreement.disagreement(
            expected, tuned(), agreement.rounding(each.problem for each in lowered.replaced), sensitivity
        ):
            return self._doubted(f"the tuned version computed something else: {wrong}", lowered)
        del expected
        if self.seconds is None:
            return self._decided("kept without timing, as asked", lowered, compiled)
        runs = {"plain": plain, "tuned": tuned}
        times = in_turns.compare(runs, seconds=self.seconds, devices=self.given.devices())
        reason = _compared(times["plain"], times["tuned"])
        kept = compiled if in_turns.faster(times["tuned"], times["plain"]) else None
        return self._decided(reason, lowered, kept, **times)

    def _plain(self, given: Arguments) -> Any:
        return self.jitted(*given.args, **given.kwargs)

    def _decided(self, reason: str, lowered: Lowered | None = None, compiled: Any = None, **times: Seconds) -> Decided:
        replaced, left = (lowered.replaced, lowered.left) if lowered else ((), {})
        return Decided(self.function, self.given.described(), compiled, reason, replaced, left, **times)

    def _doubted(self, reason: str, lowered: Lowered | None = None) -> Decided:
        safe_text.warn(f"{self.function}: XLA's version answers, for {reason}")
        return self._decided(reason, lowered)


def _compared(plain: Seconds, tuned: Seconds) -> str:
    ahead = in_turns.margin(tuned, plain)
    between = f"{1 + ahead.low:.3f} and {1 + ahead.high:.3f}" if math.isfinite(ahead.low) else "anything"
    return (
        f"tuned takes {seconds_text(tuned.median_s)} and XLA's version {seconds_text(plain.median_s)}; "
        f"round by round {1 + ahead.middle:.3f} times as long (between {between} in {plain.rounds} rounds)"
    )
