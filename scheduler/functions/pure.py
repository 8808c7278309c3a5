"""A call as a pure function of its arrays: what is static, and the state that it updates, stand apart.

This is the one place where a user's function and arguments become something that JAX traces, compares and runs several
times. Modules of flax.nnx are split outside and merged inside. What the function writes into them, or into dicts, lists
and objects among its arguments, is among the outputs, and `PureCall.finish` writes it where it belongs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from scheduler.core.errors import SchedulerError
from scheduler.functions import captured, equinox_modules, flax_modules
from scheduler.functions.captured import Captured
from search_spaces import lowering_compat

# The numbers and the names of some arguments.
Names = tuple[tuple[int, ...], tuple[str, ...]]
NONE: Names = ((), ())
_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """What a pure function returns.

    Attributes:
      arrays: of the result, and of the state that was updated.
      names: of each, for messages.
      rest: how `PureCall.finish` puts them together.
    """

    arrays: tuple[Any, ...]
    names: tuple[str, ...]
    rest: _Rest

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(_Name(n), x) for n, x in zip(self.names, self.arrays, strict=True)], (self.names, self.rest)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Sequence[Any]) -> Outputs:
        return cls(tuple(arrays), *aux)


@dataclasses.dataclass(frozen=True, eq=False)
class PureCall:
    """One call ``fn(*args, **kwargs)``, taken apart.

    Attributes:
      function: ``function(*arrays)`` computes the result and the updated state, as `Outputs`. It holds no array of
        this call: it serves each call whose `static` is equal.
      arrays: of the arguments, of what the function is a method or a partial of, and of modules that it holds.
      donated: of each array, whether the call donates it.
    """

    function: Callable[..., Outputs]
    arrays: tuple[Any, ...]
    donated: tuple[bool, ...]
    _call: _Call
    _program: _Program
    _split: flax_modules.Split

    @functools.cached_property
    def static(self) -> Hashable:
        """All of the call but its arrays.

        Raises:
          TypeError: an argument is neither an array nor hashable.
        """
        program = self._program
        fixed = self._call.fixed_leaves
        constants = tuple(_key(x, by_identity=i < fixed) for (i, _), x in program.constants.items())
        return program.tree, constants, program.graphs, program.places, self.donated

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """A context to compile and run `function` in for the first time: warns as the library's jit does."""
        return equinox_modules.donating_as(self._call.fn)

    def finish(self, outputs: Outputs) -> Any:
        """The result of `fn`, after what it updates was written into the modules and containers of this call."""
        rest = outputs.rest
        available = (outputs.arrays, self.arrays)
        leaves = [[_value(spec, available, ()) for spec in node] for node in rest.node_leaves]
        nodes = flax_modules.update(self._split, rest.graphs, leaves) if rest.graphs else []
        if rest.changes:
            containers = list(_containers(self._call))
            written = [id(containers[i]) for i in rest.changes]
            if any([*map(id, containers)].count(i) > 1 for i in written):
                raise SchedulerError(
                    "the function changes a container that is twice among its arguments, which a compiled function "
                    "cannot tell apart: give it once, or return what is to change"
                )
            for i, change in rest.changes.items():
                change.write(containers[i], lambda packed: packed.restored(available, nodes))
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
    """``fn(*args, **kwargs)`` as a pure function of the arrays in it, or of their shapes.

    Args:
      fn: plain, or jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`; a method, a partial, a module.
      static: arguments that are static as a whole.
      donated: arguments that the call donates, besides those that a library's jit donates.
      trace_numbers: whether Python numbers among the arguments are inputs, as for `jax.jit`. Those of an Equinox
        module, and all where `equinox.filter_jit` made `fn`, are static nevertheless.
    """
    call = _opened(fn, tuple(args), dict(kwargs))
    jitted = _options(call)
    call = dataclasses.replace(call.with_static(jitted.static, static), fn=flax_modules.unwrapped(call.fn))
    leaves, tree = jax.tree.flatten(call, is_leaf=flax_modules.is_node)
    traced = call.numbers(len(leaves)) if trace_numbers and not jitted.numbers_are_static else frozenset[int]()
    donates = call.leaves_of(jitted.donated, donated) if any(map(any, (jitted.donated, donated))) else frozenset[int]()

    nodes = tuple(i for i, leaf in enumerate(leaves) if flax_modules.is_node(leaf))
    split = flax_modules.split([leaves[i] for i in nodes]) if nodes else flax_modules.Split((), (), None)
    of_node = dict(zip(nodes, split.leaves, strict=True))
    places, arrays = list[tuple[int, int]](), list[Any]()
    constants = dict[tuple[int, int], Any]()
    for i, leaf in enumerate(leaves):
        for j, x in enumerate(of_node.get(i, (leaf,))):
            if _is_array(x) or (i in traced and isinstance(x, _NUMBERS)):
                places.append((i, j))
                arrays.append(x)
            else:
                constants[i, j] = x
    flags = tuple(i in donates for i, _ in places)
    sizes = {i: len(own) for i, own in of_node.items()}
    program = _Program(tree, len(leaves), sizes, split.graphs, constants, tuple(places), flags)
    return PureCall(program.run, tuple(arrays), flags, call, program, split)


def has_state(x: Any) -> bool:
    """Whether a pytree holds objects that functions update in place: modules, variables, generators of flax.nnx."""
    if not flax_modules.is_loaded():
        return False
    return any(map(flax_modules.is_node, jax.tree.leaves(x, is_leaf=flax_modules.is_node)))


def is_library_jitted(fn: Any) -> bool:
    """Whether `flax.nnx.jit` or `equinox.filter_jit` made it."""
    return flax_modules.jitted(fn) is not None or equinox_modules.is_jitted(fn)


def holds_arrays_or_state(fn: Callable[..., Any]) -> bool:
    """Whether a function is a module, or a method, a partial or a closure of one, whose arrays it should not embed."""
    if lowering_compat.is_jitted(fn):
        return False
    call = _opened(fn, (), {})
    held = jax.tree.leaves(call, is_leaf=flax_modules.is_node)
    return any(isinstance(x, jax.Array) or flax_modules.is_node(x) for x in held)


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which raises `Impure` where a trace by `jax.jit` would lose an update or refuse a result."""

    @functools.wraps(fn, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        before = _snapshots((args, kwargs))
        with _explained():
            result = fn(*args, **kwargs)
        if any(change for change in _changes(before, _Packing((), ()))):
            raise Impure
        if not all(
            _is_array(x) or isinstance(x, _NUMBERS) for x in jax.tree.leaves(result, is_leaf=flax_modules.is_node)
        ):
            raise Impure
        return result

    return pure


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if flax_modules.is_loaded() and flax_modules.is_of_another_trace(error):
            raise SchedulerError(
                "the function changes a module that it neither takes as an argument nor holds itself, in its closure, "
                "its globals or its object, so that the change cannot be carried out of a trace: give it the module "
                f"as an argument ({str(error).partition(chr(10))[0]})"
            ) from error
        raise


class Impure(Exception):
    """A function updates its arguments, or returns what is no array."""


# What is called, and on what.


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """``fn(*held, *given, **held_by_name, **named)``.

    Attributes:
      fn: without the partials around it, and no bound method.
      captured: state in closures and globals of `fn`.
      held, held_by_name: of partials and bound methods.
      given, named: the arguments.
    """

    fn: Any
    captured: tuple[Any, ...]
    held: tuple[Any, ...]
    held_by_name: dict[str, Any]
    given: tuple[Any, ...]
    named: dict[str, Any]

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> _Call:
        return cls(*children)

    @property
    def fixed_leaves(self) -> int:
        """How many leaves are not of the arguments; they come first."""
        return sum(map(_count, (self.fn, self.captured, self.held, self.held_by_name)))

    def numbers(self, leaves: int) -> frozenset[int]:
        """The leaves in which a Python number is an input."""
        found = list[int]()
        start = self.fixed_leaves
        for x in jax.tree.leaves((self.given, self.named), is_leaf=_is_boundary):
            size = _count(x)
            if not equinox_modules.is_module(x):
                found += range(start, start + size)
            start += size
        assert start == leaves
        return frozenset(found)

    def leaves_of(self, by_function: Names, by_arguments: Names) -> frozenset[int]:
        """The leaves of some arguments.

        Args:
          by_function: by the numbers and names that `fn` has for them.
          by_arguments: by those among `given` and `named`.
        """
        found = set[int]()
        before = len(self.held)
        numbers = {*_counted(by_function[0], before + len(self.given))}
        numbers |= {before + i for i in _counted(by_arguments[0], len(self.given))}
        names = {*by_function[1], *by_arguments[1]}
        start = _count(self.fn) + _count(self.captured)
        parts = [*((i in numbers, x) for i, x in enumerate(self.held))]
        parts += [(name in names, self.held_by_name[name]) for name in sorted(self.held_by_name)]
        parts += [(before + i in numbers, x) for i, x in enumerate(self.given)]
        parts += [(name in names, self.named[name]) for name in sorted(self.named)]
        for chosen, x in parts:
            size = _count(x)
            found |= set(range(start, start + size)) if chosen else set()
            start += size
        return frozenset(found)

    def with_static(self, by_function: Names, by_arguments: Names) -> _Call:
        """The same, with static arguments that are leaves, as they are."""
        before = len(self.held)
        numbers = {i - before for i in _counted(by_function[0], before + len(self.given))}
        numbers |= {*_counted(by_arguments[0], len(self.given))}
        names = {*by_function[1], *by_arguments[1]}
        given = tuple(_Static(x) if i in numbers else x for i, x in enumerate(self.given))
        named = {name: _Static(x) if name in names else x for name, x in self.named.items()}
        return dataclasses.replace(self, given=given, named=named)

    def realized(self) -> tuple[_Call, Callable[[], list[str]]]:
        """The call of objects and closures made anew, and a check that names the variables that it assigned."""
        fn: Any = self.fn
        assigned: Callable[[], list[str]] = list
        if isinstance(fn, Captured):
            fn, assigned = fn.replaced(tuple(map(_realized, self.captured)))
        held, given = (tuple(map(_realized, part)) for part in (self.held, self.given))
        named = {name: _realized(x) for name, x in self.named.items()}
        return _Call(_realized(fn), self.captured, held, self.held_by_name, given, named), assigned

    def __call__(self) -> Any:
        return self.fn(*self.held, *self.given, **self.held_by_name, **self.named)


@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that is static as a whole: a leaf."""

    value: Any


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class _Instance:
    """An object of a plain class, by its attributes."""

    original: Any
    attributes: dict[str, Any]
    made: list[Any] = dataclasses.field(default_factory=list)

    def tree_flatten(self) -> tuple[tuple[Any], _ByIdentity]:
        return (self.attributes,), _ByIdentity(self.original)

    @classmethod
    def tree_unflatten(cls, original: _ByIdentity, children: Sequence[Any]) -> _Instance:
        return cls(original.value, *children)

    @property
    def target(self) -> Any:
        """The object that a function has before it."""
        return self.made[0] if self.made else self.original

    def realized(self) -> Any:
        """A new object with these attributes."""
        new = object.__new__(type(self.original))
        new.__dict__.update(self.attributes)
        self.made.append(new)
        return new


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _opened(fn: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> _Call:
    held, held_by_name = tuple[Any, ...](), dict[str, Any]()
    inner: Any = fn
    while isinstance(inner, functools.partial | types.MethodType):
        if isinstance(inner, types.MethodType):
            inner, held = inner.__func__, (_object(inner.__self__), *held)
        else:
            inner, held, held_by_name = inner.func, (*inner.args, *held), {**inner.keywords, **held_by_name}
    if not isinstance(inner, types.FunctionType):
        return _Call(_object(inner), (), held, _without(held_by_name, named), given, named)
    found = captured.find(inner, _is_state) if flax_modules.is_loaded() else None
    state = tuple(map(_object, found.values)) if found else ()
    return _Call(found if state else inner, state, held, _without(held_by_name, named), given, named)


def _is_state(x: Any) -> bool:
    """Whether it is to be among the inputs where a function captured it: modules, and objects that hold them."""
    opened = _object(x)
    return has_state(opened.attributes if isinstance(opened, _Instance) else x)


def _without(held: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in held.items() if name not in named}


def _object(x: Any) -> Any:
    """An object whose attributes hold arrays or state, by these; anything else as it is."""
    if isinstance(x, type | types.ModuleType) or lowering_compat.is_jitted(x) or is_library_jitted(x):
        return x
    if flax_modules.is_node(x) or not jax.tree_util.all_leaves([x]) or not hasattr(x, "__dict__"):
        return x
    try:
        object.__new__(type(x))
    except TypeError:  # it is more than its attributes, as a dict of a class of its own is
        return x
    attributes = dict(vars(x))
    held = jax.tree.leaves(attributes, is_leaf=flax_modules.is_node)
    return _Instance(x, attributes) if any(isinstance(y, jax.Array) or flax_modules.is_node(y) for y in held) else x


def _realized(x: Any) -> Any:
    if isinstance(x, _Static):
        return x.value
    if isinstance(x, _Instance):
        return x.realized()
    return x


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a library's jit says of arguments, by the numbers and names that its function has for them."""

    static: Names = NONE
    donated: Names = NONE
    numbers_are_static: bool = False


def _options(call: _Call) -> _Options:
    if (jitted := flax_modules.jitted(call.fn)) is not None:
        return _Options(lowering_compat.static_arguments(jitted), lowering_compat.donated_arguments(jitted))
    if equinox_modules.is_jitted(call.fn):
        args, kwargs = (*call.held, *call.given), {**call.held_by_name, **call.named}
        return _Options(donated=equinox_modules.donated(call.fn, args, kwargs), numbers_are_static=True)
    return _Options()


# What is traced.


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A call without its arrays.

    Attributes:
      leaves: how many `tree` has.
      sizes: of the leaves that are nodes of flax.nnx: how many leaves of its own each has.
      graphs: of these nodes.
      constants: what is no input, by the place: of the leaf, and within its node.
      places: of the inputs.
      donated: of each input.
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
        if flax_modules.is_loaded():
            own = [[at[i, j] for j in range(size)] for i, size in self.sizes.items()]
            nodes, merged = flax_modules.merge(self.graphs, own)
        node_of = dict(zip(self.sizes, nodes, strict=True))
        leaves = [node_of[i] if i in node_of else at[i, 0] for i in range(self.leaves)]
        opened = jax.tree.unflatten(self.tree, leaves)
        call, assigned = opened.realized()
        before = _snapshots(opened)
        with _explained():
            result = call()
        if names := assigned():
            raise SchedulerError(
                f"the function assigns {', '.join(names)} outside of itself, which cannot be carried out of a trace: "
                "return what is new"
            )
        kept = [x for x, donated in zip(arrays, self.donated, strict=True) if not donated]
        packing = _Packing(tuple(arrays), nodes, {id(x) for x in kept})
        packed = packing.pack(result, "")
        changes = {i: change for i, change in enumerate(_changes(before, packing)) if change}
        graphs, node_leaves = tuple[Any, ...](), list[tuple[Any, ...]]()
        if packing.nodes:
            again = flax_modules.split_again(packing.nodes, merged)
            graphs = again.graphs
            node_leaves = [tuple(packing.leaf(x, " (updated state)") for x in own) for own in again.leaves]
        rest = _Rest(packed, graphs, tuple(node_leaves), changes)
        return Outputs(tuple(packing.outputs), tuple(packing.names), rest)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rest:
    """How outputs become a result and updates.

    Attributes:
      graphs, node_leaves: of the nodes of flax.nnx that went in, and of those that are new.
      changes: number of a container among the arguments -> what it holds now.
    """

    result: _Packed
    graphs: tuple[Any, ...]
    node_leaves: tuple[tuple[Any, ...], ...]
    changes: Mapping[int, _Change]


# A leaf: ("output", n), ("input", n), ("node", n) or ("static", value).
_Spec = tuple[str, Any]


def _value(spec: _Spec, available: tuple[Sequence[Any], Sequence[Any]], nodes: Sequence[Any]) -> Any:
    kind, x = spec
    outputs, inputs = available
    if kind == "static":
        return x
    return (outputs if kind == "output" else inputs if kind == "input" else nodes)[x]


@dataclasses.dataclass(frozen=True, eq=False)
class _Packed:
    """A pytree whose arrays are elsewhere."""

    tree: Any
    leaves: tuple[_Spec, ...]

    def restored(self, available: tuple[Sequence[Any], Sequence[Any]], nodes: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, [_value(spec, available, nodes) for spec in self.leaves])


class _Packing:
    """Collects the outputs of a trace.

    Attributes:
      nodes: of flax.nnx: those that went in, and new ones.
    """

    def __init__(self, inputs: Sequence[Any], nodes: Sequence[Any], kept: set[int] | None = None) -> None:
        self.outputs: list[Any] = []
        self.names: list[str] = []
        self.nodes = list(nodes)
        # What is returned as it came needs no copy; what is donated has no other.
        self._inputs = {
            id(x): i for i, x in enumerate(inputs) if isinstance(x, jax.core.Tracer) and id(x) in (kept or ())
        }

    def pack(self, tree: Any, name: str) -> _Packed:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=flax_modules.is_node)
        return _Packed(treedef, tuple(self.leaf(x, name + jax.tree_util.keystr(path)) for path, x in leaves))

    def leaf(self, x: Any, name: str) -> _Spec:
        if flax_modules.is_node(x):
            known = next((i for i, node in enumerate(self.nodes) if node is x), None)
            if known is None:
                known = len(self.nodes)
                self.nodes.append(x)
            return "node", known
        if not _is_array(x):
            return "static", x
        if id(x) in self._inputs:
            return "input", self._inputs[id(x)]
        self.outputs.append(x)
        self.names.append(name)
        return "output", len(self.outputs) - 1


# Containers that a function may change in place: dicts, lists, and objects with attributes.


@dataclasses.dataclass(frozen=True, eq=False)
class _Change:
    """What a container holds after a call: by its keys, an old key whose value it is, or a new value."""

    entries: Mapping[Any, _Packed | _Old]

    def write(self, container: Any, restored: Callable[[_Packed], Any]) -> None:
        old = _contents(container)
        new = {key: restored(x) if isinstance(x, _Packed) else old[x.key] for key, x in self.entries.items()}
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


def _snapshots(tree: Any) -> list[tuple[Any, Mapping[Any, Any]]]:
    return [(x, _contents(x)) for x in _containers(tree)]


def _changes(before: Sequence[tuple[Any, Mapping[Any, Any]]], packing: _Packing) -> Iterator[_Change | None]:
    """Of each container what it holds now; None where that is what it held."""
    for container, old in before:
        new = _contents(container)
        if old.keys() == new.keys() and all(old[key] is x for key, x in new.items()):
            yield None
            continue
        moved = {id(x): key for key, x in old.items() if isinstance(x, jax.Array) or not jax.tree_util.all_leaves([x])}

        def entry(key: Any, x: Any, old: Any = old, moved: Any = moved) -> _Packed | _Old:
            if key in old and old[key] is x:
                return _Old(key)
            return _Old(moved[id(x)]) if id(x) in moved else packing.pack(x, f" (updated {key!r})")

        yield _Change({key: entry(key, x) for key, x in new.items()})


def _containers(x: Any) -> Iterator[Any]:
    """Those within a pytree, itself among them, in the order in which JAX takes it apart."""
    if flax_modules.is_node(x) or isinstance(x, _ARRAYS):
        return
    if isinstance(x, dict | list | _Instance) or _has_mutable_attributes(x):
        yield x
    inside = x.attributes if isinstance(x, _Instance) else x
    for y in jax.tree.leaves(inside, is_leaf=lambda y: y is not inside):
        if y is not inside:
            yield from _containers(y)


def _has_mutable_attributes(x: Any) -> bool:
    parameters = getattr(type(x), "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen and not jax.tree_util.all_leaves([x])


def _contents(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container if isinstance(container, dict) else vars(_target(container)))


def _target(container: Any) -> Any:
    return container.target if isinstance(container, _Instance) else container


# Leaves.


@dataclasses.dataclass(frozen=True)
class _Name:
    text: str

    def __str__(self) -> str:
        return self.text


def _is_array(x: Any) -> bool:
    return isinstance(x, _ARRAYS) and not (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm")


def _is_boundary(x: Any) -> bool:
    return flax_modules.is_node(x) or equinox_modules.is_module(x)


def _count(tree: Any) -> int:
    return len(jax.tree.leaves(tree, is_leaf=flax_modules.is_node))


def _counted(numbers: Sequence[int], length: int) -> list[int]:
    return [i % length for i in numbers if -length <= i < length]


def _key(x: Any, *, by_identity: bool) -> Hashable:
    """Equal for constants that make the same program: 1, 1.0 and True do not, and neither do 0.0 and -0.0."""
    if isinstance(x, float | complex):
        return type(x), repr(x)
    try:
        hash(x)
    except TypeError:
        if by_identity:
            return _ByIdentity(x)
        what = x.value if isinstance(x, _Static) else x
        raise TypeError(
            f"an argument holds a {type(what).__qualname__}, which is no array, and so part of the program; as such it "
            f"must be hashable: {what!r:.100}"
        ) from None
    return type(x), x
