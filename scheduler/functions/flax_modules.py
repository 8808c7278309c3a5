"""flax.nnx support: splits modules into a graph and arrays, merges them, and updates modules in place.

flax is never imported here, only used if the user's program imported it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from search_spaces import lowering_compat


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Modules, optimizers, variables and random number generators, split into graphs and leaves.

    Attributes:
      graphs: One hashable graph per node. An object shared by several nodes is in the first one's graph.
      leaves: The leaves of each node.
      references: Object -> its index.
    """

    graphs: tuple[Hashable, ...]
    leaves: tuple[tuple[Any, ...], ...]
    references: Any


def is_node(x: Any) -> bool:
    """Returns whether `x` is a graph node or variable of flax.nnx: an object that functions update in place."""
    graphlib = _graphlib()
    return graphlib is not None and bool(graphlib.is_graph_node(x))


def is_loaded() -> bool:
    """Returns whether flax.nnx was imported."""
    return _graphlib() is not None


def split(nodes: Sequence[Any]) -> Split:
    """Splits nodes into graphs and leaves. Objects shared by several nodes are split once."""
    return _split(nodes, None)


def merge(graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """Returns new nodes in the current trace, and the references that `split_again` uses to identify them."""
    references = _graphlib().IndexMap()
    return _merge(graphs, leaves, references, None), references


def split_again(nodes: Sequence[Any], merged: Any) -> Split:
    """Splits nodes that a function changed, and new nodes. `update` identifies those that `merge` made."""
    return _split(nodes, _graphlib().RefMap.from_indexmap(merged))


def update(before: Split, graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> list[Any]:
    """Applies the changes of `split_again` in place to the nodes of `before`; returns them and the new nodes."""
    graphlib = _graphlib()
    originals = graphlib.IndexMap.from_refmap(before.references or graphlib.RefMap())
    return _merge(graphs, leaves, graphlib.IndexMap(), originals)


def jitted(fn: Callable[..., Any]) -> Any:
    """Returns the `jax.jit` function that an `nnx.jit` function calls with split modules; None for other functions."""
    if type(fn).__module__.startswith("flax.nnx."):
        return getattr(fn, "jitted_fn", None)
    return None


def unwrapped(fn: Any) -> Any:
    """Returns the function inside `nnx.jit`, unless further options decide where or how it runs."""
    how = jitted(fn)
    if how is None or getattr(fn, "in_shardings", 1) is not None or getattr(fn, "out_shardings", 1) is not None:
        return fn
    return getattr(fn, "fun", fn) if lowering_compat.runs_anywhere(how) else fn


def is_of_another_trace(error: Exception) -> bool:
    """Returns whether flax.nnx refused to change or differentiate a module made outside the current trace."""
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
