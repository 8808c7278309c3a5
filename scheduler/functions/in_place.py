"""Compares tuned calls with the equations that they replace, on the values that a function itself computes."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from scheduler.functions import comparison
from scheduler.functions.comparison import RegionComparison
from search_spaces import jax_compat, lowering_compat, recognise
from search_spaces.problem import Problem
from search_spaces.recognise import Region

# Takes the arrays of a comparison, and has no results. `recognise.graph` does not count it among the users of an array,
# so that a function with comparisons is rewritten as one without.
observe_p = Primitive(recognise.OBSERVE)
observe_p.multiple_results = True
observe_p.def_effectful_abstract_eval(lambda *_, **__: ([], {lowering_compat.DEBUG_EFFECT}))


def _lower(ctx: Any, *args: Any, observe: Callable[..., None]) -> Any:
    def run(*own: Any) -> tuple[()]:
        observe(*own)
        return ()

    return jax_compat.lower(run, ctx, args)


mlir.register_lowering(observe_p, _lower)


@dataclasses.dataclass(frozen=True, eq=False)
class InPlace:
    """The comparisons in one run of a function, by the keys of the replacements (`rewrite.replacement_key`)."""

    _found: dict[str, list[tuple[Sequence[Any], float, Any]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def refusals(self) -> Mapping[str, str]:
        """Returns the key of each kernel that disagrees -> how. Waits until all runs have ended."""
        jax.effects_barrier()
        wrong = {
            key: [text for results, least, each in found if (text := comparison.verdict(each, results, least))]
            for key, found in self._found.items()
        }
        return {
            key: f"the kernel disagrees with its equations: {texts[0]} (on the function's own values)"
            for key, texts in wrong.items()
            if texts
        }

    def region(self, key: str, region: Region) -> Region:
        """Returns the region with its comparison after the last stage.

        The first stage reads the roots of its own results besides its inputs, the last stage reads the others.
        """
        found = RegionComparison(region)
        first, last = region.stages[0], region.stages[-1]
        of_first = (*first.inputs, *first.results)
        read = {id(x) for node in recognise.equations_between(of_first, region.roots) for x in node.inputs}
        read |= set(map(id, of_first))
        early = [x for x in region.roots if first is last or id(x) in read]
        late = [x for x in region.roots if x not in early]

        def observe(*args: Any) -> None:
            count = len(region.roots)
            self._note(key, found.results, found.least, found.errors(args[:count], args[count:]))

        def run(number: int, call: Any, before: Any, *args: Any) -> Any:
            stage = region.stages[number]
            handed_on, roots, results = before or (None, [], [])
            own = args[len(stage.inputs) :]
            made, handed_on = stage.run(call, handed_on, *args[: len(stage.inputs)])
            roots, results = [*roots, *own], [*results, *made]
            if number == len(region.stages) - 1:
                by_root = dict(zip(map(id, [*early, *late]), roots, strict=True))
                observe_p.bind(*(by_root[id(x)] for x in region.roots), *results, observe=observe)
            return made, (handed_on, roots, results)

        stages = []
        for number, stage in enumerate(region.stages):
            more = (*(early if stage is first else ()), *(late if stage is last else ()))
            stages.append(dataclasses.replace(stage, inputs=(*stage.inputs, *more), run=functools.partial(run, number)))
        return dataclasses.replace(region, stages=tuple(stages))

    def product(
        self,
        key: str,
        problem: Problem,
        run: Callable[..., tuple[Any, ...]],
        primitive: Any,
        params: Mapping[str, Any],
        *args: Any,
    ) -> tuple[Any, ...]:
        """Returns ``run(*args)``, compared with the result of an equation that is lowered by JAX's rule."""
        (found,) = run(*args)
        plain = primitive.bind(*args, **params)
        wide = primitive.bind(*map(comparison.widened, args), **comparison.wide_params(params))
        least = comparison.least_rounding([problem])
        self._note(key, [plain], least, comparison.errors([found], [plain], [wide], [plain]))
        return (found,)

    def _note(self, key: str, results: Sequence[Any], least: float, errors: jax.Array) -> None:
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        jax.debug.callback(lambda found: self._found[key].append((structs, least, np.asarray(found))), errors)
