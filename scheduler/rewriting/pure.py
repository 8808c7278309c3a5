"""Turns a call into a pure function of its arrays, separate from its static part and the state that it updates.

This is the only module that turns a user's function and arguments into a function that JAX can trace, compare and run
several times. Modules of flax.nnx are split outside the trace and merged inside. The outputs include everything the
function writes into these modules, or into dicts, lists and objects among its arguments. `PureCall.finish` writes these
updates back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from scheduler.core.errors import SchedulerError
from scheduler.rewriting import module_libraries
from scheduler.rewriting.call_tree import (
    ARRAYS,
    NONE,
    NUMBERS,
    Instance,
    Names,
    OpenedCall,
    attributes,
    is_array,
    jit_options,
    opened,
    opened_object,
    set_attribute,
    static_key,
)
from search_spaces import lowering_compat

# ------------------------------------------------------------------------------
# The outputs of a pure function: arrays, and how to rebuild the result and the updates in place from them.


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
    changes: Mapping[int, Update]


# A leaf: ("output", n), ("input", n), ("node", n), ("object", n) or ("static", value).
_Spec = tuple[str, Any]
# Outputs, inputs, and a function from the number of an object among the arguments to the object.
_Available = tuple[Sequence[Any], Sequence[Any], Callable[[int], Any]]


def value_of_spec(spec: _Spec, available: _Available, nodes: Sequence[Any]) -> Any:
    kind, x = spec
    outputs, inputs, original = available
    if kind == "static":
        return x
    if kind == "object":
        return original(x)
    return (outputs if kind == "output" else inputs if kind == "input" else nodes)[x]


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A pytree with its arrays replaced by references."""

    tree: Any
    leaves: tuple[_Spec, ...]

    def restored(self, available: _Available, nodes: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, [value_of_spec(spec, available, nodes) for spec in self.leaves])


class Packing:
    """Collects the outputs of a trace.

    Attributes:
      nodes: The flax.nnx nodes: the input nodes, then the new ones.

    Args:
      objects: The numbers of the objects among the arguments, by the ``id`` of what the function sees in their place.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        nodes: Sequence[Any],
        kept: set[int] | None = None,
        objects: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.outputs: list[Any] = []
        self.names: list[str] = []
        self.nodes = list(nodes)
        self._objects = objects
        # Inputs that are returned unchanged need no output. A donated input does, since its buffer is gone after the
        # call.
        self._inputs = {
            id(x): i for i, x in enumerate(inputs) if isinstance(x, jax.core.Tracer) and id(x) in (kept or ())
        }

    def pack(self, tree: Any, name: str) -> Packed:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=module_libraries.is_flax_node)
        return Packed(treedef, tuple(self.leaf(x, name + jax.tree_util.keystr(path)) for path, x in leaves))

    def leaf(self, x: Any, name: str) -> _Spec:
        if module_libraries.is_flax_node(x):
            known = next((i for i, node in enumerate(self.nodes) if node is x), None)
            if known is None:
                known = len(self.nodes)
                self.nodes.append(x)
            return "node", known
        if id(x) in self._objects:
            return "object", self._objects[id(x)]
        if not is_array(x):
            if any(isinstance(y, jax.core.Tracer) for y in jax.tree.leaves(opened_object(x, {}))):
                raise SchedulerError(
                    f"the function makes an object with arrays, of class {type(x).__qualname__}, and returns it or "
                    f"keeps it in an argument{name}: return the arrays, or register the class as a pytree "
                    "(jax.tree_util.register_dataclass)"
                )
            return "static", x
        if id(x) in self._inputs:
            return "input", self._inputs[id(x)]
        self.outputs.append(x)
        self.names.append(name)
        return "output", len(self.outputs) - 1


# Containers that a function may change in place: dicts, lists, and objects with attributes.


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The contents of a container after a call: for each key, an old key with the same value, or a new value."""

    entries: Mapping[Any, Packed | _Old]

    def write(self, container: Any, restored: Callable[[Packed], Any]) -> None:
        old, target = _contents(container), _target(container)
        new = {key: restored(x) if isinstance(x, Packed) else old[x.key] for key, x in self.entries.items()}
        if isinstance(target, list):
            target[:] = new.values()
        elif isinstance(target, dict):
            for key in old.keys() - new.keys():
                del target[key]
            target.update(new)
        else:
            for name in old.keys() - new.keys():
                object.__delattr__(target, name)
            for name, x in new.items():
                if name not in old or old[name] is not x:
                    set_attribute(target, name, x)


@dataclasses.dataclass(frozen=True)
class _Old:
    key: Any


def snapshots(tree: Any) -> list[tuple[Any, Mapping[Any, Any]]]:
    return [(x, _contents(x)) for x in containers(tree)]


def changed(before: Sequence[tuple[Any, Mapping[Any, Any]]], packing: Packing) -> Iterator[Update | None]:
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

        yield Update({key: entry(key, x) for key, x in new.items()})


def containers(x: Any) -> Iterator[Any]:
    """Yields the containers within a pytree, including itself, in the order in which JAX flattens it."""
    if module_libraries.is_flax_node(x) or isinstance(x, ARRAYS):
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
    target = _target(container)
    if isinstance(target, list | tuple):
        return dict(enumerate(target))
    return dict(target) if isinstance(target, dict) else attributes(target)


def _target(container: Any) -> Any:
    return container.target if isinstance(container, Instance) else container


@dataclasses.dataclass(frozen=True)
class _Name:
    text: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, eq=False)
class PureCall:
    """One call ``fn(*args, **kwargs)``, split into a pure function and its arrays.

    Attributes:
      function: ``function(*arrays)`` computes the result and the updated state, as `Outputs`. It holds no array of this
        call and can be reused for any call with an equal `static`.
      arrays: Arrays of the arguments, of the objects and partials that the function is bound to, and of modules that it
        holds.
      donated: For each array, whether the call donates it.
    """

    function: Callable[..., Outputs]
    arrays: tuple[Any, ...]
    donated: tuple[bool, ...]
    _call: OpenedCall
    _program: _Template
    _split: module_libraries.FlaxSplit

    @functools.cached_property
    def static(self) -> Hashable:
        """The hashable part of the call: everything except its arrays.

        Raises:
          TypeError: An argument is neither an array nor hashable.
        """
        program = self._program
        fixed = self._call.fixed_leaves
        constants = tuple(static_key(x, by_identity=i < fixed) for (i, _), x in program.constants.items())
        return program.tree, constants, program.graphs, program.places, self.donated

    @functools.cached_property
    def _containers(self) -> list[Any]:
        return list(containers(self._call))

    @functools.cached_property
    def _originals(self) -> Mapping[int, Any]:
        return {x.number: x.original for x in self._containers if isinstance(x, Instance)}

    def owners(self) -> list[str]:
        """Returns for each array the name of the parameter that has it, or of the function that holds it."""
        names = self._call.owners()
        return [names[i] for i, _ in self._program.places]

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context for compiling and first running `function`. It warns as the library's jit does."""
        return module_libraries.donating_as_equinox(self._call.fn)

    def finish(self, outputs: Outputs) -> Any:
        """Writes the updates into the modules and containers of this call, and returns the result of `fn`."""
        rest = outputs.rest
        available = (outputs.arrays, self.arrays, lambda number: self._originals[number])
        leaves = [[value_of_spec(spec, available, ()) for spec in node] for node in rest.node_leaves]
        nodes = module_libraries.update_flax(self._split, rest.graphs, leaves) if rest.graphs else []
        if rest.changes:
            given = self._containers
            if any(sum(given[i] is other for other in given) > 1 for i in rest.changes):
                raise SchedulerError(
                    "the function changes a container that occurs twice among its arguments, which a compiled function "
                    "cannot distinguish: pass the container once, or return the new values"
                )
            for i, change in rest.changes.items():
                change.write(given[i], lambda packed: packed.restored(available, nodes))
        return rest.result.restored(available, nodes)


def pure_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    static: Names = NONE,
    donated: Names = NONE,
    trace_numbers: bool = False,
) -> PureCall:
    """Returns ``fn(*args, **kwargs)`` as a pure function of the arrays in it, or of their shapes.

    Args:
      fn: A plain function, or one jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`; a method, a partial, a
        module.
      static: Arguments that are static as a whole.
      donated: Arguments that the call donates, in addition to those that a library's jit donates.
      trace_numbers: Whether Python numbers among the arguments are inputs, as for `jax.jit`. Numbers in an Equinox
        module, and all numbers if `equinox.filter_jit` made `fn`, are static regardless.
    """
    call = opened(fn, tuple(args), dict(kwargs))
    jitted = jit_options(call)
    call = dataclasses.replace(call.with_static(jitted.static, static), fn=module_libraries.unwrapped_flax(call.fn))
    leaves, tree = jax.tree.flatten(call, is_leaf=module_libraries.is_flax_node)
    traced = call.numbers(len(leaves)) if trace_numbers and not jitted.numbers_are_static else frozenset[int]()
    donates = call.leaves_of(jitted.donated, donated) if any(map(any, (jitted.donated, donated))) else frozenset[int]()

    nodes = tuple(i for i, leaf in enumerate(leaves) if module_libraries.is_flax_node(leaf))
    split = (
        module_libraries.split_flax([leaves[i] for i in nodes]) if nodes else module_libraries.FlaxSplit((), (), None)
    )
    of_node = dict(zip(nodes, split.leaves, strict=True))
    places, arrays = list[tuple[int, int]](), list[Any]()
    constants = dict[tuple[int, int], Any]()
    for i, leaf in enumerate(leaves):
        for j, x in enumerate(of_node.get(i, (leaf,))):
            if is_array(x) or (i in traced and isinstance(x, NUMBERS)):
                places.append((i, j))
                arrays.append(x)
            else:
                constants[i, j] = x
    flags = tuple(i in donates for i, _ in places)
    sizes = {i: len(own) for i, own in of_node.items()}
    program = _Template(tree, len(leaves), sizes, split.graphs, constants, tuple(places), flags)
    return PureCall(program.run, tuple(arrays), flags, call, program, split)


def holds_arrays_or_state(fn: Callable[..., Any]) -> bool:
    """Returns whether `fn` is, or is bound to or closes over, a module with arrays that must not become constants."""
    if lowering_compat.is_jitted(fn):
        return False
    call = opened(fn, (), {})
    held = jax.tree.leaves(call, is_leaf=module_libraries.is_flax_node)
    return any(isinstance(x, jax.Array) or module_libraries.is_flax_node(x) for x in held)


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn` to raise `Impure` where a trace by `jax.jit` would lose an update or reject a result."""

    @functools.wraps(fn, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        before = snapshots((args, kwargs))
        with _explain_errors():
            result = fn(*args, **kwargs)
        if any(change for change in changed(before, Packing((), ()))):
            raise Impure
        if not all(
            is_array(x) or isinstance(x, NUMBERS)
            for x in jax.tree.leaves(result, is_leaf=module_libraries.is_flax_node)
        ):
            raise Impure
        return result

    return pure


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if module_libraries.is_flax_loaded() and module_libraries.is_of_another_flax_trace(error):
            raise SchedulerError(
                "the function changes a module that is neither an argument nor in its closure, its globals or its "
                "object, and a trace cannot return such a change: pass the module as an argument "
                f"({str(error).partition(chr(10))[0]})"
            ) from error
        raise


class Impure(Exception):
    """Raised if a function updates its arguments, or returns a value that is not an array."""


# The function that JAX traces.


@dataclasses.dataclass(frozen=True, eq=False)
class _Template:
    """A call without its arrays.

    Attributes:
      leaves: Number of leaves of `tree`.
      sizes: For each leaf that is a flax.nnx node, by its index: the number of leaves within the node.
      graphs: Graphs of these nodes.
      constants: Values that are not inputs, by place: the index of the leaf, and the index within its node.
      places: Places of the inputs.
      donated: For each input, whether it is donated.
    """

    tree: Any
    leaves: int
    sizes: Mapping[int, int]
    graphs: tuple[Any, ...]
    constants: Mapping[tuple[int, int], Any]
    places: tuple[tuple[int, int], ...]
    donated: tuple[bool, ...]

    def run(self, *arrays: Any) -> Outputs:
        at = {**self.constants, **dict(zip(self.places, arrays, strict=True))}
        nodes, merged = list[Any](), None
        if module_libraries.is_flax_loaded():
            own = [[at[i, j] for j in range(size)] for i, size in self.sizes.items()]
            nodes, merged = module_libraries.merge_flax(self.graphs, own)
        node_of = dict(zip(self.sizes, nodes, strict=True))
        leaves = [node_of[i] if i in node_of else at[i, 0] for i in range(self.leaves)]
        opened = jax.tree.unflatten(self.tree, leaves)
        call, assigned = opened.realized()
        before = snapshots(opened)
        with _explain_errors():
            result = call()
        if names := assigned():
            raise SchedulerError(
                f"the function assigns {', '.join(names)} outside of itself, which a trace cannot return: return "
                "the new values"
            )
        kept = [x for x, donated in zip(arrays, self.donated, strict=True) if not donated]
        objects = {id(x.target): x.number for x, _ in before if isinstance(x, Instance)}
        packing = Packing(tuple(arrays), nodes, {id(x) for x in kept}, objects)
        packed = packing.pack(result, "")
        changes = {i: change for i, change in enumerate(changed(before, packing)) if change}
        graphs, node_leaves = tuple[Any, ...](), list[tuple[Any, ...]]()
        if packing.nodes:
            again = module_libraries.split_flax_again(packing.nodes, merged)
            graphs = again.graphs
            node_leaves = [tuple(packing.leaf(x, " (updated state)") for x in own) for own in again.leaves]
        rest = Rest(packed, graphs, tuple(node_leaves), changes)
        return Outputs(tuple(packing.outputs), tuple(packing.names), rest)
