"""Attributes the products after a softmax to the result and the gradients of attention, and finds their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from search_spaces.flash_attention.axes import (
    FEATURES,
    LAYOUT,
    Array,
    Axes,
    Axis,
    Labels,
    Product,
    above,
    below,
    elementwise,
    joined,
    users,
)
from search_spaces.flash_attention.logits import Softmax, origin
from search_spaces.recognise import Node, Unknown, Value, strip


def roles_of(softmax: Softmax, products: Sequence[Product], key: Axis, rows: set[Axis]) -> dict[str, Product | None]:
    """Attributes the products by the axes that they contract.

    Raises:
      Unknown: two products have the same role.
    """
    roles: dict[str, Product | None] = dict.fromkeys(("out", "dq", "dk", "dv"))
    for product in products:
        weights = origin(product.operand) is strip(softmax.probabilities)
        if set(product.contracted) == {key}:
            role = "out" if weights else "dq"
        elif set(product.contracted) == rows:
            role = "dv" if weights else "dk"
        else:
            continue
        if roles[role] is not None:
            raise Unknown("its probabilities are used by several products")
        roles[role] = product
    return roles


def gradient_product(roles: Mapping[str, Product | None], product: Node) -> Node | None:
    """Returns ``d_out v^T``, the cotangent of the probabilities; None if no gradient needs it."""
    found: dict[int, Node] = {}
    out = roles["out"]
    for name in ("dq", "dk"):
        role, seen = roles[name], set[int]()
        left = [] if role is None else [role.operand]
        while left:
            node = left.pop().node
            if node is None or id(node) in seen or node is product or (out is not None and node is out.node):
                continue
            seen.add(id(node))
            if node.name == "dot_general":
                found[id(node)] = node
            else:
                left += node.inputs
    if len(found) > 1:
        raise Unknown("the cotangents of its logits are computed from several products")
    return next(iter(found.values()), None)


def values_and_cotangent(
    roles: Mapping[str, Product | None], of_logits: Node | None, labels: Labels, key: Axis
) -> tuple[Array, Array | None]:
    """Returns the values, and the cotangent of the result if there are gradients.

    Args:
      of_logits: ``d_out v^T``, as in `gradient_product`.
    """
    v, d_out = (None if role is None else role.other for role in (roles["out"], roles["dv"]))
    if of_logits is not None and (v is None or d_out is None):
        axes = _axes_above(of_logits, labels)
        arrays = [_operand_of(of_logits, side, axes) for side in (0, 1)]
        by_key = [key in array.axes for array in arrays]
        if by_key.count(True) != 1:
            raise Unknown("the cotangents of its probabilities are computed in another way")
        v, d_out = v or arrays[by_key.index(True)], d_out or arrays[by_key.index(False)]
    if v is None:
        raise Unknown("its probabilities are used in another way than by a product with values")
    if d_out is None and any(roles[name] is not None for name in ("dq", "dk", "dv")):
        raise Unknown("the cotangent of its result is not found")
    return v, d_out


def _axes_above(product: Node, labels: Labels) -> tuple[Axes, ...]:
    """Returns the axes of a product's result from an equation that combines the result with arrays of known axes."""
    value, permutations = product.results[0], list[Sequence[int]]()
    while True:
        after = [user for user in users(value) if user.results]
        combined = next((u for u in after if elementwise(u) and labels.of(u.results[0]) is not None), None)
        if combined is not None:
            axes = labels.of(combined.results[0]) or ()
            for permutation in reversed(permutations):
                axes = tuple(axes[permutation.index(i)] for i in range(len(permutation)))
            return axes
        following = next((u for u in after if u.name in ("transpose", "convert_element_type", "mul", "div")), None)
        if following is None:
            raise Unknown("the cotangents of its probabilities are computed in another way")
        if following.name == "transpose":
            permutations.append(list(following.params["permutation"]))
        value = following.results[0]


def _operand_of(product: Node, side: int, out: tuple[Axes, ...]) -> Array:
    """Returns an operand of a product with these result axes; its contracted axis is that of features."""
    contract, batch = product.params["dimension_numbers"]
    value = product.inputs[side]
    free = [i for i in range(len(value.shape)) if i not in (*contract[side], *batch[side])]
    first = len(batch[0]) if side == 0 else len(out) - len(free)
    axes = {i: out[n] for n, i in enumerate(batch[side])} | {i: out[first + n] for n, i in enumerate(free)}
    axes |= {i: ((value.shape[i], FEATURES),) if value.shape[i] > 1 else () for i in contract[side]}
    return Array(value, joined(axes[i] for i in range(len(value.shape))))


def after_division(out: Array, total: Value) -> Array:
    """Returns the quotient of a product with exponentials and their sum."""
    value, axes = out.value, out.axes
    while True:
        for user in users(value):
            if user.name == "div" and user.inputs[0] is value and origin(user.inputs[1]) is total:
                return Array(user.results[0], axes)
        following = next((user for user in users(value) if user.name in (*LAYOUT, "convert_element_type")), None)
        if following is None:
            raise Unknown("its exponentials are used without a division by their sum")
        value, axes = following.results[0], below(following, axes)


def before_division(cotangent: Array, total: Value) -> Array:
    """Returns the cotangent of the result of a division, from the cotangent of the dividend."""
    value, axes = cotangent.value, cotangent.axes
    while (node := value.node) is not None and node.name in (*LAYOUT, "convert_element_type"):
        axes = above(node, axes)
        value = node.inputs[0]
    if node is None or node.name != "div" or origin(node.inputs[1]) is not total:
        raise Unknown("the cotangent of its result is not found")
    return Array(node.inputs[0], axes)
