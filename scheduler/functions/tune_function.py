"""Makes a plan for a whole function, by the time of the whole function: `tune_function()`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from scheduler.core import arguments
from scheduler.core import hardware as chips
from scheduler.core.arguments import named_backends
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import Hardware
from scheduler.core.interrupts import interruptible
from scheduler.core.plan import Figure, Plan, Variant
from scheduler.core.progress import Progress
from scheduler.dispatch import calls, dispatch
from scheduler.functions import interleaved
from scheduler.functions.ablation import (
    MOST_ADDED,
    MOST_GROUPS,
    AblationResult,
    CompiledFunction,
    Reference,
    Run,
    ablate,
    failure,
    groups,
)
from scheduler.functions.answers import MIN_GAIN, Known, Search, known
from scheduler.functions.equations import ProblemCount
from scheduler.functions.interleaved import Seconds
from scheduler.functions.problems import optimized_call, problems
from scheduler.measure.runner import environment
from scheduler.search.task import BUDGET
from scheduler.store.store import Store, require_store
from search_spaces.configuration import comparisons
from tile_scheduler import __version__

logger = logging.getLogger("scheduler")


@interruptible()
@comparisons()
def tune_function(
    fn: Callable[..., Any],
    *args: Any,
    minutes: float = 10.0,
    budget: int = BUDGET,
    backends: str | Sequence[str] | None = None,
    store: Store | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> Plan:
    """Returns a plan of the schedules that make ``fn(*args)`` as a whole faster than XLA alone.

    "XLA" means the fastest library for each problem. For attention this may be a vendor's library, cuDNN.

    Problems without a valid record are tuned first, in descending order of count times expected gain. `fn` is then
    compiled with all tuned kernels, with XLA alone, and once for each problem with that problem left to XLA (problems
    with small gains are grouped). These versions are timed by wall time in interleaved rounds. A kernel that does not
    speed up the function is dropped from the plan. A kernel that only ties with XLA when timed alone is added in the
    same rounds, and kept if the function is faster with it at 99 % confidence. Finally the plan is timed against XLA
    once more. If the plan is not faster at 99 % confidence, every problem is left to XLA, and the plan's `verdict`
    gives the reason. The results of each version are compared with XLA's: a kernel that fails inside `fn`, or changes
    its results, is replaced by XLA, with the reason.

    `fn` is called many times. Its arguments stay unchanged, even those it donates and modules it updates.

    Args:
      fn: A function that makes tuned calls: plain, or jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. Pass
        keyword arguments with `functools.partial`.
      args: Arrays to compute with. Other arguments are compile-time constants.
      minutes: Time limit for searches. The comparison takes less than a minute for most functions.
      budget: Trials of each search.
      backends: Backends allowed besides XLA, as in `tuned_matmul`. None allows all.
      store: Where records are read and written. None is the user's own store, with the shipped store as a fallback.
      progress: Called after each trial of a search, with its problem as text.

    Raises:
      TypeError, ValueError: `minutes` or `budget` is not a valid number, a backend is unknown, or an argument is a
        shape instead of an array.
      SchedulerError: `fn` is optimized or makes no tuned call (the message says what to do), or `tune_function` is
        called under a trace or in a job of several processes.
    """
    _require(args, minutes, budget, store)
    if optimized_call(fn, args, {}) is not None:
        raise SchedulerError(
            f"{_name(fn)} is optimized, and compares whole versions itself instead of using a plan: tune its problems, "
            'scheduler.problems(f, ...).save("job.toml") and tile-scheduler tune --job job.toml'
        )
    whole = CompiledFunction(fn, args)
    found = problems(whole.call, *whole.arrays)
    if not found.tuned:
        raise SchedulerError(
            f"{_name(fn)} makes no tuned call, so there is nothing to plan: call tuned functions in it, or "
            f"use scheduler.optimize({_name(fn)}) instead"
        )
    for row in found.tuned:
        named_backends(row.operation, backends)
    return _FunctionTuning(_name(fn), whole, found.tuned, chips.detect()).run(
        backends, Search(dispatch.user_cache() if store is None else store, 60 * minutes, budget, progress)
    )


def _require(args: Sequence[Any], minutes: float, budget: int, store: Any) -> None:
    if jax.process_count() > 1:
        raise SchedulerError(
            f"tune_function in a job of {jax.process_count()} processes, which could decide differently: make the plan "
            "in one process, on one process's share of the work, and give it to all with scheduler.plan"
        )
    if calls.target.value:
        raise SchedulerError(f"tune_function measures on this chip: leave scheduler.target({calls.target.value!r})")
    arguments.checked_number("minutes", minutes)
    arguments.checked_integer("budget", budget)
    require_store(store)
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.core.Tracer):
            raise SchedulerError(
                "tune_function is called under a trace (jit, grad, vmap): call it outside, with arrays"
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"tune_function times the function and needs arrays, found the shape {leaf}")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or _name(getattr(fn, "func", type(fn)))


class _FunctionTuning:
    """The state of `tune_function` for one function."""

    def __init__(self, name: str, whole: CompiledFunction, rows: Sequence[ProblemCount], chip: Hardware) -> None:
        self.name, self.whole, self.rows, self.chip = name, whole, rows, chip
        self.known: list[Known] = [Known(row) for row in rows]
        self.reasons: dict[int, str] = {}

    def run(self, backends: str | Sequence[str] | None, search: Search) -> Plan:
        self.known = known(
            self.rows,
            self.chip,
            lambda operation: named_backends(operation, backends),
            search,
            lambda: self.whole.time({"xla": self.whole.under(self.plan(()))})["xla"].median_s,
        )
        calls.forget()
        dispatch.reload()  # so that other calls use the new records
        self.reasons = {i: each.reason for i, each in enumerate(self.known) if each.best is None}
        xla = self.whole.under(self.plan(()))
        noisy = self.whole.noisy(self.plan(()), (row.problem for row in self.rows))
        reference = Reference(xla, jax.block_until_ready(xla()), noisy)
        candidates = [i for i in range(len(self.known)) if i not in self.reasons]
        candidates, everything = self._usable(candidates, reference)
        step_s = self.whole.time({"xla": xla}, at_least_rounds=1)["xla"].median_s
        added = self._tied(candidates, step_s, reference)
        if everything is None and not added:
            left = sum(each.library is None for each in self.known)
            untuned = f"; {left} of {len(self.known)} problems are not tuned" if left else ""
            return self._xla_plan(xla, f"XLA answers everything: nothing else is faster alone and can be used{untuned}")
        kept, ablated = self._beneficial(candidates, everything or xla, added, xla, step_s)
        self.reasons |= {i: f"alone it is faster, but {ablated[i]}" for i in candidates if i not in kept}
        no_doubt = "alone it is about as fast, and the function is not faster with it beyond doubt"
        self.reasons |= {i: f"{no_doubt}: {ablated[i]}" for i in added if i not in kept}
        runs: dict[Variant, Run] = {"xla": xla} if everything is None else {"xla": xla, "all": everything}
        return self._fastest_plan(candidates, kept, reference, runs, ablated)

    def plan(self, kernels: Collection[int], reasons: Mapping[int, str] | None = None) -> Plan:
        """Returns the plan that uses kernels for the problems in `kernels`, and XLA for the others."""
        kernel_reasons = reasons or {}
        answers = [
            each.planned(kernel=i in kernels, reason=kernel_reasons.get(i, self.reasons.get(i, "")))
            for i, each in enumerate(self.known)
        ]
        return Plan(self.name, self.chip.id, self.chip.kind, environment(""), __version__, tuple(answers))

    def _usable(self, candidates: list[int], reference: Reference) -> tuple[list[int], Run | None]:
        """Returns the candidates that work inside the function, and the function with all of them (None if there are
        none).
        """
        if not candidates:
            return [], None
        everything, why = failure(self.whole.under, self.plan(candidates), reference)
        if everything is not None:
            return candidates, everything
        logger.info("with all answers: %s; each is tried alone", why)
        usable = []
        for i in candidates:
            run, reason = failure(self.whole.under, self.plan([i]), reference)
            if run is None:
                self.reasons[i] = f"it cannot be used in the function: {reason}"
            else:
                usable.append(i)
        everything, why = failure(self.whole.under, self.plan(usable), reference) if usable else (None, "")
        if everything is None:
            self.reasons |= dict.fromkeys(usable, f"together with the others it cannot be used in the function: {why}")
            return [], None
        return usable, everything

    def _tied(self, candidates: Sequence[int], step_s: float, reference: Reference) -> dict[int, Run]:
        """Returns the function with all candidates plus one tied kernel, for the tied problems that take longest."""
        tied = [i for i, each in enumerate(self.known) if each.contender and each.library_s >= MIN_GAIN * step_s]
        tied.sort(key=lambda i: -self.known[i].library_s)
        runs = {}
        for i in tied[:MOST_ADDED]:
            run, reason = failure(self.whole.under, self.plan([*candidates, i]), reference)
            if run is None:
                self.reasons[i] = f"alone it is about as fast, but it cannot be used in the function: {reason}"
            else:
                runs[i] = run
        return runs

    def _beneficial(
        self, candidates: Sequence[int], everything: Run, added: Mapping[int, Run], xla: Run, step_s: float
    ) -> tuple[list[int], dict[int, AblationResult]]:
        """Returns the candidates that speed up the function, and the comparison of each."""
        gains_s = {i: self.known[i].gain_s for i in candidates}
        tested = groups(gains_s, MOST_GROUPS, MIN_GAIN * step_s) if candidates else []

        def without(group: tuple[int, ...]) -> Plan:
            return self.plan([i for i in candidates if i not in group])

        ablated = ablate(self.whole, everything, xla, tested, without, added)
        by_kernel = {i: each for each in ablated for i in each.group}
        return [i for i in (*candidates, *added) if by_kernel[i].helps], by_kernel

    def _fastest_plan(
        self,
        candidates: list[int],
        kept: list[int],
        reference: Reference,
        runs: dict[Variant, Run],
        ablated: Mapping[int, AblationResult],
    ) -> Plan:
        """Returns the fastest plan: the kept kernels or all candidates; XLA alone if neither is faster at 99 %
        confidence.
        """
        if kept and kept != candidates:
            run, why = failure(self.whole.under, self.plan(kept), reference)
            if run is None and (faster_alone := [i for i in kept if i in candidates]) != kept:
                # Tied kernels were only tried one at a time with the candidates.
                refused = f"alone it is about as fast, but together with others it cannot be used: {why}"
                self.reasons |= dict.fromkeys(set(kept) - set(faster_alone), refused)
                return self._fastest_plan(candidates, faster_alone, reference, runs, ablated)
            if run is None:
                return self._xla_plan(runs["xla"], f"XLA answers everything: the plan cannot be used: {why}")
            runs = {**runs, "plan": run}
        if len(runs) == 1:
            return self._xla_plan(runs["xla"], "XLA answers everything: nothing else makes the function faster")
        times = self.whole.time(runs)
        best: Variant = min((v for v in runs if v != "xla"), key=lambda v: times[v].median_s)
        if "plan" in runs and best == "all" and not interleaved.is_faster(times["all"], times["plan"]):
            best = "plan"
        margin = interleaved.margin_of(times[best], times["xla"])
        between = f"{1 + margin.middle:.3f}x as fast as XLA alone ({1 + margin.low:.3f} to {1 + margin.high:.3f})"
        if not margin.low > 0:
            for i in kept:
                self.reasons[i] = "alone it is no slower, but the function is not faster beyond doubt"
            figures = {v: times[v] for v in runs if v != "plan"}
            return self._with_figures(
                self.plan(()), figures, f"XLA answers everything: the function would be {between}"
            )
        chosen = candidates if best == "all" else kept
        kernel_reasons = {i: f"{ablated[i]}" for i in chosen}
        return self._with_figures(self.plan(chosen, kernel_reasons), {**times, "plan": times[best]}, between)

    def _xla_plan(self, xla: Run, verdict: str) -> Plan:
        return self._with_figures(self.plan(()), self.whole.time({"xla": xla}), verdict)

    def _with_figures(self, plan: Plan, times: Mapping[Any, Seconds], verdict: str) -> Plan:
        order: tuple[Variant, ...] = ("xla", "all", "plan")
        figures = tuple(
            Figure(variant, times[variant].median_s, times[variant].spread_s, times[variant].rounds)
            for variant in order
            if variant in times
        )
        return dataclasses.replace(plan, figures=figures, verdict=verdict)
