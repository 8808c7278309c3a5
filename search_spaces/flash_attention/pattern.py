"""Finds attention and its gradients in the jaxpr of any code, before or after differentiation.

A softmax between two products is recognised from its equations. The products that consume its probabilities, or the
cotangents of its logits, are then attributed by the axes that they contract: the result contracts keys with values, the
gradient of the queries contracts keys with keys, and the gradients of keys and values contract queries. Everything that
such a product reads, back to queries, keys, values and the cotangent of the result, must be known; otherwise the
attention is left alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.flash_attention.logits import (
    FEATURES,
    LAYOUT,
    MASKED,
    NO_AXIS,
    Axes,
    Axis,
    Band,
    LabelledArray,
    Labels,
    Logits,
    Probabilities,
    Product,
    above,
    band,
    below,
    bias_band,
    constant,
    elementwise,
    is_widened,
    joined,
    logits_of,
    origin,
    root,
    softmax_of,
    users,
)
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.recognise import (
    Graph,
    Left,
    Node,
    Region,
    RegionStage,
    Unknown,
    Value,
    casts,
    equations_between,
    live,
    number,
    strip,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """Attention that equations compute, with its gradients if they compute these, too.

    Attributes:
      problem: of the forward pass; with `return_lse` if there are gradients.
      scale, softcap: of the logits; None means no softcap.
      batch, heads, group: the axes of the logits that form the problem's batch, its key heads, and the query heads of
        each key head.
      query, key: the axes of queries and keys.
      out: the result; None if the equations need its gradients only.
      d_out: the cotangent of the result; None if there are no gradients.
      dq, dk, dv: the gradients that are computed.
      shown: the equations to report, by their source lines.
    """

    problem: FlashAttentionProblem
    scale: float
    softcap: float | None
    batch: Axes
    heads: Axes
    group: Axes
    query: Axis
    key: Axis
    q: LabelledArray
    k: LabelledArray
    v: LabelledArray
    out: LabelledArray | None
    d_out: LabelledArray | None
    dq: LabelledArray | None
    dk: LabelledArray | None
    dv: LabelledArray | None
    shown: tuple[Node, ...]

    @property
    def results(self) -> tuple[LabelledArray, ...]:
        """The arrays that kernels compute instead: the result and the gradients, as far as there are."""
        return tuple(x for x in (self.out, self.dq, self.dk, self.dv) if x is not None)

    @property
    def inputs(self) -> tuple[LabelledArray, ...]:
        """The arrays that the results are computed from: q, k, v, and the cotangent if there are gradients."""
        return self.q, self.k, self.v, *(() if self.d_out is None else (self.d_out,))

    @property
    def roots(self) -> tuple[Value, ...]:
        """The arrays that the inputs are layouts and casts of, without duplicates."""
        return tuple({id(each): each for x in self.inputs for each in [root(x.value, self.problem.dtype)]}.values())

    def region(self) -> Region:
        """Returns the attention as calls of the forward and the backward operation."""
        inputs = tuple(x.value for x in (self.q, self.k, self.v))
        params = tuple((name, x) for name, x in (("scale", self.scale), ("softcap", self.softcap)) if x is not None)
        results = () if self.out is None else (self.out.value,)
        stages = [RegionStage(None, self.problem, params, inputs, results, self._forward)]
        if self.d_out is not None:
            posed = FlashAttentionBackwardProblem.of_forward(self.problem)
            gradients = tuple(x.value for x in (self.dq, self.dk, self.dv) if x is not None)
            stages.append(
                RegionStage(FLASH_ATTENTION_BACKWARD, posed, params, (self.d_out.value,), gradients, self._backward)
            )
        return Region(tuple(stages), self.roots, self.shown)

    def _forward(self, call: Any, _: None, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        operands = tuple(self.to_problem(x, each) for x, each in zip((self.q, self.k, self.v), arrays, strict=True))
        found = call(*operands)
        out, *lse = found if self.problem.return_lse else (found,)
        return (() if self.out is None else (self.from_problem(self.out, out),)), (*operands, out, *lse)

    def _backward(self, call: Any, forward: Any, d_out: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        assert self.d_out is not None
        gradients = call(*forward, self.to_problem(self.d_out, d_out))
        pairs = zip((self.dq, self.dk, self.dv), gradients, strict=True)
        return tuple(self.from_problem(x, each) for x, each in pairs if x is not None), None

    def to_problem(self, array: LabelledArray, x: jax.Array) -> jax.Array:
        """Returns an array of the jaxpr as ``[batch, length, heads, features]``, in the dtype of the problem."""
        order = self._order(array)
        x = jnp.reshape(x, [extent for extent, _ in array.axes])
        x = jnp.transpose(x, [array.axes.index(axis) for axis in order])
        return jnp.reshape(x, self._shape(array)).astype(self.problem.dtype)

    def from_problem(self, array: LabelledArray, x: jax.Array) -> jax.Array:
        """Returns ``x[batch, length, heads, features]`` with the axes and the dtype of an array of the jaxpr."""
        order = self._order(array)
        x = jnp.reshape(x, [extent for extent, _ in order])
        x = jnp.transpose(x, [order.index(axis) for axis in array.axes])
        x = jnp.reshape(x, array.value.shape).astype(array.value.dtype)
        return x if array.factor == 1.0 else x * jnp.asarray(array.factor, x.dtype)

    def _order(self, array: LabelledArray) -> Axes:
        keys = self._by_key(array)
        features = tuple(axis for axis in array.axes if axis[1] == FEATURES)
        rows = (self.key, *self.heads) if keys else (self.query, *self.heads, *self.group)
        return tuple(axis for axis in (*self.batch, *rows, *features) if axis[0] > 1)

    def _by_key(self, array: LabelledArray) -> bool:
        return array in (self.k, self.v, self.dk, self.dv)

    def _shape(self, array: LabelledArray) -> tuple[int, ...]:
        p = self.problem
        features = p.head_dim if array in (self.q, self.k, self.dq, self.dk) else p.value_dim
        length, heads = (p.kv_len, p.kv_heads) if self._by_key(array) else (p.q_len, p.heads)
        return p.batch, length, heads, features


def find(graph: Graph) -> list[Region | Left]:
    """Returns the attention in a jaxpr, and what looks like attention but is left alone, in order."""
    found: list[Attention | Left] = []
    for node in graph.nodes:
        if node.name == "exp" and (each := _attention(node)) is not None:
            found.append(each)
    attention = [each for each in found if isinstance(each, Attention)]
    still_live = live(graph, {id(x.value) for each in attention for x in each.results})
    own = {id(node) for node in graph.nodes}
    return [_unless_used(each, still_live, own) if isinstance(each, Attention) else each for each in found]


def _attention(exp: Node) -> Attention | Left | None:
    """Returns the attention with this exponential; None if there is none."""
    logits = logits_of(exp.inputs[0])
    if logits is None:
        return None
    if not all(isinstance(n, int) and n for x in (*logits.product.inputs, *exp.results) for n in x.shape):
        return Left("an array is empty, or has symbols for extents", logits.product)
    labels = Labels(logits.product)
    softmax = softmax_of(exp, labels)
    if softmax is None:
        return None
    products = list(labels.products())
    if not any(softmax.key in product.contracted for product in products):
        return None  # for example the loss of a language model: its softmax is over features of a product
    try:
        return _parsed(logits, labels, softmax, products)
    except Unknown as error:
        # Without a product of the probabilities, it is a softmax over features, as of the loss of a language model.
        weighted = any(origin(each.operand) is strip(softmax.probabilities) for each in products)
        return Left(str(error), logits.product) if weighted else None


def _unless_used(found: Attention, still_live: set[int], own: set[int]) -> Region | Left:
    product = found.shown[0]
    if id(product) not in still_live and all(id(x.value.node) in own for x in found.results):
        return found.region()
    return Left(
        "its probabilities or logits are used elsewhere, such as by the backward pass of a scan, which saves them: "
        "apply scheduler.rewrite before jax.grad, or jax.checkpoint to the body of the scan",
        product,
    )


# ------------------------------------------------------------------------------
# The problem, its operands and its results.


def _parsed(logits: Logits, labels: Labels, softmax: Probabilities, products: Sequence[Product]) -> Attention:
    product, key = logits.product, softmax.key
    k_side = _side_of(product, key)
    if len(product.params["dimension_numbers"][0][0]) != 1:
        raise Unknown("its logits contract several axes")
    q, k = (_operand(product, side, labels.of(product.results[0]) or ()) for side in (1 - k_side, k_side))
    q, of_q = _unscaled(q, k)
    k, of_k = _unscaled(k, q)
    batch_axes = [axis for axis in q.axes if axis in k.axes and axis[1] != FEATURES]
    free = [axis for axis in q.axes if axis not in k.axes and axis[1] != FEATURES]
    if [axis for axis in k.axes if axis not in (*batch_axes, key) and axis[1] != FEATURES]:
        raise Unknown("keys have several axes")
    scale, softcap, least = _scaling(logits, of_q * of_k)
    query, seen = _query(logits, labels, _candidates(product, 1 - k_side, free), key, MASKED / least)
    group = tuple(axis for axis in free if axis != query)
    roles = roles_of(softmax, products, key, {*free})
    of_logits = gradient_product(roles, product)
    v, d_out = values_and_cotangent(roles, of_logits, labels, key)
    out, dq, dk, dv = (None if each is None else each.out for each in roles.values())
    if softmax.total is not None:
        out = None if out is None else after_division(out, softmax.total)
        d_out = None if d_out is None else before_division(d_out, softmax.total)
    dq = None if dq is None else dataclasses.replace(dq, factor=1 / of_q)
    dk = None if dk is None else dataclasses.replace(dk, factor=1 / of_k)
    differentiated = any(x is not None for x in (dq, dk, dv))
    lead, heads = _batch_and_heads(q, batch_axes, query)
    dtype = _dtype(q, k, v)
    _check_precision((product, *(role.node for role in roles.values() if role is not None)), dtype)
    if out is not None and not _is_rounded(out.value, dtype):
        raise Unknown(f"its result stays in {out.value.dtype}, and a kernel rounds it to {dtype}")
    extents = {"head_dim": q, "head_dim_v": v}
    sizes = {name: next((n for n, at in x.axes if at == FEATURES), 1) for name, x in extents.items()}
    # Without bounds that exclude no key.
    left = None if seen.left is None or seen.left >= query[0] - 1 else seen.left
    right = None if seen.right is None or seen.right >= key[0] - 1 else seen.right
    try:
        problem = FlashAttentionProblem(
            batch=math.prod(n for n, _ in lead),
            q_len=query[0],
            kv_len=key[0],
            heads=math.prod(n for n, _ in (*heads, *group)),
            kv_heads=math.prod(n for n, _ in heads),
            causal=right == 0,
            window_left=-1 if left is None else left,
            window_right=right or -1,
            softcap=softcap is not None,
            dtype=dtype,
            return_lse=differentiated,
            head_dim=sizes["head_dim"],
            head_dim_v=sizes["head_dim_v"],
        )
    except ValueError as error:
        raise Unknown(str(error)) from None
    found = Attention(
        problem=problem,
        scale=scale,
        softcap=softcap,
        batch=lead,
        heads=heads,
        group=group,
        query=query,
        key=key,
        q=q,
        k=k,
        v=v,
        out=out,
        d_out=d_out if differentiated else None,
        dq=dq,
        dk=dk,
        dv=dv,
        shown=(product, softmax.exp),
    )
    allowed = [product, *(role.node for role in (roles["out"],) if role is not None)]
    allowed += [] if of_logits is None else [of_logits]
    equations_between([x.value for x in found.results], found.roots, allowed)
    return found


def _side_of(product: Node, key: Axis) -> int:
    """Returns the index of the operand that has the axis of keys."""
    (of_a, _), (batch_a, _) = product.params["dimension_numbers"]
    free = len(product.inputs[0].shape) - len(of_a) - len(batch_a)
    if key[1] < len(batch_a):
        raise Unknown("keys are a batch axis of its logits")
    return 0 if key[1] < len(batch_a) + free else 1


def _unscaled(array: LabelledArray, other: LabelledArray) -> tuple[LabelledArray, float]:
    """Returns an operand before a scalar factor in a wider dtype than that of the other operand, and the factor."""
    node = strip(array.value).node
    if node is None or node.name not in ("mul", "div") or _is_narrow(array.value, other.value):
        return array, 1.0
    for i, x in enumerate(node.inputs[: 2 if node.name == "mul" else 1]):
        factor = _scalar(node.inputs[1 - i])
        if factor and x.shape == array.value.shape and _is_narrow(x, other.value):
            return LabelledArray(x, array.axes), factor if node.name == "mul" else 1 / factor
    return array, 1.0


def _is_narrow(value: Value, other: Value) -> bool:
    return is_widened(_narrowest(value).dtype, _narrowest(other).dtype)


def _scaling(logits: Logits, factor_of_operands: float) -> tuple[float, float | None, float]:
    """Returns the scale and the softcap of the logits, and the least factor of what masks hide."""
    scale, cap, after_mask = factor_of_operands, None, None
    for node in reversed(logits.steps):
        if node.name == "tanh":
            if cap is not None:
                raise Unknown("it caps logits twice")
            if after_mask is not None:
                raise Unknown("it caps masked logits: hidden keys have a weight, too")
            cap = scale
        elif node.name in ("select_n", "add"):
            after_mask = 1.0 if after_mask is None else after_mask
        elif node.name in ("mul", "div"):
            factor = next((each for x in node.inputs if (each := _scalar(x)) is not None), None)
            if factor is None or (node.name == "div" and _scalar(node.inputs[1]) is None):
                raise Unknown("its logits are scaled by an array")
            factor = factor if node.name == "mul" else 1 / factor
            scale *= factor
            if after_mask is not None and not factor > 0:
                raise Unknown("its masked logits change their sign")
            after_mask = None if after_mask is None else after_mask * min(factor, 1.0)
    if not scale > 0:
        raise Unknown("its scale is not positive")
    return scale, None if cap is None else abs(scale / cap), after_mask or 1.0


def _scalar(value: Value) -> float | None:
    found = number(value)
    if (found is None and not strip(value).shape) or math.prod(value.shape) == 1:
        values = constant(value)
        found = None if values is None else float(values.reshape(()))
    return found


def _candidates(product: Node, q_side: int, free: Sequence[Axis]) -> list[Axis]:
    """Returns the axes that may be that of queries, the likely one first.

    If an axis of the queries follows their last axis of heads, its elements are the query heads of a key head.
    Otherwise the longest axis is that of queries.
    """
    contract, batch = product.params["dimension_numbers"]
    value = product.inputs[q_side]
    places = [i for i in range(len(value.shape)) if i not in (*contract[q_side], *batch[q_side])]
    by_length = sorted(free, key=lambda axis: -axis[0])
    if len(places) == 2 and batch[q_side] and max(batch[q_side]) + 1 in places:
        numbers = {axis[1]: axis for axis in free}
        first = len(batch[0]) if q_side == 0 else len(product.results[0].shape) - len(places)
        (likely,) = (n for n, i in enumerate(places) if i != max(batch[q_side]) + 1)
        query = numbers.get(first + likely, (1, NO_AXIS))
        return [query, *(axis for axis in by_length if axis != query)]
    return by_length or [(1, NO_AXIS)]


def _query(logits: Logits, labels: Labels, candidates: Sequence[Axis], key: Axis, masked: float) -> tuple[Axis, Band]:
    """Returns the axis of queries, and the keys that each query sees: the first candidate that the masks allow.

    Args:
      masked: a constant of at most this value masks a logit.
    """
    error = None
    for query in candidates:
        try:
            return query, functools.reduce(Band.__and__, _bands(logits, labels, query, key, masked), Band())
        except Unknown as found:
            error = error or found
    assert error is not None
    raise error


def _bands(logits: Logits, labels: Labels, query: Axis, key: Axis, masked: float) -> Iterator[Band]:
    names: dict[Axes, str] = {(query,): "query", (key,): "key"}
    steps = logits.steps[1:] if logits.steps and logits.steps[0].name == "sub" else logits.steps
    for node in steps:
        axes = [names.get(each) for each in labels.of(node.results[0]) or ()]
        if node.name == "select_n":
            hidden = [(value := number(x)) is not None and value <= masked for x in node.inputs[1:]]
            if len(hidden) != 2 or hidden.count(True) != 1:
                raise Unknown("its logits are selected by another rule than a mask")
            which = node.inputs[0]
            yield band(which, hidden.index(False) == 1, axes if which.shape else ())
        elif node.name in ("add", "sub"):
            bias = next((x for x in node.inputs if labels.of(x) is None), None)
            if bias is None or node.name == "sub":
                raise Unknown("an array is added to its logits")
            yield bias_band(bias, axes, masked)


def _batch_and_heads(q: LabelledArray, axes: Sequence[Axis], query: Axis) -> tuple[Axes, Axes]:
    """Divides the batch axes of the logits: those stored before the queries are the batch, the others are heads."""
    value, stored = q.value, list(q.axes)
    while (node := strip(value).by("transpose")) is not None:
        wide = [i for i, n in enumerate(strip(value).shape) if n > 1]
        source = [node.params["permutation"][i] for i in wide]
        stored = [axis for _, axis in sorted(zip(source, stored, strict=True))]
        value = node.inputs[0]
    ordered = [axis for axis in stored if axis in axes]
    if query not in stored:
        return tuple(ordered[:1]), tuple(ordered[1:])
    at = stored.index(query)
    lead = [axis for axis in ordered if stored.index(axis) < at]
    return tuple(lead), tuple(axis for axis in ordered if axis not in lead)


def _dtype(*arrays: LabelledArray) -> str:
    """Returns the narrowest dtype that holds the values of each array."""
    found = {str(each.dtype) for x in arrays for each in [_narrowest(x.value)]}
    if len(found) != 1:
        raise Unknown(f"q, k and v are {', '.join(sorted(found))}")
    return found.pop()


def _narrowest(value: Value) -> Value:
    narrow = value
    while value.node is not None and value.node.name in LAYOUT:
        value = value.node.inputs[0]
    for each in casts(value):
        if is_widened(each.dtype, narrow.dtype):
            narrow = each
    return narrow


def _check_precision(products: Iterable[Node], dtype: str) -> None:
    for node in products:
        precision = str(node.params.get("precision"))
        if dtype == "float32" and ("HIGH" in precision or "F32_F32_F32" in precision):
            raise Unknown("its products have a higher precision than those of a kernel")


def _is_rounded(value: Value, dtype: str) -> bool:
    """Returns whether all uses of an array round it to `dtype`, perhaps after a change of its layout."""
    if str(value.dtype) == dtype:
        return True
    after = users(value)
    return bool(after) and all(
        user.name in ("convert_element_type", *LAYOUT) and _is_rounded(user.results[0], dtype) for user in after
    )


# ------------------------------------------------------------------------------
# The products after a softmax: the result and the gradients of attention, and their operands.


def roles_of(
    softmax: Probabilities, products: Sequence[Product], key: Axis, rows: set[Axis]
) -> dict[str, Product | None]:
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
) -> tuple[LabelledArray, LabelledArray | None]:
    """Returns the values, and the cotangent of the result if there are gradients.

    Args:
      of_logits: ``d_out v^T``, as in `gradient_product`.
    """
    v, d_out = (None if role is None else role.other for role in (roles["out"], roles["dv"]))
    if of_logits is not None and (v is None or d_out is None):
        axes = _axes_above(of_logits, labels)
        arrays = [_operand(of_logits, side, axes) for side in (0, 1)]
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


def _operand(product: Node, side: int, out: tuple[Axes, ...]) -> LabelledArray:
    """Returns an operand of a product with these result axes; its contracted axis is that of features."""
    contract, batch = product.params["dimension_numbers"]
    value = product.inputs[side]
    free = [i for i in range(len(value.shape)) if i not in (*contract[side], *batch[side])]
    first = len(batch[0]) if side == 0 else len(out) - len(free)
    axes = {i: out[n] for n, i in enumerate(batch[side])} | {i: out[first + n] for n, i in enumerate(free)}
    axes |= {i: ((value.shape[i], FEATURES),) if value.shape[i] > 1 else () for i in contract[side]}
    return LabelledArray(value, joined(axes[i] for i in range(len(value.shape))))


def after_division(out: LabelledArray, total: Value) -> LabelledArray:
    """Returns the quotient of a product with exponentials and their sum."""
    value, axes = out.value, out.axes
    while True:
        for user in users(value):
            if user.name == "div" and user.inputs[0] is value and origin(user.inputs[1]) is total:
                return LabelledArray(user.results[0], axes)
        following = next((user for user in users(value) if user.name in (*LAYOUT, "convert_element_type")), None)
        if following is None:
            raise Unknown("its exponentials are used without a division by their sum")
        value, axes = following.results[0], below(following, axes)


def before_division(cotangent: LabelledArray, total: Value) -> LabelledArray:
    """Returns the cotangent of the result of a division, from the cotangent of the dividend."""
    value, axes = cotangent.value, cotangent.axes
    while (node := value.node) is not None and node.name in (*LAYOUT, "convert_element_type"):
        axes = above(node, axes)
        value = node.inputs[0]
    if node is None or node.name != "div" or origin(node.inputs[1]) is not total:
        raise Unknown("the cotangent of its result is not found")
    return LabelledArray(node.inputs[0], axes)
