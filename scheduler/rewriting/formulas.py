"""Changes equations that XLA computes faster in another form: scatters, unaligned products, stored activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.recognise import Graph, Inlined, Node, Value, equations_between, number
from search_spaces.row_alignment import ROW_BYTES, row_alignment


def other_form(node: Node, platform: str) -> tuple[Callable[..., list[jax.Array]], str] | None:
    """Returns a function that computes an equation faster, and its description for a report; None if there is none."""
    if (found := as_selection(node)) is not None:
        return found, f"scatter of one number per row into {_type_text(node.inputs[0])}, as a selection"
    if platform in PLATFORMS and (found := as_padded(node)) is not None:
        return found, f"product of {' and '.join(map(_type_text, node.inputs))}, padded to aligned rows"
    return None


def _type_text(x: Value) -> str:
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


# ------------------------------------------------------------------------------
# Scatters of one number per row, as in the gradient of `jnp.take_along_axis`, are computed elementwise.


def as_selection(node: Node) -> Callable[..., list[jax.Array]] | None:
    """Returns ``f(zeros, indices, updates)``, which computes a scatter as a selection; None for any other equation.

    The scatter adds one number to each row of zeros. XLA runs a scatter as a kernel of its own, which reads and writes
    the whole array. A selection is fused with the equations that read it, so the array is never stored.
    """
    if node.name != "scatter-add" or number(node.inputs[0]) != 0:
        return None
    zeros, indices, _ = node.inputs
    how = node.params["dimension_numbers"]
    if how.update_window_dims or len(how.scatter_dims_to_operand_dims) != 1:
        return None
    (axis,) = how.scatter_dims_to_operand_dims
    row_of = dict(zip(how.operand_batching_dims, how.scatter_indices_batching_dims, strict=True))
    rows = [i for i in range(len(zeros.shape)) if i != axis]
    # Two numbers for one row could have the same index, and would have to be added.
    if sorted(row_of) != rows or math.prod(indices.shape) != math.prod(zeros.shape[i] for i in rows):
        return None
    others = [i for i in range(len(indices.shape) - 1) if i not in row_of.values()]
    order = (*(row_of[i] for i in rows), *others)
    shape = tuple(1 if i == axis else n for i, n in enumerate(zeros.shape))

    def by_row(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(
            lax.reshape(lax.transpose(x, order), shape), zeros.shape, tuple(range(len(zeros.shape)))
        )

    def select(_: jax.Array, indices: jax.Array, updates: jax.Array) -> list[jax.Array]:
        at = lax.squeeze(indices, (indices.ndim - 1,))
        if at.dtype.itemsize < 4:  # the extent may exceed its range
            at = lax.convert_element_type(at, jnp.int32)
        if node.params["mode"] == lax.GatherScatterMode.CLIP:
            at = lax.clamp(jnp.array(0, at.dtype), at, jnp.array(zeros.shape[axis] - 1, at.dtype))
        hit = lax.eq(lax.broadcasted_iota(at.dtype, zeros.shape, axis), by_row(at))
        return [lax.select(hit, by_row(updates), jnp.zeros(zeros.shape, zeros.dtype))]

    return select


# ------------------------------------------------------------------------------
# Products with rows that are not aligned in memory are padded: 50257 columns of a vocabulary become 50304.
#
# XLA's products are slower if rows do not begin at multiples of `ROW_BYTES` (`scheduler/model/library.py`). Only
# products that stay with XLA come here. Where our kernel is faster than XLA with unaligned rows, it is also faster than
# a padded product: it copies no result (H200: 108 us, and 132 padded, for 512 x 50257 x 768). The rule is fixed,
# because a rewrite needs no chip. It agrees with the model on measured shapes (`tests/functions/test_aligned.py`).

PLATFORMS = frozenset({"cuda"})
# Padded extents: the largest of these multiples that adds at most this share.
MULTIPLES, MOST_ADDED = (128, 64, 32, 16, 8), 0.01
# A product with a smaller extent is limited by memory, and a padded copy of an operand would cost more than it gains.
LEAST_EXTENT = 512


def as_padded(node: Node) -> Callable[..., list[jax.Array]] | None:
    """Returns ``f(lhs, rhs)``, which computes a product with padded extents; None for any other equation."""
    if node.name != "dot_general":
        return None
    lhs, rhs = node.inputs
    (of_lhs, of_rhs), batch = node.params["dimension_numbers"]
    if any(batch) or lhs.dtype != rhs.dtype or jnp.dtype(lhs.dtype).itemsize != 2:
        return None
    (result,) = node.results
    axes = _axes(lhs, of_lhs, "m"), _axes(rhs, of_rhs, "n")
    of_result = [axis for operand in axes for axis in operand if axis[0] != "k"]
    extents: dict[Any, int] = {}
    sizes = {"m": 1, "n": 1, "k": 1}
    for x, named in ((lhs, axes[0]), (rhs, axes[1]), (result, of_result)):
        if not named:
            return None
        if row_alignment(x) < ROW_BYTES:
            extents[named[-1]] = _padded(x.shape[-1])
    for name in sizes:
        x, named = (rhs, axes[1]) if name == "n" else (lhs, axes[0])
        sizes[name] = math.prod(n for n, axis in zip(x.shape, named, strict=True) if axis[0] == name)
    if not extents or 0 in extents.values() or min(sizes.values()) < LEAST_EXTENT:
        return None

    def product(*operands: jax.Array) -> list[jax.Array]:
        wide = []
        for x, named in zip(operands, axes, strict=True):
            added = [(0, extents.get(axis, n) - n, 0) for n, axis in zip(x.shape, named, strict=True)]
            wide.append(lax.pad(x, jnp.zeros((), x.dtype), added) if any(n for _, n, _ in added) else x)
        found = node.equation.primitive.bind(*wide, **node.params)
        if found.shape != result.shape:  # without a barrier, XLA would slice the operands instead
            found = lax.slice(lax.optimization_barrier(found), (0,) * found.ndim, result.shape)
        return [found]

    return product


def _axes(x: Value, contracted: tuple[int, ...], free: str) -> list[tuple[str, int]]:
    """Returns a name for each axis of an operand: of the contracted axes by their order, of others by their place."""
    return [("k", contracted.index(i)) if i in contracted else (free, i) for i in range(len(x.shape))]


def _padded(extent: int) -> int:
    """Returns the padded extent; 0 if each multiple adds too much."""
    rounded = (-(-extent // multiple) * multiple for multiple in MULTIPLES)
    return next((n for n in rounded if n <= (1 + MOST_ADDED) * extent), 0)


# ------------------------------------------------------------------------------
# A backward pass reads values of an activation, and can compute them again from an array that it reads in any case.
#
# The gradient of GELU reads its argument and functions of the tanh in it. XLA computes a tanh once only: it stores
# those functions in the forward pass, and reads them in the backward pass. The tanh takes less time than that traffic.

# Elementwise primitives that XLA computes in several fusions rather than once, and those that it does not.
_CHEAP_NAMES = """
    abs add add_any and clamp convert_element_type copy div eq ge gt integer_pow le lt max min mul ne neg not
    one_minus_square or select_n sign square stop_gradient sub
"""
_CHEAP = frozenset(_CHEAP_NAMES.split())
_EXPENSIVE_NAMES = """
    cos erf erfc exp exp2 expm1 log log1p logistic pow rsqrt sin sqrt tan tanh
"""
_EXPENSIVE = frozenset(_EXPENSIVE_NAMES.split())
_ELEMENTWISE = _CHEAP | _EXPENSIVE
# Fewer elements stay in the caches of a chip.
FEWEST = 2**20
# An operand with at most this share of the elements, such as a bias, may be read again.
SMALL = 1 / 64
# Limit of the equations in sequence from the root.
MOST_STEPS = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputed:
    """An array that the backward pass computes again.

    Attributes:
      root: the array of as many elements that it is computed from.
      nodes: the equations that compute it from the root and small arrays, in order.
      small: those small arrays.
    """

    value: Value
    root: Value
    nodes: tuple[Node, ...]
    small: tuple[Value, ...]

    @property
    def expensive(self) -> Node | None:
        """The first equation that XLA would compute only once; None if there is none."""
        large = (node for node in self.nodes if math.prod(node.results[0].shape) >= FEWEST)
        return next((node for node in large if node.name in _EXPENSIVE), None)

    @property
    def text(self) -> str:
        """Describes the expensive equation for a report."""
        assert self.expensive is not None
        return f"{self.expensive.name} of {_type_text(self.expensive.results[0])}, computed again in the backward pass"


def backward(items: Iterable[Node | Inlined], is_backward: Callable[[Any], bool], inside: bool = False) -> set[int]:
    """Returns the ``id`` of each equation and call of a backward pass."""
    found = set[int]()
    for item in items:
        own = inside or is_backward(item.equation)
        if own:
            found.add(id(item))
        if isinstance(item, Inlined):
            found |= backward(item.items, is_backward, own)
    return found


def recomputed(graph: Graph, of_backward: set[int]) -> Iterator[Recomputed]:
    """Yields the arrays that equations of a backward pass should compute again.

    Args:
      of_backward: the ``id`` of each of these equations.
    """
    origins = _Origins(of_backward)
    for node in graph.nodes:  # in order, so that no recursion is deep
        for x in node.results:
            origins.of(x)
    read = [
        x
        for node in graph.nodes
        if id(node) not in of_backward and node.name in _ELEMENTWISE
        for x in node.results
        if math.prod(x.shape) >= FEWEST and any(id(user) in of_backward for user in node.users)
    ]
    # Arrays that are stored in any case: other results, and operands of products.
    returned = {id(x) for x in graph.results}
    free = [x for x in read if id(x) not in returned and x.node and all(u.name in _ELEMENTWISE for u in x.node.users)]
    found = list[Recomputed]()
    for x in free:
        if (root := origins.of(x)) is not x:
            small = origins.small(x, root)
            found.append(Recomputed(x, root, tuple(equations_between([x], [root, *small])), tuple(small)))
    # XLA itself computes cheap functions again, from the root, which is then read.
    stored = {id(x) for node in graph.nodes if id(node) in of_backward for x in node.inputs}
    stored |= {id(each.root) for each in found if each.expensive is None}
    # XLA computes elementwise roots within the equations that read them.
    roots = {id(x.root) for x in found if x.expensive and (x.root.node is None or x.root.node.name not in _ELEMENTWISE)}
    yield from (each for each in found if id(each.root) in roots & stored)


class _Origins:
    """The array that each large array is an elementwise function of, besides small arrays."""

    def __init__(self, of_backward: set[int]) -> None:
        self._of_backward = of_backward
        self._known: dict[int, Value] = {}
        self._steps: dict[int, int] = {}

    def of(self, x: Value) -> Value:
        """Returns the root of a large array: the array itself if it is no elementwise function of one array."""
        if id(x) not in self._known:
            self._known[id(x)] = self._found(x)
        return self._known[id(x)]

    def _found(self, x: Value) -> Value:
        node = x.node
        if node is None or node.name not in _ELEMENTWISE or id(node) in self._of_backward:
            return x
        large = [each for each in node.inputs if not _is_small(each, x) and not _is_broadcast(each)]
        roots = {id(root): root for root in map(self.of, large)}
        if len(roots) != 1:
            return x
        (root,) = roots.values()
        steps = 1 + max(self._steps.get(id(each), 0) for each in large)
        if root.shape != x.shape or steps > MOST_STEPS:
            return x
        self._steps[id(x)] = steps
        return root

    def small(self, x: Value, root: Value) -> list[Value]:
        """Returns the small arrays that `x` is computed from besides its root."""
        found: dict[int, Value] = {}
        left, seen = [x], set[int]()
        while left:
            value = left.pop()
            if value is root or value.literal is not None or id(value) in seen:
                continue
            seen.add(id(value))
            if _is_broadcast(value):
                assert value.node is not None
                left.append(value.node.inputs[0])
            elif _is_small(value, x):
                found[id(value)] = value
            else:
                assert value.node is not None
                left += value.node.inputs
        return list(found.values())


def _is_small(x: Value, other: Value) -> bool:
    return math.prod(x.shape) <= SMALL * math.prod(other.shape)


def _is_broadcast(x: Value) -> bool:
    node = x.by("broadcast_in_dim")
    return node is not None and _is_small(node.inputs[0], x)
