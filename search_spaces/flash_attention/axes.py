"""Follows the axes of attention's logits through a jaxpr, to all arrays and products computed from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from search_spaces.recognise import Node, Unknown, Value

# An axis of the logits: its extent, and its number among the axes of the first product.
Axis = tuple[int, int]
# The axes that an axis of an array combines, the outer one first. Axes of extent 1 are left out.
Axes = tuple[Axis, ...]
# The number of an axis of features, and of a query axis of extent 1.
FEATURES, NO_AXIS = -1, -2

# Primitives that keep the axes of an operand of the same shape.
_ELEMENTWISE = (
    frozenset(
        {"abs", "add", "add_any", "clamp", "div", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic"}
    )
    | {"max", "min", "mul", "neg", "pow", "reduce_precision", "rsqrt", "sign", "sqrt", "square", "sub", "tanh"}
    | {"and", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "select_n", "xor"}
    | {"convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "pvary", "sharding_constraint"}
    | {"stop_gradient"}
)
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"})
# Primitives that change only the layout of an array.
LAYOUT = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient", "name", "pvary"})


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """An array of the jaxpr.

    Attributes:
      axes: the axes of the logits, and the features, in the order in which the array stores them.
      factor: the array over that of the attention problem.
    """

    value: Value
    axes: Axes
    factor: float = 1.0


class Labels:
    """The arrays computed from the first product, up to other products, with the axes of the logits in each.

    Args:
      product: ``q k^T``. Its axes are numbered.
    """

    def __init__(self, product: Node) -> None:
        out = product.results[0]
        self._axes: dict[int, tuple[Axes, ...]] = {}
        self._values: list[Value] = []
        self._add(out, tuple(((n, i),) if n > 1 else () for i, n in enumerate(out.shape)))
        for value in self._values:  # grows meanwhile
            for node in users(value):
                for result, axes in zip(node.results, self._carried(node), strict=True):
                    if axes is not None and any(axes) and id(result) not in self._axes:
                        self._add(result, axes)

    def _add(self, value: Value, axes: tuple[Axes, ...]) -> None:
        self._axes[id(value)] = axes
        self._values.append(value)

    def of(self, value: Value) -> tuple[Axes, ...] | None:
        """Returns the axes of the logits that each axis of an array combines; None if they are not known."""
        return self._axes.get(id(value))

    def products(self) -> Iterator[Product]:
        """Yields the products with one operand that is computed from the logits."""
        seen = set[int]()
        for node in (user for value in self._values for user in users(value)):
            if node.name == "dot_general" and id(node) not in seen:
                seen.add(id(node))
                if (found := self._product(node)) is not None:
                    yield found

    def _carried(self, node: Node) -> list[tuple[Axes, ...] | None]:
        known = [(x, self._axes[id(x)]) for x in node.inputs if id(x) in self._axes]
        if elementwise(node):
            return [next((axes for x, axes in known if x.shape == result.shape), None) for result in node.results]
        value, axes = known[0]
        carried: tuple[Axes, ...] | None = None
        if node.name == "transpose":
            carried = tuple(axes[i] for i in node.params["permutation"])
        elif node.name in _REDUCTIONS:
            carried = tuple(each for i, each in enumerate(axes) if i not in node.params["axes"])
        elif node.name == "broadcast_in_dim":
            carried = _broadcast(value.shape, axes, node.results[0].shape, node.params["broadcast_dimensions"])
        elif node.name in ("reshape", "squeeze", "expand_dims"):
            carried = divided([axis for each in axes for axis in each], node.results[0].shape)
        return [carried] + [None] * (len(node.results) - 1)

    def _product(self, node: Node) -> Product | None:
        known = [i for i in (0, 1) if self.of(node.inputs[i]) is not None]
        if len(known) != 1:
            return None
        (side,) = known
        mine, other = self._axes[id(node.inputs[side])], node.inputs[1 - side]
        contract, batch = node.params["dimension_numbers"]
        theirs: dict[int, Axes] = {}
        for dims in (contract, batch):
            theirs |= {j: mine[i] for i, j in zip(dims[side], dims[1 - side], strict=True)}
        free = [mine[i] for i in range(len(mine)) if i not in (*contract[side], *batch[side])]
        features = [j for j in range(len(other.shape)) if j not in theirs]
        if sum(other.shape[j] > 1 for j in features) > 1:
            return None
        theirs |= {j: ((other.shape[j], FEATURES),) if other.shape[j] > 1 else () for j in features}
        of_features = [theirs[j] for j in features]
        out = (mine[i] for i in batch[side]), *((free, of_features) if side == 0 else (of_features, free))
        return Product(
            node,
            node.inputs[side],
            joined(mine[i] for i in contract[side]),
            Array(other, joined(theirs[j] for j in range(len(other.shape)))),
            Array(node.results[0], joined(each for part in out for each in part)),
        )


def joined(axes: Iterable[Axes]) -> Axes:
    return tuple(axis for each in axes for axis in each)


def users(value: Value) -> list[Node]:
    return [] if value.node is None else [user for user in value.node.users if any(x is value for x in user.inputs)]


def _broadcast(
    before: Sequence[int], axes: Sequence[Axes], shape: Sequence[int], dims: Sequence[int]
) -> tuple[Axes, ...]:
    found: list[Axes] = [()] * len(shape)
    for i, at in enumerate(dims):
        if before[i] == shape[at]:
            found[at] = axes[i]
    return tuple(found)


def divided(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axes, ...] | None:
    """Returns the axes that each axis of the new shape combines; None if an axis is divided."""
    rest, found = list(axes), list[Axes]()
    for extent in shape:
        taken: list[Axis] = []
        while math.prod(n for n, _ in taken) < extent and rest:
            taken.append(rest.pop(0))
        if taken and math.prod(n for n, _ in taken) != extent:
            return None
        found.append(tuple(taken))
    return None if rest else tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product with one operand that is computed from the logits.

    Attributes:
      operand: that operand.
      contracted: the axes of the logits that are summed over.
      other: the other operand.
      out: the result.
    """

    node: Node
    operand: Value
    contracted: Axes
    other: Array
    out: Array


def elementwise(node: Node) -> bool:
    """Returns whether an equation keeps the axes of an operand of the same shape."""
    return node.name in _ELEMENTWISE


def below(node: Node, axes: Axes) -> Axes:
    """Returns the axes of the result of an equation that changes at most the layout of an array with these axes."""
    if node.name != "transpose":
        return axes
    groups = divided(axes, node.inputs[0].shape)
    if groups is None:
        raise Unknown("its result is reshaped across heads")
    return joined(groups[i] for i in node.params["permutation"])


def above(node: Node, axes: Axes) -> Axes:
    """Returns the axes of the operand of an equation that changes at most the layout, from those of its result."""
    if node.name != "transpose":
        return axes
    groups = divided(axes, node.results[0].shape)
    if groups is None:
        raise Unknown("the cotangent of its result is reshaped across heads")
    before = dict(zip(node.params["permutation"], groups, strict=True))
    return joined(before[i] for i in range(len(before)))
