"""Equations of a jaxpr on many rows as a row program: the role of each array, and what one row computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import lowering_compat
from search_spaces.problem import as_tuple
from search_spaces.recognise import Node, Value
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.elementwise import is_elementwise
from search_spaces.rows.problem import ProgramProblem
from search_spaces.rows.reader import trace
from search_spaces.rows.written import Written, remember

Lead = tuple[int, ...]  # the leading axes; their elements are rows
# The kind of each array in the program (`program.Operand`), by its ``id``; "row sum" is a sum over all rows.
Roles = dict[int, str]

ALONG_ROW = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"})
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})


def reduces(node: Node) -> bool:
    """Returns whether an equation reduces rows, or takes an element of each row."""
    if node.name == "gather":
        return True
    return node.name in ALONG_ROW and any(node.inputs[0].shape[axis] > 1 for axis in node.params["axes"])


def is_fusable(node: Node) -> bool:
    """Returns whether XLA computes an equation in one kernel with those before it."""
    return is_elementwise(node.name) or node.name in _FUSED


_FUSED = frozenset(
    {"broadcast_in_dim", "iota", "transpose", "reshape", "squeeze", "expand_dims", "slice", "pad", "concatenate", "rev"}
    | {"split", "gather", "dynamic_slice", "bitcast_convert_type", *ALONG_ROW}
)


# ------------------------------------------------------------------------------
# Roles.


def roles_of(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    """Returns the roles of the arrays of an equation; None if it is no equation on rows with these leading axes.

    Args:
      known: the roles of other arrays. Shapes alone may allow several.
    """
    if not all(map(_is_narrow, (*node.inputs, *node.results))):
        return None
    rule = _RULES.get(node.name, _elementwise if is_elementwise(node.name) else None)
    roles = None if rule is None else rule(node, lead, known)
    if roles is None or any(known.get(key, role) != role for key, role in roles.items()):
        return None
    return roles


def _is_narrow(x: Value) -> bool:
    number = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.signedinteger)
    return (number or x.dtype in (jnp.bool_, jnp.uint8)) and x.dtype.itemsize <= 4


def _wide(shape: Sequence[int]) -> list[int]:
    """Returns the axes with several elements."""
    return [axis for axis, n in enumerate(shape) if n > 1]


def _candidates(shape: tuple[int, ...], lead: Lead) -> set[str]:
    """Returns the roles that an array may have; axes of one element do not count."""
    rows, extents = [n for n in lead if n > 1], [n for n in shape if n > 1]
    if not extents:
        return {"number"}
    fits = {
        "row": extents[:-1] == rows and shape[-1] > 1,
        "scalar": extents == rows,
        "shared": len(extents) == 1 and shape[-1] > 1,
    }
    return {role for role, fit in fits.items() if fit}


def _common(values: Sequence[Value], lead: Lead, known: Mapping[int, str]) -> str | None:
    """Returns the only role that all these arrays can have."""
    roles = [
        _candidates(x.shape, lead) & {known.get(id(x), role) for role in _candidates(x.shape, lead)} for x in values
    ]
    found = set.intersection(*roles)
    return found.pop() if len(found) == 1 else None


def _part_of(role: str, shape: tuple[int, ...], before: tuple[int, ...], axes: Sequence[int]) -> str | None:
    """Returns the role of an array that is broadcast to an array of a role and a shape; None if there is none.

    Args:
      before: the shape of the array that is broadcast.
      axes: the axis at which each of its axes lies then.
    """
    at = [int(axes[axis]) for axis in _wide(before)]
    if not at:
        return "number"
    wide = _wide(shape)
    if at == wide:
        return role
    if role == "row" and at in (wide[:-1], wide[-1:]):
        return "scalar" if at == wide[:-1] else "shared"
    return None


def _elementwise(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    (result, *others), inputs = node.results, node.inputs
    if others or not result.shape or any(len(x.shape) not in (0, len(result.shape)) for x in inputs):
        return None
    role = _common([x for x in (result, *inputs) if x.shape == result.shape], lead, known)
    if role is None:
        return None
    axes = range(len(result.shape))
    roles = {id(x): _part_of(role, result.shape, x.shape, axes) for x in inputs}
    return _unless_none(roles | {id(result): role})


def _unless_none(roles: Mapping[int, str | None]) -> Roles | None:
    found = {key: role for key, role in roles.items() if role is not None}
    return found if len(found) == len(roles) else None


def _broadcast_in_dim(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    x, (result,) = node.inputs[0], node.results
    role = _common([result], lead, known)
    if role is None:
        return None
    own = _part_of(role, result.shape, x.shape, node.params["broadcast_dimensions"])
    return _unless_none({id(x): own, id(result): role})


def _reshape(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    x, (result,) = node.inputs[0], node.results
    role = _common([x, result], lead, known)
    if role is None or role == "number":
        return None
    return {id(x): role, id(result): role}


def _reduce(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    x, (result,), wide = node.inputs[0], node.results, _wide(node.inputs[0].shape)
    logical = node.name in ("reduce_and", "reduce_or")
    if not reduces(node):
        scalar = "scalar" in _candidates(x.shape, lead) and not node.name.startswith("arg")
        return {id(x): "scalar", id(result): "scalar"} if scalar else None
    if "row" not in _candidates(x.shape, lead) or not (logical or jnp.issubdtype(x.dtype, jnp.floating)):
        return None
    over = [axis for axis in wide if axis in node.params["axes"]]
    if over == wide[-1:]:
        return {id(x): "row", id(result): "scalar"}
    return {id(x): "row", id(result): "row sum"} if node.name == "reduce_sum" and over == wide[:-1] else None


def _within_rows(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    """Returns the roles of a slice, a split, a concatenation or a padding of rows along the last axis."""
    params, last = node.params, len(node.inputs[0].shape) - 1
    if node.name == "slice":
        bounds = list(zip(params["start_indices"], params["limit_indices"], strict=True))
        whole = [(0, n) for n in node.inputs[0].shape]
        along = bounds[:last] == whole[:last] and set(params["strides"] or (1,)) == {1}
    elif node.name == "pad":
        low, high, interior = params["padding_config"][-1]
        along = all(set(each) == {0} for each in params["padding_config"][:-1]) and min(low, high) >= 0 == interior
    else:
        along = params.get("axis", params.get("dimension")) == last
    rows = (*node.results, *(node.inputs[:1] if node.name == "pad" else node.inputs))
    if not along or any("row" not in _candidates(x.shape, lead) for x in rows):
        return None
    return {id(x): "number" for x in node.inputs} | {id(x): "row" for x in rows}


def _iota(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    (result,) = node.results
    role = _common([result], lead, known)
    if role not in ("row", "shared") or node.params["dimension"] != len(result.shape) - 1:
        return None
    return {id(result): role}


def _gather(node: Node, lead: Lead, known: Mapping[int, str]) -> Roles | None:
    (x, indices), (result,), how = node.inputs, node.results, node.params["dimension_numbers"]
    rows, last = tuple(range(len(x.shape) - 1)), (len(x.shape) - 1,)
    batched = how.operand_batching_dims == how.start_indices_batching_dims == rows
    one = set(node.params["slice_sizes"]) == {1} and not how.offset_dims
    fits = [_candidates(each.shape, lead) for each in (x, indices, result)]
    if not (batched and one and how.start_index_map == how.collapsed_slice_dims == last):
        return None
    if "row" not in fits[0] or "scalar" not in fits[1] & fits[2] or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    return {id(x): "row", id(indices): "scalar", id(result): "scalar"}


_RULES: Mapping[str, Callable[[Node, Lead, Mapping[int, str]], Roles | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "gather": _gather,
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(ALONG_ROW, _reduce),
    **dict.fromkeys(("slice", "split", "concatenate", "pad"), _within_rows),
}


def lengths(node: Node, roles: Roles) -> list[int]:
    """Returns lengths of which the length of a program's vectors is a divisor."""
    found = [x.shape[-1] for x in (*node.inputs, *node.results) if roles.get(id(x)) in ("row", "shared")]
    return found + ([node.params["start_indices"][-1]] if node.name == "slice" else [])


# ------------------------------------------------------------------------------
# One row.


def apply(node: Node, roles: Roles, values: Mapping[int, Any]) -> dict[int, Any]:
    """Computes one row of an equation: vectors, and scalars without axes; a sum over rows is the row itself."""
    inputs: list[Any] = [values[id(x)] if id(x) in values else np.asarray(x.literal, x.dtype) for x in node.inputs]
    result = node.results[0]
    length = result.shape[-1:] if roles[id(result)] in ("row", "shared") else ()
    params: dict[str, Any] = dict(node.params)
    found: Any
    match node.name:
        case "broadcast_in_dim":
            found = jnp.broadcast_to(inputs[0], length)
        case "iota":
            found = lax.iota(params["dtype"], *length)
        case "reshape" | "squeeze" | "expand_dims":
            found = inputs[0]
        case "slice":
            found = lax.slice(inputs[0], params["start_indices"][-1:], params["limit_indices"][-1:])
        case "split":
            ends = list(itertools.accumulate(params["sizes"]))
            found = [inputs[0][end - size : end] for size, end in zip(params["sizes"], ends, strict=True)]
        case "concatenate":
            found = jnp.concatenate(inputs)
        case "pad":
            found = lax.pad(inputs[0], inputs[1], params["padding_config"][-1:])
        case "gather":
            found = (
                inputs[0]
                .at[inputs[1]]
                .get(mode=params["mode"], fill_value=params["fill_value"], wrap_negative_indices=False)
            )
        case name if name in ALONG_ROW:
            whole = roles[id(result)] == "row sum" or not reduces(node)
            found = inputs[0] if whole else _reduced(node, inputs[0])
        case _:
            (found,) = lowering_compat.evaluate_equation(node.equation, *inputs)
    return {id(x): each for x, each in zip(node.results, found if node.name == "split" else [found], strict=True)}


def _reduced(node: Node, x: jax.Array) -> Any:
    primitive = node.equation.primitive
    return primitive.bind(x, **primitive.get_bind_params({**node.params, "axes": (0,)}))


# ------------------------------------------------------------------------------
# All rows.


def program_of(nodes: Sequence[Node], roles: Roles, inputs: Sequence[Value], results: Sequence[Value]) -> str | None:
    """Returns the row program of equations as text; None if there is none.

    Args:
      nodes: the equations in order.
    """

    def function(*arrays: jax.Array) -> tuple[Any, ...]:
        values = dict(zip(map(id, inputs), arrays, strict=True))
        for node in nodes:
            values |= apply(node, roles, values)
        return tuple(values[id(x)] for x in results)

    kinds = [roles[id(x)] for x in inputs]
    shapes = [
        jax.ShapeDtypeStruct(x.shape[-1:] if kind in ("row", "shared") else (), x.dtype)
        for x, kind in zip(inputs, kinds, strict=True)
    ]
    try:
        with jax.enable_x64(False):
            program, segments = trace(function, shapes, kinds, lambda number: roles[id(results[number])] == "row sum")
            if segments != 1:
                return None
            remember(text := program.text(), Written(jax.make_jaxpr(function)(*shapes), tuple(kinds)))
    except NoProgram:
        return None
    return text


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Runs a call of the problem on arrays of a jaxpr (`Stage.run`)."""

    problem: ProgramProblem
    results: tuple[Value, ...]

    def __call__(self, call: Callable[..., Any], _: None, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        found = call(*(jnp.reshape(x, s.shape) for x, s in zip(arrays, self.problem.operands(), strict=True)))
        pairs = zip(as_tuple(found), self.results, strict=True)
        return tuple(jnp.reshape(x, value.shape).astype(value.dtype) for x, value in pairs), None
