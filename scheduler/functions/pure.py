"""A call as a pure function of its arrays: what is static, and the state that it updates, stand apart.

This is the one place where a user's function and arguments become something that JAX traces, compares and runs several
times. Modules of flax.nnx are split outside and merged inside. What the function writes into them, or into dicts, lists
and objects among its arguments, is among the outputs, and `PureCall.finish` writes it where it belongs.
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
from scheduler.functions import equinox_modules, flax_modules
from scheduler.functions.call_tree import NONE, NUMBERS, Call, Names, is_array, jit_options, opened, static_key
from scheduler.functions.outputs import Outputs, Packing, Rest, changed, containers, snapshots, value_of_spec
from search_spaces import lowering_compat


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
    _call: Call
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
        constants = tuple(static_key(x, by_identity=i < fixed) for (i, _), x in program.constants.items())
        return program.tree, constants, program.graphs, program.places, self.donated

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """A context to compile and run `function` in for the first time: warns as the library's jit does."""
        return equinox_modules.donating_as(self._call.fn)

    def finish(self, outputs: Outputs) -> Any:
        """The result of `fn`, after what it updates was written into the modules and containers of this call."""
        rest = outputs.rest
        available = (outputs.arrays, self.arrays)
        leaves = [[value_of_spec(spec, available, ()) for spec in node] for node in rest.node_leaves]
        nodes = flax_modules.update(self._split, rest.graphs, leaves) if rest.graphs else []
        if rest.changes:
            given = list(containers(self._call))
            if any(sum(given[i] is other for other in given) > 1 for i in rest.changes):
                raise SchedulerError(
                    "the function changes a container that is twice among its arguments, which a compiled function "
                    "cannot tell apart: give it once, or return what is to change"
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
    """``fn(*args, **kwargs)`` as a pure function of the arrays in it, or of their shapes.

    Args:
      fn: plain, or jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`; a method, a partial, a module.
      static: arguments that are static as a whole.
      donated: arguments that the call donates, besides those that a library's jit donates.
      trace_numbers: whether Python numbers among the arguments are inputs, as for `jax.jit`. Those of an Equinox
        module, and all where `equinox.filter_jit` made `fn`, are static nevertheless.
    """
    call = opened(fn, tuple(args), dict(kwargs))
    jitted = jit_options(call)
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
            if is_array(x) or (i in traced and isinstance(x, NUMBERS)):
                places.append((i, j))
                arrays.append(x)
            else:
                constants[i, j] = x
    flags = tuple(i in donates for i, _ in places)
    sizes = {i: len(own) for i, own in of_node.items()}
    program = _Program(tree, len(leaves), sizes, split.graphs, constants, tuple(places), flags)
    return PureCall(program.run, tuple(arrays), flags, call, program, split)


def holds_arrays_or_state(fn: Callable[..., Any]) -> bool:
    """Whether a function is a module, or a method, a partial or a closure of one, whose arrays it should not embed."""
    if lowering_compat.is_jitted(fn):
        return False
    call = opened(fn, (), {})
    held = jax.tree.leaves(call, is_leaf=flax_modules.is_node)
    return any(isinstance(x, jax.Array) or flax_modules.is_node(x) for x in held)


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which raises `Impure` where a trace by `jax.jit` would lose an update or refuse a result."""

    @functools.wraps(fn, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        before = snapshots((args, kwargs))
        with _explained():
            result = fn(*args, **kwargs)
        if any(change for change in changed(before, Packing((), ()))):
            raise Impure
        if not all(
            is_array(x) or isinstance(x, NUMBERS) for x in jax.tree.leaves(result, is_leaf=flax_modules.is_node)
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
        before = snapshots(opened)
        with _explained():
            result = call()
        if names := assigned():
            raise SchedulerError(
                f"the function assigns {', '.join(names)} outside of itself, which cannot be carried out of a trace: "
                "return what is new"
            )
        kept = [x for x, donated in zip(arrays, self.donated, strict=True) if not donated]
        packing = Packing(tuple(arrays), nodes, {id(x) for x in kept})
        packed = packing.pack(result, "")
        changes = {i: change for i, change in enumerate(changed(before, packing)) if change}
        graphs, node_leaves = tuple[Any, ...](), list[tuple[Any, ...]]()
        if packing.nodes:
            again = flax_modules.split_again(packing.nodes, merged)
            graphs = again.graphs
            node_leaves = [tuple(packing.leaf(x, " (updated state)") for x in own) for own in again.leaves]
        rest = Rest(packed, graphs, tuple(node_leaves), changes)
        return Outputs(tuple(packing.outputs), tuple(packing.names), rest)
