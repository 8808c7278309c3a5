"""flax.nnx: splits modules into a graph and arrays, merges them again, and updates modules in place.

Nothing is imported before the user's program imported it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from search_spaces import lowering_compat


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Modules, optimizers, variables and generators of random numbers, taken apart.

    Attributes:
      graphs: of each in turn, hashable. An object that several share is in the first of them.
      leaves: of each in turn.
      references: object -> its number.
    """

    graphs: tuple[Hashable, ...]
    leaves: tuple[tuple[Any, ...], ...]
    references: Any


def is_node(x: Any) -> bool:
    """Whether `x` is a graph node or a variable of flax.nnx: an object that functions update in place."""
    graphlib = _graphlib()
    return graphlib is not None and bool(graphlib.is_graph_node(x))


def is_loaded() -> bool:
    """Whether any object can be one of these."""
    return _graphlib() is not None


def split(nodes: Sequence[Any]) -> Split:
    """Takes nodes apart; what they share is split once."""
    return _split(nodes, None)


def merge(graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """New nodes of the trace that runs now, and what `split_again` needs to tell them from others."""
    references = _graphlib().IndexMap()
    return _merge(graphs, leaves, references, None), references


def split_again(nodes: Sequence[Any], merged: Any) -> Split:
    """Takes nodes apart that a function changed, and new ones; `update` finds those that `merge` made."""
    return _split(nodes, _graphlib().RefMap.from_indexmap(merged))


def update(before: Split, graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> list[Any]:
    """The nodes of `before`, changed in place as those of `split_again` were; and the new ones."""
    graphlib = _graphlib()
    originals = graphlib.IndexMap.from_refmap(before.references or graphlib.RefMap())
    return _merge(graphs, leaves, graphlib.IndexMap(), originals)


def jitted(fn: Callable[..., Any]) -> Any:
    """The function of `jax.jit` that one of `nnx.jit` calls with split modules; None of any other function."""
    if type(fn).__module__.startswith("flax.nnx."):
        return getattr(fn, "jitted_fn", None)
    return None


def unwrapped(fn: Any) -> Any:
    """The function that `nnx.jit` was given, where it was given nothing else that decides where or how it runs."""
    how = jitted(fn)
    if how is None or getattr(fn, "in_shardings", 1) is not None or getattr(fn, "out_shardings", 1) is not None:
        return fn
    return getattr(fn, "fun", fn) if lowering_compat.runs_anywhere(how) else fn


def is_of_another_trace(error: Exception) -> bool:
    """Whether flax.nnx refuses to change, or to differentiate in, a module that was made outside of a trace."""
    return type(error).__name__ == "TraceContextError" or "different trace level" in str(error)


def _graphlib() -> Any:
    return sys.modules.get("flax.nnx.graphlib") or sys.modules.get("flax.nnx.graph")


def _split(nodes: Sequence[Any], outer: Any) -> Split:
    graphlib = _graphlib()
    references = graphlib.RefMap()
    flat = [
        graphlib.flatten(node, ref_index=references, ref_outer_index=outer, with_paths=False, graph=True)
        for node in nodes
    ]
    return Split(tuple(graph for graph, _ in flat), tuple(tuple(leaves) for _, leaves in flat), references)


def _merge(graphs: Sequence[Any], leaves: Sequence[Sequence[Any]], references: Any, originals: Any) -> list[Any]:
    unflatten = _graphlib().unflatten
    return [
        unflatten(graph, list(own), index_ref=references, outer_index_outer_ref=originals)
        for graph, own in zip(graphs, leaves, strict=True)
    ]
