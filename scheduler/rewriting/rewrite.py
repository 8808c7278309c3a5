"""Replaces attention in a function by tuned calls before the function is differentiated: `rewrite()`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from scheduler.core import hardware
from scheduler.core.arguments import backends_of_each
from scheduler.core.errors import NoCandidate
from scheduler.dispatch import calls, dispatch, planned
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import Decision, OnMiss, Options
from scheduler.dispatch.primitive import tuned_call
from scheduler.rewriting import comparison
from scheduler.rewriting.comparison import TunedCall
from scheduler.rewriting.in_place import InPlace
from scheduler.rewriting.passes import Found, Rewriter, Rewritten
from scheduler.rewriting.selection import KernelSelection
from search_spaces import OPERATIONS, fingerprint, jax_compat, load
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.recognise import Region

# Returns why a replacement is not made, by its key, or None.
Refuses = Callable[[str], str | None]
# The key of all changes that need no tuned call, in the mapping of replacements that are not made.
OTHER_CHANGES = "other changes"


def with_tuned_calls(
    jaxpr: Any,
    selection: KernelSelection,
    platform: str,
    *,
    others: bool = False,
    refuses: Refuses = lambda key: None,
    in_place: InPlace | None = None,
) -> Rewritten:
    """Replaces the regions of a closed jaxpr for which a kernel or a vendor's library is selected.

    Args:
      selection: how kernels are selected.
      platform: the platform of this process on which the calls run.
      others: whether row programs are replaced, and other equations changed where XLA computes the new ones faster. If
        not, each kind of region and its gradient are compared with the equations on this device first.
      refuses: returns why a replacement is not made, by its key, or None; `OTHER_CHANGES` is that of the changes.
      in_place: compares each region that would be replaced; the equations of these regions stay.

    Raises:
      CacheMiss: there is no record and the policy is "error".
    """

    def unless(operation: Operation[Any], problem: Problem) -> str | None:
        try:
            selection.of(operation, problem, platform)
        except NoCandidate as error:
            return f"{operation.name}: {error}"
        return None

    def by_xla(operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        library = dispatch.options(operation, on_miss="xla", backends=operation.library.backend)
        return tuned_call(operation, problem, *operands, params=params, options=library)

    @functools.cache
    def key(region: Region) -> str:
        calls = [(x.operation, x.problem) for x in region.stages]
        selected = [(of, *each) for of, problem in calls for each in selection.of(of, problem, platform)]
        text, _ = comparison.RegionComparison(region).kind
        return replacement_key(selected, text)

    refused = dict[str, str]()

    def check(region: Region, calls: Sequence[TunedCall]) -> str | None:
        if (reason := refuses(key(region))) is not None:
            refused[key(region)] = reason
            return reason
        if others:
            return None
        # The schedule of a gradient is not selected before a gradient is computed.
        stages = region.stages if len(region.stages) == 1 else ()
        differentiable = [functools.partial(by_xla, x.operation, x.problem, x.params) for x in stages]
        what = (platform, *selection.options.values())
        return comparison.region_disagreement(region, calls, what, differentiable)

    def observe(region: Region) -> Region:
        assert in_place is not None
        calls = [(x.operation, x.problem, x.params) for x in region.stages]
        placed, libraries = ([functools.partial(f, *each) for each in calls] for f in (selection.placed_call, by_xla))
        return in_place.region(key(region), region, placed, libraries)

    changes_on = platform if others else None
    if others and (reason := refuses(OTHER_CHANGES)) is not None:
        changes_on, refused[OTHER_CHANGES] = None, reason
    observing = None if in_place is None else observe
    rewriter = Rewriter(unless, selection.call, check, changes_on, last=others, observe=observing, key=key)
    return dataclasses.replace(rewriter.rewrite(jaxpr), refused=refused)


def replacement_key(selected: Iterable[tuple[Operation[Any], Problem, Decision]], equations: str = "") -> str:
    """Returns a digest of tuned calls and their schedules. It is the same in other processes.

    Args:
      selected: The calls, with what is selected for them.
      equations: What the calls replace, as text; "" for the single equation that the problem describes.
    """
    calls = [
        (operation.name, problem.canonical(), found.kernel.backend, dataclasses.asdict(found.schedule))
        for operation, problem, found in selected
    ]
    return fingerprint.digest((equations, calls))


def rewrite(
    fn: Callable[..., Any], *, on_miss: OnMiss | None = None, backends: Backends | None = None
) -> RewrittenFunction:
    """Returns `fn` with tuned calls in place of the attention that it computes by JAX's own operations.

    The result is a function like `fn`: it can be differentiated, batched, jitted and scanned, and called with other
    shapes. Apply it to the function that is differentiated: ``jax.value_and_grad(scheduler.rewrite(loss))``. The
    backward pass is then a tuned call, too, and no scan saves probabilities. `scheduler.optimize` replaces attention
    after differentiation, and needs no such change; use `rewrite` in libraries.

    Attention is a softmax between two products, with an optional scale, softcap, causal mask or window. Anything else
    is left as it is: dropouts, biases, masks that depend on an argument, symbolic extents, derivative rules that may
    not be those of the equations. Each kind of attention and its gradients are compared once with the original
    equations, on this device. `report` of the result lists what was found.

    Args:
      fn: a function of pytrees. Leaves that are no arrays are constants.
      on_miss, backends: as in `scheduler.tuned_flash_attention`.

    Raises:
      ValueError: `on_miss` or `backends` is not a known value.
    """
    return RewrittenFunction(fn, on_miss, backends)


class RewrittenFunction:
    """A function with tuned calls, and the attention that was found in its traces."""

    def __init__(self, fn: Callable[..., Any], on_miss: OnMiss | None, backends: Backends | None) -> None:
        self._fn, self._on_miss = fn, on_miss
        self._operations = [load(name) for name in OPERATIONS]
        self._backends = backends_of_each(self._operations, backends)
        self._found: dict[Found, None] = {}
        self._options()  # raises errors in the arguments now
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) or hasattr(x, "dtype")]

        def of_arrays(*arrays: Any) -> Any:
            own = [*leaves]
            for i, x in zip(places, arrays, strict=True):
                own[i] = x
            given, named = jax.tree.unflatten(tree, own)
            return self._fn(*given, **named)

        arrays = [leaves[i] for i in places]
        if jax_compat.has_explicit_axes([x for x in arrays if isinstance(x, jax.Array)]):
            return self._fn(*args, **kwargs)
        closed, results = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        platform = hardware.target_of(jax.local_devices()[0]).platform
        rewritten = with_tuned_calls(closed, KernelSelection(self._options()), platform)
        self._found |= dict.fromkeys(rewritten.found)
        if rewritten.jaxpr is closed:
            return self._fn(*args, **kwargs)
        # Of a constant result, JAX returns the literal.
        found = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in core.jaxpr_as_fun(rewritten.jaxpr)(*arrays)]
        return jax.tree.unflatten(jax.tree.structure(results), found)

    def report(self) -> str:
        """Returns one line for each attention that was found: its source line, and what replaces it or why not."""
        return "\n".join(map(str, self._found)) or "no attention was found"

    def _options(self) -> dict[str, Options]:
        target, plan = calls.target.value, planned.in_force()
        return {
            operation.name: dispatch.options(
                operation, on_miss=self._on_miss, backends=backends, target=target, plan=plan
            )
            for operation, backends in zip(self._operations, self._backends, strict=True)
        }
