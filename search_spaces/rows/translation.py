"""Translation of a row's jaxpr: its arrays as blocks of a program's values, and a table of rules, one a primitive."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.derivative_rules import as_selection
from search_spaces.recognise import Inlined, Node, Value, graph
from search_spaces.rows.builder import Builder, NoProgram, number_of
from search_spaces.rows.elementwise import EXACT, is_elementwise
from search_spaces.rows.program import Atom, Number

LEAST_COLUMNS = 16  # shorter vectors are rows, or halves of rows, but no other parts of them
MOST_PARTS = 16


@dataclasses.dataclass(frozen=True)
class Array:
    """A value of the jaxpr as values of the program.

    Attributes:
      blocks: an object array of atoms. With `vector`, its last axis counts blocks of `columns` elements.
      vector: whether the last axis of the array is an axis of columns.
      mapped: whether the array has an axis of segments, which is not in `blocks`: rows are then segments.
      summed: whether it is a sum over the segments, which the sum over all rows includes.
    """

    blocks: Any
    vector: bool
    mapped: bool = False
    summed: bool = False


# Returns the results of an equation, of arrays for its operands.
Rule = Callable[..., Array | list[Array]]
F = TypeVar("F", bound=Rule)
RULES: dict[str, Rule] = {}  # by the name of the primitive


def rule(*names: str) -> Callable[[F], F]:
    """Adds a function ``rule(t, node, *arrays)`` to `RULES`."""

    def add(function: F) -> F:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def per_element(*names: str) -> Callable[[Callable[..., Atom]], Rule]:
    """Adds a rule that computes each element alone: ``function(t, node, *atoms)``."""

    return lambda function: rule(*names)(lambda t, node, *arrays: t.map(functools.partial(function, t, node), *arrays))


class Trace:
    """A jaxpr during the translation of its equations.

    Attributes:
      make: the equations.
      segments: number and length of the segments of a row that are rows of their own, or None.
      columns: elements of a vector.
      arrays: the values of the jaxpr that are known.
    """

    def __init__(self, make: Builder, segments: tuple[int, int] | None) -> None:
        self.make, self.emit, self.columns, self.segments = make, make.emit, make.columns, segments
        self.arrays: dict[Value, Array] = {}

    def array(self, value: Value) -> Array:
        """Returns a value of the jaxpr."""
        if value in self.arrays:
            return self.arrays[value]
        if value.literal is None:
            raise NoProgram("reads an array that it captures: pass the array as an argument")
        if is_key(value):
            raise NoProgram(ONE_KEY)
        if isinstance(value.literal, jax.core.Tracer):
            raise NoProgram("captures a value that JAX traces: pass it as an argument")
        number = np.asarray(value.literal)
        if number.size == 1:
            return Array(objects([number_of(number.reshape(()))], value.shape), vector=False)
        if number.size and (number == number.flat[0]).all():
            return self.full(number_of(number.flat[0]), value.shape)
        raise NoProgram(f"captures an array of shape {number.shape}: pass the array as an argument")

    def read(self, node: Node) -> None:
        """Translates an equation.

        Raises:
          NoProgram: kernels on rows do not compute this.
        """
        for result in node.results:
            unused = result.node is not None and not result.node.users
            if result.dtype != jnp.uint32 and not is_key(result) and not unused:
                require_narrow(result.dtype)
        if node.name not in OF_UNSIGNED and any(x.dtype == jnp.uint32 for x in node.inputs):
            raise NoProgram(f"uses {node.name} of uint32: convert to int32 first")
        if node.name not in RULES:
            raise NoProgram(f"uses {node.name}, which kernels on rows do not compute")
        found = RULES[node.name](self, node, *map(self.array, node.inputs))
        arithmetic = node.name == "scatter_add" or (is_elementwise(node.name) and node.name not in EXACT)
        if isinstance(found, Array) and arithmetic and not found.summed:
            found = self.map(lambda atom: self.make.stored(atom, node.results[0].dtype), found)
        self.arrays.update(zip(node.results, found if isinstance(found, list) else [found], strict=False))

    def inlined(self, function: Callable[..., Any], *arrays: Array) -> Array:
        """Returns the result of a function of uint32 arrays."""
        traced, nodes = nodes_of(
            jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.blocks.shape, jnp.uint32) for x in arrays))
        )
        self.arrays.update(zip(traced.inputs, arrays, strict=True))
        for node in nodes:
            self.read(node)
        return self.array(traced.results[0])

    def map(self, emit: Callable[..., Atom], *arrays: Array) -> Array:
        """Applies an equation to arrays of the same shape, or scalars."""
        if any(x.summed for x in arrays):
            raise NoProgram("computes with a sum over segments")
        shaped = [x for x in arrays if x.blocks.size > 1 or x.vector or x.mapped]
        vector = any(x.vector for x in shaped)
        if any(x.vector != vector and x.blocks.size > 1 for x in shaped):
            raise NoProgram("joins rows with elements per row")
        return Array(
            np.asarray(np.frompyfunc(emit, len(arrays), 1)(*broadcast([x.blocks for x in arrays])), object),
            vector,
            any(x.mapped for x in arrays),
        )

    def full(self, atom: Atom, shape: tuple[int, ...]) -> Array:
        """Returns an array of equal elements."""
        if self.segments is not None:
            vector = shape != () and shape[-1] in (self.columns, math.prod(self.segments))
            return Array(objects([atom], (1,)), vector, mapped=shape != () and math.prod(shape) > self.columns)
        vector = shape != () and shape[-1] >= self.columns and shape[-1] % self.columns == 0
        blocks = (*shape[:-1], shape[-1] // self.columns) if vector else shape
        return Array(objects([atom] * math.prod(blocks), blocks), vector)

    def column(self, part: int, dtype: Any = np.int32) -> Atom:
        """Returns the column of each element of a part of a row."""
        column = self.emit("index", dtype="int32")
        if part:
            column = self.emit("add", column, Number(float(part * self.columns), "int32"))
        return self.make.convert(column, "int32", dtype)


def no_shape(node: Node) -> NoReturn:
    shapes = " and ".join(str(x.shape) for x in node.inputs)
    raise NoProgram(f"uses {node.name} of {shapes} to {node.results[0].shape}, which kernels on rows do not compute")


def objects(atoms: Sequence[Any], shape: Any) -> Any:
    made = np.empty(len(atoms), object)
    for place, atom in enumerate(atoms):
        made[place] = atom
    return made.reshape(shape)


def broadcast(blocks: Sequence[Any]) -> Sequence[Any]:
    """Gives arrays of one element the shape of the others."""
    shape = max((x.shape for x in blocks), key=lambda shape: (math.prod(shape), len(shape)))
    return [x if x.shape == shape else np.broadcast_to(x.reshape(-1) if x.size == 1 else x, shape) for x in blocks]


# ------------------------------------------------------------------------------
# Equations in order, and the dtypes of their arrays.


def nodes_of(jaxpr: Any) -> tuple[Any, list[Node]]:
    """Returns the graph of a jaxpr, and its equations in order."""
    traced = graph(jaxpr.jaxpr, _constants(jaxpr))
    return traced, list(_nodes(traced.items))


# JAX 0.12 differentiates the error function by exp(-x^2), and computes that from the bits of x. A random word is one
# equation in place of a hundred, so that the text of a program stays short.
_WHOLE = frozenset({"exp_neg_sq", "threefry2x32_13", "threefry2x32_20"})


def _nodes(items: Iterable[Node | Inlined]) -> Iterator[Node]:
    """Yields equations in order, with inlined calls replaced by their bodies.

    Functions of `_WHOLE` stay one equation. Of `relu` the derivative is that of its rule, at ties, too.
    """
    for item in items:
        if isinstance(item, Node):
            yield item
        elif (name := _name_of_body(item.equation)) in _WHOLE:
            yield Node(name, item.equation, item.inputs, list(item.results))
        elif (selection := as_selection(item)) is not None:
            yield from selection
        else:
            yield from _nodes(item.items)


def _name_of_body(call: Any) -> str:
    body = call.params.get("call_jaxpr", call.params.get("jaxpr"))
    return str(getattr(getattr(getattr(body, "jaxpr", body), "debug_info", None), "func_name", ""))


def _constants(jaxpr: Any) -> dict[Any, Value]:
    return {
        var: Value(np.shape(x), x.dtype if is_key(x) else jnp.result_type(x), literal=x)
        for var, x in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    }


def require_narrow(dtype: Any) -> None:
    """Raises NoProgram for arrays of a dtype that programs do not have."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        raise NoProgram(f"has {dtype} arrays, whose arithmetic XLA does not wrap: convert to int8 first")
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise NoProgram(f"has {dtype} arrays, as random bits do")
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.dtype(dtype).itemsize > 4 or dtype == jnp.uint32:
        raise NoProgram(f"has {dtype} arrays: kernels on rows compute in float32 and int32")


def is_key(x: Any) -> bool:
    """Returns whether an array has random keys as elements."""
    return bool(jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key))


ONE_KEY = "makes a random key, of which all rows draw the same: take a key for each row as an argument"
COPIES = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "reshard", "pcast")
# The primitives that compute alike with signed and unsigned integers, or only move them. Programs have int32 alone.
OF_UNSIGNED = frozenset(
    {
        *COPIES,
        "add",
        "sub",
        "mul",
        "and",
        "or",
        "xor",
        "shift_left",
        "shift_right_logical",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    }
    | {"select_n", "convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "reshape", "squeeze", "slice"}
    | {"split", "concatenate", "stack", "unstack", "expand_dims", "dynamic_slice", "gather"}
    | {"random_wrap", "random_fold_in", "threefry2x32", "threefry2x32_13", "threefry2x32_20"}
)
