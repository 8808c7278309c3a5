"""Recognises the logits of attention in a jaxpr: their softmax between two products, their axes and their masks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.recognise import (
    Node,
    Unknown,
    Value,
    equations_between,
    evaluate,
    number,
    program_text,
    reduced,
    same,
    source,
    strip,
)

# ------------------------------------------------------------------------------
# The axes of the logits, in all arrays and products that are computed from them.

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
class LabelledArray:
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
            LabelledArray(other, joined(theirs[j] for j in range(len(other.shape)))),
            LabelledArray(node.results[0], joined(each for part in out for each in part)),
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
    other: LabelledArray
    out: LabelledArray


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


# ------------------------------------------------------------------------------
# The logits and their softmax.


@dataclasses.dataclass(frozen=True, eq=False)
class Logits:
    """The argument of an exponential.

    Attributes:
      product: ``q k^T``.
      steps: the equations after the product, the last one first.
    """

    product: Node
    steps: tuple[Node, ...] = ()


def logits_of(value: Value) -> Logits | None:
    """Returns the product that an array is computed from by steps that attention takes; None if there is none."""
    steps: list[Node] = []
    while True:
        node = strip(value).node
        if node is None:
            return None
        if node.name == "dot_general":
            return Logits(node, tuple(steps))
        if node.name in ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "tanh"):
            value = node.inputs[0]
        elif node.name in ("sub", "mul", "div", "add", "select_n"):
            before = [x for x in node.inputs if x.shape == node.results[0].shape and _reaches_product(x)]
            if len(before) != 1:
                return None
            value = before[0]
        else:
            return None
        steps.append(node)


def _reaches_product(value: Value) -> bool:
    """Returns whether an array of logits is computed from a product, and not from statistics of its rows."""
    while (node := strip(value).node) is not None:
        if node.name == "dot_general":
            return True
        if node.name not in ("transpose", "reshape", "sub", "mul", "div", "add", "select_n", "tanh", "squeeze"):
            same_size = math.prod(node.inputs[0].shape) == math.prod(node.results[0].shape)
            return node.name in ("broadcast_in_dim", "expand_dims") and same_size and _reaches_product(node.inputs[0])
        same_shape = [x for x in node.inputs if math.prod(x.shape) == math.prod(node.results[0].shape)]
        reaching = [x for x in same_shape if x.literal is None]
        if len(reaching) != 1:
            return any(_reaches_product(x) for x in reaching)
        value = reaching[0]
    return False


@dataclasses.dataclass(frozen=True, eq=False)
class Probabilities:
    """Probabilities, and the axis of keys along which they sum to one.

    Attributes:
      total: the sum of the exponentials, if the product with values is divided by the sum. The probabilities are then
        the exponentials. None if the exponentials are divided.
    """

    exp: Node
    probabilities: Value
    key: Axis
    total: Value | None = None


def softmax_of(exp: Node, labels: Labels) -> Probabilities | None:
    """Returns the softmax with this exponential; None if there is none."""
    exponential = exp.results[0]
    if (axes := labels.of(exponential)) is None:
        return None
    sums = []
    for value in _casts_below(exponential):
        for node in users(value):
            if node.name == "reduce_sum" and len(node.params["axes"]) == 1:
                sums.append(node)
            if (total := _total(node, value)) is None or (found := reduced(total, "reduce_sum")) is None:
                continue
            summed, axis = found
            if same(summed, exponential) and len(axes[axis]) == 1 and _less_of_rows(exp, labels, axes[axis][0]):
                return Probabilities(exp, node.results[0], axes[axis][0])
    for node in sums:
        keys = axes[node.params["axes"][0]]
        if len(keys) == 1 and _less_of_rows(exp, labels, keys[0]):
            return Probabilities(exp, exponential, keys[0], node.results[0])
    return None


def _casts_below(value: Value) -> list[Value]:
    found = [value]
    for each in found:  # grows meanwhile
        found += [user.results[0] for user in users(each) if user.name in ("convert_element_type", "stop_gradient")]
    return found


def _total(node: Node, value: Value) -> Value | None:
    """Returns the array that `node` divides `value` by; None if it does not."""
    if node.name == "div" and node.inputs[0] is value:
        return node.inputs[1]
    if node.name == "mul":
        other = next((x for x in node.inputs if x is not value), None)
        inverse = None if other is None else origin(other).by("div", "integer_pow")
        if inverse is not None and inverse.name == "div" and number(inverse.inputs[0]) == 1.0:
            return inverse.inputs[1]
        if inverse is not None and inverse.name == "integer_pow" and inverse.params["y"] == -1:
            return inverse.inputs[0]
    return None


def _less_of_rows(exp: Node, labels: Labels, key: Axis) -> bool:
    """Returns whether the exponent is the logits, less at most a number per row."""
    less = strip(exp.inputs[0]).by("sub")
    if less is None:
        return True
    axes = labels.of(less.inputs[1])
    return number(less.inputs[1]) is not None if axes is None else key not in joined(axes)


def origin(value: Value) -> Value:
    """Returns the array before casts and changes of its layout."""
    while (node := strip(value).node) is not None and node.name in (*LAYOUT, "broadcast_in_dim"):
        value = node.inputs[0]
    return strip(value)


def root(value: Value, dtype: Any) -> Value:
    """Returns the array before changes of its layout, and before casts to wider dtypes than `dtype`."""
    while (node := value.node) is not None:
        if node.name == "convert_element_type":
            before = node.inputs[0]
            if not is_widened(before.dtype, value.dtype) or not is_widened(dtype, before.dtype):
                return value
        elif node.name not in LAYOUT:
            return value
        value = node.inputs[0]
    return value


def is_widened(before: Any, after: Any) -> bool:
    """Returns whether a cast keeps all values."""
    before, after = jnp.dtype(before), jnp.dtype(after)
    return before == after or bool(
        jnp.issubdtype(before, jnp.floating)
        and jnp.issubdtype(after, jnp.floating)
        and jnp.promote_types(before, after) == after
    )


# ------------------------------------------------------------------------------
# Masks: the band of keys that each query sees.


# A constant of at most this value masks a logit, if no scale follows.
MASKED = -1e4
# Masks with more elements are not evaluated.
LARGEST = 2**28
# For ``x op y``: whether x is the larger one, and the least difference.
_COMPARISONS = {"ge": (True, 0), "gt": (True, 1), "le": (False, 0), "lt": (False, 1)}


class Band(NamedTuple):
    """Query i sees keys from ``i - left`` to ``i + right``; None means no bound."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Band) -> Band:
        pairs = zip(self, other, strict=True)
        return Band(*(min((x for x in pair if x is not None), default=None) for pair in pairs))


def band(which: Value, keeps: bool, axes: Sequence[str | None]) -> Band:
    """Returns the band of keys where `which` equals `keeps`.

    Args:
      axes: the meaning of each axis of `which`: "query", "key" or something else.

    Raises:
      Unknown: the mask is no band, or depends on an argument of the program.
    """
    base, where = source(which)
    along = [None if at is None else axes[at] for at in where]
    if (value := number(base)) is not None:
        if bool(value) != keeps:
            raise Unknown("its mask hides all keys")
        return Band()
    if (node := base.by("not")) is not None:
        return band(node.inputs[0], not keeps, along)
    if (node := base.by("and" if keeps else "or")) is not None:
        return band(node.inputs[0], keeps, along) & band(node.inputs[1], keeps, along)
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:  # as in `jnp.tril`
        no, yes = map(number, node.inputs[1:])
        if no is not None and bool(no) != keeps:
            return band(node.inputs[0], True, along) & band(node.inputs[2], keeps, along)
        if yes is not None and bool(yes) != keeps:
            return band(node.inputs[0], False, along) & band(node.inputs[1], keeps, along)
    if (found := _compared(base, keeps, along)) is not None:
        return found
    if (values := constant(base)) is None:
        raise Unknown("its mask depends on an argument")
    return _band_of(values.astype(bool) == keeps, along)


def bias_band(bias: Value, axes: Sequence[str | None], masked: float) -> Band:
    """Returns the band of keys where an added bias is zero, if all others are at most `masked`.

    Raises:
      Unknown: the bias has other values, or depends on an argument of the program.
    """
    base, where = source(bias)
    along = [None if at is None else axes[at] for at in where]
    if (node := base.by("select_n")) is not None and len(node.inputs) == 3:
        no, yes = map(constant, node.inputs[1:])
        if _is_zero(yes) and _is_masked(no, masked):
            return band(node.inputs[0], True, along)
        if _is_zero(no) and _is_masked(yes, masked):
            return band(node.inputs[0], False, along)
    values = constant(base)
    if values is None:
        raise Unknown("a bias is added to its logits")
    if not np.all((values == 0) | (values <= masked)):
        raise Unknown("a bias with other values than 0 and those of a mask is added to its logits")
    return _band_of(values == 0, along)


def _is_zero(values: Any) -> bool:
    return values is not None and bool(np.all(values == 0))


def _is_masked(values: Any, masked: float) -> bool:
    return values is not None and bool(np.all(values <= masked))


def _compared(base: Value, keeps: bool, axes: Sequence[str | None]) -> Band | None:
    """Returns the band of a comparison of query positions with key positions; None if `base` is no such comparison."""
    if base.node is None or base.node.name not in _COMPARISONS:
        return None
    larger, least = _COMPARISONS[base.node.name]
    found = [_position(each, axes) for each in base.node.inputs]
    if found[0] is None or found[1] is None:
        return None
    high, low = (found[0], found[1]) if larger else (found[1], found[0])
    if not keeps:  # if high - low >= least is false, then low - high >= 1 - least
        high, low, least = low, high, 1 - least
    least += low[1] - high[1]
    if (high[0], low[0]) == ("query", "key"):
        return Band(right=-least) if least <= 0 else None
    if (high[0], low[0]) == ("key", "query"):
        return Band(left=-least) if least <= 0 else None
    return None


def _position(value: Value, axes: Sequence[str | None]) -> tuple[str | None, int] | None:
    """Returns the axis along which the value counts, and its first number."""
    offset = 0.0
    base, where = source(value)
    while (node := base.by("add", "sub")) is not None:
        first, second = map(number, node.inputs)
        if second is not None:
            offset, before = offset + (second if node.name == "add" else -second), node.inputs[0]
        elif first is not None and node.name == "add":
            offset, before = offset + first, node.inputs[1]
        else:
            return None
        base, inner = source(before)
        where = tuple(None if at is None else where[at] for at in inner)
    if (node := base.by("iota")) is None:
        return None
    at = where[node.params["dimension"]]
    return (None if at is None else axes[at]), int(offset)


def _band_of(seen: np.ndarray[Any, Any], axes: Sequence[str | None]) -> Band:
    for i, axis in reversed(list(enumerate(axes))):
        if axis not in ("query", "key"):
            first = seen.take([0], i)
            if not np.all(seen == first):
                raise Unknown("its mask differs between heads or sequences")
            seen = first.squeeze(i)
    names = [axis for axis in axes if axis in ("query", "key")]
    if names == ["key", "query"]:
        seen = seen.T
    if np.all(seen):
        return Band()
    if len(names) < 2:
        raise Unknown("its mask hides the same keys from all queries")
    rows, columns = np.arange(seen.shape[0])[:, None], np.arange(seen.shape[1])[None, :]
    count, first = seen.sum(1), seen.argmax(1)
    if not np.all(count):
        raise Unknown("its mask hides all keys from a query")
    behind, ahead = (rows[:, 0] - first).max(), (first + count - 1 - rows[:, 0]).max()
    left = int(behind) if np.any(first > 0) else None
    right = int(ahead) if np.any(first + count < seen.shape[1]) else None
    expected = np.ones_like(seen)
    if left is not None:
        expected &= columns >= rows - left
    if right is not None:
        expected &= columns <= rows + right
    if (left is not None and left < 0) or (right is not None and right < 0) or not np.array_equal(expected, seen):
        raise Unknown("its mask is no band along the diagonal")
    return Band(left, right)


def constant(value: Value) -> np.ndarray[Any, Any] | None:
    """Returns the elements of an array that depends on no argument of the program; None for others and large ones."""
    try:
        order = equations_between([value], [])
    except Unknown:
        return None
    if any(math.prod(x.shape) > LARGEST for node in order for x in node.results):
        return None
    return _values(_ConstantProgram(tuple(order), value, program_text(order, [], [value])))


class _ConstantProgram:
    """Equations without arguments, compared by their text."""

    def __init__(self, order: tuple[Node, ...], value: Value, text: str) -> None:
        self.order, self.value, self.text = order, value, text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConstantProgram) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@functools.lru_cache(maxsize=64)
def _values(program: _ConstantProgram) -> np.ndarray[Any, Any] | None:
    if program.value.literal is not None:
        return np.asarray(program.value.literal)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.jit(lambda: evaluate(program.order, {}, [program.value])[0])())
