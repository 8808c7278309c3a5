"""A whole function under plans: compiled, compared, timed in turns; which answers help it, and which do not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from scheduler.core.plan import Plan
from scheduler.dispatch import planned
from scheduler.functions import agreement, in_turns
from scheduler.functions.in_turns import Seconds
from scheduler.functions.pure import pure_call
from scheduler.search.final_comparison import FEWEST_ROUNDS, Margin

Run = functools.partial[Any]  # of a compiled function, and its arrays
# Each is compiled, and takes part in every round: those without an answer, and those with one that ties alone.
MOST_VARIANTS, MOST_ADDED = 12, 4
# Rounds of the leave-one-out comparison: intervals of single answers are to be narrow.
ROUNDS = 12
SECONDS_OF_VARIANT = 4.0


class Whole:
    """A function and its arguments, to be compiled under one plan after the other.

    Arrays are its inputs; whatever else is among the arguments is part of the compiled program. Modules and other state
    that it updates stay as they are: the updates are results. What it donates is copied instead, so that it can be
    called again.

    Attributes:
      call, arrays: the pure function of its inputs, and these.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        pure = pure_call(fn, args)
        self.call, self.arrays = pure.function, pure.arrays

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        found = {device for x in self.arrays if isinstance(x, jax.Array) for device in x.devices()}
        return tuple(sorted(found, key=lambda device: device.id))

    def under(self, plan: Plan) -> Run:
        """The function as `plan` answers its problems, compiled; raises what JAX, a kernel or the function raises."""

        with planned.plan(planned.InForce(plan)):
            compiled = jax.jit(self.call).lower(*self.arrays).compile()
        return functools.partial(compiled, *self.arrays)

    def time(self, runs: Mapping[Any, Run], *, at_least_rounds: int = FEWEST_ROUNDS) -> dict[Any, Seconds]:
        """Seconds of each, in turns on the devices of the arguments."""
        seconds = SECONDS_OF_VARIANT * len(runs)
        return in_turns.compare(runs, seconds=seconds, at_least_rounds=at_least_rounds, devices=self.devices)


def groups(gains_s: Mapping[int, float], step_s: float, resolution: float) -> list[tuple[int, ...]]:
    """Which answers are decided together: each alone, but for those that save little, which no clock would tell.

    Args:
      gains_s: what each saves in a call of the function, by its time alone.
      step_s: seconds of such a call.
      resolution: the least share of it that is looked at alone.
    """
    ordered = sorted(gains_s, key=lambda i: -gains_s[i])
    single = [i for i in ordered if gains_s[i] >= resolution * step_s][: MOST_VARIANTS - 3]
    rest = tuple(ordered[len(single) :])
    return [(i,) for i in single] + ([rest] if rest else [])


@dataclasses.dataclass(frozen=True)
class Ablated:
    """What the whole function says of a group: by which share it is slower without, and between what that lies.

    Attributes:
      added: the group is one answer that is not faster alone: it helps beyond doubt, or not at all.
    """

    group: tuple[int, ...]
    margin: Margin
    added: bool = False

    @property
    def helps(self) -> bool:
        return (self.margin.low if self.added else self.margin.middle) > 0

    def __str__(self) -> str:
        middle, low, high = self.margin.middle, self.margin.low, self.margin.high
        others = f" and {len(self.group) - 1} others" if len(self.group) > 1 else ""
        how = "slower" if middle > 0 else "faster"
        return f"the function is {abs(middle):.2%} {how} without it{others} ({low:+.2%} to {high:+.2%})"


def ablate(
    whole: Whole,
    everything: Run,
    xla: Run,
    of: Sequence[tuple[int, ...]],
    without: Callable[[tuple[int, ...]], Plan],
    added: Mapping[int, Run],
) -> list[Ablated]:
    """Each group by leaving it out: the function with all answers, beside the one in which XLA answers that group.

    Args:
      everything, xla: the function with all answers, and with none of them.
      without: the plan in which these are XLA's, and the others are not.
      added: likewise the function with all answers and one more, by that one.
    """
    others = [xla] if len(of) == 1 else [whole.under(without(group)) for group in of]
    runs = (
        {"": everything} | {f"-{i}": run for i, run in enumerate(others)} | {f"+{i}": run for i, run in added.items()}
    )
    times = whole.time(runs, at_least_rounds=ROUNDS)
    found = [Ablated(group, in_turns.margin(times[""], times[f"-{i}"])) for i, group in enumerate(of)]
    return found + [Ablated((i,), in_turns.margin(times[f"+{i}"], times[""]), added=True) for i in added]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The function by XLA's answers, and what it computes.

    Attributes:
      rounding: of the problems in it, as `agreement.rounding`.
    """

    run: Run
    expected: Any
    rounding: float

    def disagreement(self, actual: Any, whole: Whole) -> str | None:
        """Where other results differ from these by more than rounding, in words."""

        def sensitivity() -> Any:
            arrays = (agreement.rounded_differently(x, number) for number, x in enumerate(whole.arrays))
            return self.run.func(*arrays)

        return agreement.disagreement(self.expected, actual, self.rounding, sensitivity)


def failure(whole: Whole, plan: Plan, reference: Reference) -> tuple[Run | None, str]:
    """The function under `plan`; or None, and why that cannot be used: it does not run, or computes something else."""
    try:
        run = whole.under(plan)
        actual = jax.block_until_ready(run())
    except Exception as error:  # whatever a kernel, a compiler or a device raises: XLA's version has run before
        said = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {said}"
    wrong = reference.disagreement(actual, whole)
    return (run, "") if wrong is None else (None, wrong)
