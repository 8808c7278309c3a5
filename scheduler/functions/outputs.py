"""The outputs of a pure function: arrays, and how to rebuild the result and the updates in place from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from scheduler.functions import flax_modules
from scheduler.functions.call_tree import ARRAYS, Instance, is_array


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a pure function.

    Attributes:
      arrays: Arrays of the result and of the updated state.
      names: The name of each array, for messages.
      rest: How `PureCall.finish` assembles the arrays.
    """

    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    rest: Rest

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(_Name(n), x) for n, x in zip(self.names, self.arrays, strict=True)], (self.names, self.rest)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Sequence[Any]) -> Outputs:
        return cls(tuple(arrays), *aux)


@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    """How outputs are assembled into a result and updates.

    Attributes:
      graphs, node_leaves: Graphs and leaves of the flax.nnx nodes: the input nodes, then the new ones.
      changes: Index of a container among the arguments -> its new contents.
    """

    result: Packed
    graphs: tuple[Any, ...]
    node_leaves: tuple[tuple[Any, ...], ...]
    changes: Mapping[int, Change]


# A leaf: ("output", n), ("input", n), ("node", n) or ("static", value).
_Spec = tuple[str, Any]


def value_of_spec(spec: _Spec, available: tuple[Sequence[Any], Sequence[Any]], nodes: Sequence[Any]) -> Any:
    kind, x = spec
    outputs, inputs = available
    if kind == "static":
        return x
    return (outputs if kind == "output" else inputs if kind == "input" else nodes)[x]


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A pytree with its arrays replaced by references."""

    tree: Any
    leaves: tuple[_Spec, ...]

    def restored(self, available: tuple[Sequence[Any], Sequence[Any]], nodes: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, [value_of_spec(spec, available, nodes) for spec in self.leaves])


class Packing:
    """Collects the outputs of a trace.

    Attributes:
      nodes: The flax.nnx nodes: the input nodes, then the new ones.
    """

    def __init__(self, inputs: Sequence[Any], nodes: Sequence[Any], kept: set[int] | None = None) -> None:
        self.outputs: list[Any] = []
        self.names: list[str] = []
        self.nodes = list(nodes)
        # Inputs that are returned unchanged need no output. A donated input does, since its buffer is gone after the
        # call.
        self._inputs = {
            id(x): i for i, x in enumerate(inputs) if isinstance(x, jax.core.Tracer) and id(x) in (kept or ())
        }

    def pack(self, tree: Any, name: str) -> Packed:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=flax_modules.is_node)
        return Packed(treedef, tuple(self.leaf(x, name + jax.tree_util.keystr(path)) for path, x in leaves))

    def leaf(self, x: Any, name: str) -> _Spec:
        if flax_modules.is_node(x):
            known = next((i for i, node in enumerate(self.nodes) if node is x), None)
            if known is None:
                known = len(self.nodes)
                self.nodes.append(x)
            return "node", known
        if not is_array(x):
            return "static", x
        if id(x) in self._inputs:
            return "input", self._inputs[id(x)]
        self.outputs.append(x)
        self.names.append(name)
        return "output", len(self.outputs) - 1


# Containers that a function may change in place: dicts, lists, and objects with attributes.


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """The contents of a container after a call: for each key, an old key with the same value, or a new value."""

    entries: Mapping[Any, Packed | _Old]

    def write(self, container: Any, restored: Callable[[Packed], Any]) -> None:
        old = _contents(container)
        new = {key: restored(x) if isinstance(x, Packed) else old[x.key] for key, x in self.entries.items()}
        if isinstance(container, list):
            container[:] = new.values()
        elif isinstance(container, dict):
            for key in old.keys() - new.keys():
                del container[key]
            container.update(new)
        else:
            target = _target(container)
            for name in old.keys() - new.keys():
                delattr(target, name)
            for name, x in new.items():
                if name not in old or old[name] is not x:
                    setattr(target, name, x)


@dataclasses.dataclass(frozen=True)
class _Old:
    key: Any


def snapshots(tree: Any) -> list[tuple[Any, Mapping[Any, Any]]]:
    return [(x, _contents(x)) for x in containers(tree)]


def changed(before: Sequence[tuple[Any, Mapping[Any, Any]]], packing: Packing) -> Iterator[Change | None]:
    """Yields the new contents of each container; None if it is unchanged."""
    for container, old in before:
        new = _contents(container)
        if old.keys() == new.keys() and all(old[key] is x for key, x in new.items()):
            yield None
            continue
        moved = {id(x): key for key, x in old.items() if isinstance(x, jax.Array) or not jax.tree_util.all_leaves([x])}

        def entry(key: Any, x: Any, old: Any = old, moved: Any = moved) -> Packed | _Old:
            if key in old and old[key] is x:
                return _Old(key)
            return _Old(moved[id(x)]) if id(x) in moved else packing.pack(x, f" (updated {key!r})")

        yield Change({key: entry(key, x) for key, x in new.items()})


def containers(x: Any) -> Iterator[Any]:
    """Yields the containers within a pytree, including itself, in the order in which JAX flattens it."""
    if flax_modules.is_node(x) or isinstance(x, ARRAYS):
        return
    if isinstance(x, dict | list | Instance) or _has_mutable_attributes(x):
        yield x
    inside = x.attributes if isinstance(x, Instance) else x
    for y in jax.tree.leaves(inside, is_leaf=lambda y: y is not inside):
        if y is not inside:
            yield from containers(y)


def _has_mutable_attributes(x: Any) -> bool:
    parameters = getattr(type(x), "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen and not jax.tree_util.all_leaves([x])


def _contents(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container if isinstance(container, dict) else vars(_target(container)))


def _target(container: Any) -> Any:
    return container.target if isinstance(container, Instance) else container


@dataclasses.dataclass(frozen=True)
class _Name:
    text: str

    def __str__(self) -> str:
        return self.text
