"""Support of module libraries: Equinox and flax.nnx."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from search_spaces import lowering_compat

# ------------------------------------------------------------------------------
# Equinox support: detects functions of `filter_jit`, their donated arguments, and static numbers.
#
# Equinox is never imported here, only used if the user's program imported it.


def is_equinox_module(x: Any) -> bool:
    """Returns whether `x` is an Equinox module. Numbers among its leaves are static, as for `filter_jit`."""
    equinox = sys.modules.get("equinox")
    module = getattr(equinox, "Module", None)  # None while it is being imported
    return module is not None and isinstance(x, module)


def is_equinox_jitted(fn: Any) -> bool:
    """Returns whether `filter_jit` made `fn`. Then everything except arrays is static."""
    return is_equinox_module(fn) and hasattr(fn, "donate_first") and hasattr(fn, "donate_rest")


def equinox_donated(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the indices and names of the arguments that a `filter_jit` function donates."""
    given: Any = fn
    bound = inspect.signature(fn).bind(*args, **kwargs)
    first_is_named = not args and bool(bound.args)
    numbers = tuple(i for i in range(len(args)) if (given.donate_rest if i else given.donate_first))
    first = next(iter(bound.arguments)) if first_is_named else None
    names = tuple(name for name in kwargs if (given.donate_first if name == first else given.donate_rest))
    return numbers, names


def jitted_by_equinox(fn: Any, replaced: Callable[[Any], Any]) -> Any:
    """Returns a copy of a `filter_jit` function, but ``replaced(f)`` runs for its function `f` of arrays.

    None stands for a version of Equinox that builds jitted functions otherwise.
    """
    jitted = getattr(fn, "_cached", None)
    if not lowering_compat.is_jitted(jitted):
        return None
    again = copy.copy(fn)
    object.__setattr__(again, "_cached", replaced(jitted))
    return again


def arguments_of_equinox(donated: Any, kept: Any, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arrays of a `filter_jit` call by its own arguments, from the arguments of its inner function."""
    arrays = {**donated, **kept}
    combine = getattr(sys.modules.get("equinox._compile_utils"), "hashable_combine", None)
    if combine is None or len(static) != 3:
        return tuple(arrays.values()), {}
    _, first, rest = (
        jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, combine(arrays[name], each))
        for name, each in zip(("fun", "first", "rest"), static, strict=True)
    )
    return (first, *rest[0])[:-1], rest[1]  # the last argument is a placeholder


@contextlib.contextmanager
def donating_as_equinox(fn: Any) -> Iterator[None]:
    """Ignores JAX's warnings of unusable donated buffers if `filter_jit` does so for `fn`."""
    if not (is_equinox_jitted(fn) and getattr(fn, "filter_warning", False)):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


# ------------------------------------------------------------------------------
# flax.nnx support: splits modules into a graph and arrays, merges them, and updates modules in place.
#
# flax is never imported here, only used if the user's program imported it.


@dataclasses.dataclass(frozen=True, eq=False)
class FlaxSplit:
    """Modules, optimizers, variables and random number generators, split into graphs and leaves.

    Attributes:
      graphs: One hashable graph per node. An object shared by several nodes is in the first one's graph.
      leaves: The leaves of each node.
      references: Object -> its index.
    """

    graphs: tuple[Hashable, ...]
    leaves: tuple[tuple[Any, ...], ...]
    references: Any


def is_flax_node(x: Any) -> bool:
    """Returns whether `x` is a graph node or variable of flax.nnx: an object that functions update in place."""
    graphlib = _graphlib()
    return graphlib is not None and bool(graphlib.is_graph_node(x))


def is_flax_loaded() -> bool:
    """Returns whether flax.nnx was imported."""
    return _graphlib() is not None


def split_flax(nodes: Sequence[Any]) -> FlaxSplit:
    """Splits nodes into graphs and leaves. Objects shared by several nodes are split once."""
    return _split(nodes, None)


def merge_flax(graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """Returns new nodes in the current trace, and the references that `split_flax_again` uses to identify them."""
    references = _graphlib().IndexMap()
    return _merge(graphs, leaves, references, None), references


def split_flax_again(nodes: Sequence[Any], merged: Any) -> FlaxSplit:
    """Splits nodes that a function changed, and new nodes. `update_flax` identifies those that `merge_flax` made."""
    return _split(nodes, _graphlib().RefMap.from_indexmap(merged))


def update_flax(before: FlaxSplit, graphs: Sequence[Any], leaves: Sequence[Sequence[Any]]) -> list[Any]:
    """Applies the changes of `split_flax_again` in place to the nodes of `before`; returns them and the new nodes."""
    graphlib = _graphlib()
    originals = graphlib.IndexMap.from_refmap(before.references or graphlib.RefMap())
    return _merge(graphs, leaves, graphlib.IndexMap(), originals)


def flax_jitted(fn: Callable[..., Any]) -> Any:
    """Returns the `jax.jit` function that an `nnx.jit` function calls with split modules; None for other functions."""
    if type(fn).__module__.startswith("flax.nnx."):
        return getattr(fn, "jitted_fn", None)
    return None


def unwrapped_flax(fn: Any) -> Any:
    """Returns the function inside `nnx.jit`, unless further options decide where or how it runs."""
    how = flax_jitted(fn)
    if how is None or getattr(fn, "in_shardings", 1) is not None or getattr(fn, "out_shardings", 1) is not None:
        return fn
    return getattr(fn, "fun", fn) if lowering_compat.runs_anywhere(how) else fn


def jitted_by_flax(
    fn: Callable[..., Any], function: Callable[..., Any], options: Mapping[str, Any], replaced: Callable[[Any], Any]
) -> Any:
    """Returns `function` jitted by `nnx.jit`, but ``replaced(f)`` runs for the function `f` of split modules.

    None stands for a version or a mode of flax.nnx that builds jitted functions otherwise.

    Args:
      fn: The result of `nnx.jit`, which gives the static and donated arguments; or a plain function.
      options: Options of `jax.jit`, which `nnx.jit` also has.
    """
    options = dict(options)
    how = flax_jitted(fn)
    if how is not None:
        for name, (numbers, names) in {
            "static": lowering_compat.static_arguments(how),
            "donate": lowering_compat.donated_arguments(how),
        }.items():
            options |= {f"{name}_argnums": numbers, f"{name}_argnames": names}
    jitted = sys.modules["flax.nnx"].jit(function, **options)
    if type(jitted).__name__ != "JitWrapped" or (how is not None and type(fn) is not type(jitted)):
        return None
    jitted.jitted_fn = replaced(jitted.jitted_fn)
    return jitted


def is_of_another_flax_trace(error: Exception) -> bool:
    """Returns whether flax.nnx refused to change or differentiate a module made outside the current trace."""
    return type(error).__name__ == "TraceContextError" or "different trace level" in str(error)


def _graphlib() -> Any:
    return sys.modules.get("flax.nnx.graphlib") or sys.modules.get("flax.nnx.graph")


def _split(nodes: Sequence[Any], outer: Any) -> FlaxSplit:
    graphlib = _graphlib()
    references = graphlib.RefMap()
    flat = [
        graphlib.flatten(node, ref_index=references, ref_outer_index=outer, with_paths=False, graph=True)
        for node in nodes
    ]
    return FlaxSplit(tuple(graph for graph, _ in flat), tuple(tuple(leaves) for _, leaves in flat), references)


def _merge(graphs: Sequence[Any], leaves: Sequence[Sequence[Any]], references: Any, originals: Any) -> list[Any]:
    unflatten = _graphlib().unflatten
    return [
        unflatten(graph, list(own), index_ref=references, outer_index_outer_ref=originals)
        for graph, own in zip(graphs, leaves, strict=True)
    ]
