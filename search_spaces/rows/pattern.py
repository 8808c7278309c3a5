"""Finds row programs in the jaxpr of any code: norms, softmaxes, losses, and their backward passes.

A region grows from a reduction along the last axis, or from a sum over the rows, through elementwise equations, while
that lowers the traffic: XLA stores and reads again an array that enters or leaves a reduction's kernel. Elementwise
equations that other equations need, too, stay where they are, and XLA fuses them with their readers: a region then
repeats them. No input of a region depends on a result of it, so all of its inputs can be computed before it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces import lowering_compat
from search_spaces.problem import as_tuple
from search_spaces.recognise import Graph, Node, Region, RegionStage, Value, live, program_text
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
# The role of each array in equations on many rows.


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
# What the equations compute for one row.


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
            primitive = node.equation.primitive
            along = primitive.get_bind_params({**params, "axes": (0,)})
            found = inputs[0] if whole else primitive.bind(inputs[0], **along)
        case _:
            (found,) = lowering_compat.evaluate_equation(node.equation, *inputs)
    return {id(x): each for x, each in zip(node.results, found if node.name == "split" else [found], strict=True)}


# ------------------------------------------------------------------------------
# The row program of equations, and its call for all rows.


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
    """Runs a call of the problem on arrays of a jaxpr (`RegionStage.run`)."""

    problem: ProgramProblem
    results: tuple[Value, ...]

    def __call__(self, call: Callable[..., Any], _: None, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        found = call(*(jnp.reshape(x, s.shape) for x, s in zip(arrays, self.problem.operands(), strict=True)))
        pairs = zip(as_tuple(found), self.results, strict=True)
        return tuple(jnp.reshape(x, value.shape).astype(value.dtype) for x, value in pairs), None


# ------------------------------------------------------------------------------
# Regions, which grow from reductions.

# Arrays that a region reads and writes have at least these bytes: fewer stay in a chip's caches.
LEAST_BYTES = 2**20
LEAST_ROWS, LEAST_COLUMNS = 8, 16
# Limits of a region: arrays of rows that it reads and writes, their parts, and equations.
MOST_ARRAYS, MOST_PARTS, MOST_EQUATIONS = 12, 16, 256

Nodes = dict[int, Node]  # in no order, by their ``id``


def find(graph: Graph) -> Iterator[Region]:
    """Yields the row programs of a jaxpr, in the order of their first reductions."""
    search = _RegionSearch(graph)
    for node in search.nodes:
        lead = _lead(node)
        if lead is None or id(node) in search.taken or id(node) not in search.place:
            continue
        draft = search.grown(node, lead)
        if draft is not None and (region := search.region(draft)) is not None:
            search.accept(draft)
            yield region


def _lead(node: Node) -> Lead | None:
    """Returns the leading axes of the rows that an equation reduces; None if it reduces no rows."""
    if node.name not in ALONG_ROW or len(node.inputs[0].shape) < 2:
        return None
    shape, last = node.inputs[0].shape, len(node.inputs[0].shape) - 1
    if 4 * MOST_ARRAYS * math.prod(shape) < LEAST_BYTES or shape[last] < LEAST_COLUMNS:
        return None
    if roles_of(node, shape[:last], {}) is None:
        return None
    return shape[:last] if math.prod(shape[:last]) >= LEAST_ROWS else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Draft:
    """Equations that may become a region.

    Attributes:
      roles: the role of each of their arrays, by its ``id``.
      inputs, results: the arrays that they read, and those that others need of them.
    """

    lead: Lead
    nodes: Nodes
    roles: Roles
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]


class _RegionSearch:
    """A graph, and the regions found in it so far.

    Attributes:
      nodes: the equations in order.
      place: the number of each equation that a result of the graph needs, by its ``id``.
      taken: the ``id`` of the reductions of regions.
      stored: the ``id`` of arrays that no later region computes, such as the results of regions.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self._returned = {id(x) for x in graph.results}
        needed = live(graph)
        self.place = {id(node): i for i, node in enumerate(self.nodes) if id(node) in needed}
        self._users = collections.defaultdict[int, dict[int, Node]](dict)
        for node in self.nodes:
            for x in node.inputs if id(node) in needed else ():
                self._users[id(x)][id(node)] = node
        self.taken, self.stored = set[int](), set[int]()
        # What is compared exactly, as in the gradient of a maximum: another kernel could round it differently.
        equal = [node for node in self.nodes if id(node) in needed and node.name in ("eq", "ne")]
        self._exact = {id(x) for node in equal for x in node.inputs if jnp.issubdtype(x.dtype, jnp.floating)}
        self._regions: dict[int, _Draft] = {}
        self._before: dict[int, int] = {}
        self._texts: dict[str, str | None] = {}

    def accept(self, draft: _Draft) -> None:
        self.taken |= {id(node) for node in draft.nodes.values() if reduces(node)}
        self.stored |= {id(x) for x in draft.results} | ({id(x) for x in draft.inputs} & self._exact)
        self._regions |= {id(x): draft for x in draft.results}
        self._before = {}

    # ------------------------------------------------------------------------------
    # Growth.

    def grown(self, seed: Node, lead: Lead) -> _Draft | None:
        roles = roles_of(seed, lead, {})
        draft = None if roles is None else self._draft(lead, {id(seed): seed}, roles)
        after = draft
        while after is not None:
            draft, after = after, None
            for x, user in [*self._around(draft)]:
                after = self._larger(after or draft, x, user) or after
        return None if draft is None else self._without_others(draft)

    def _around(self, draft: _Draft) -> Iterator[tuple[Value, Node | None]]:
        """Yields the inputs of a draft, and the equations that read its arrays with one of these arrays."""
        yield from ((x, None) for x in draft.inputs)
        made = [x for node in draft.nodes.values() for x in node.results]
        for x in (*made, *draft.inputs):
            if draft.roles[id(x)] in ("row", "scalar"):
                yield from ((x, user) for user in self._users[id(x)].values())

    def _larger(self, draft: _Draft, x: Value, user: Node | None) -> _Draft | None:
        """Returns a draft with the equations that compute an input, or with one that reads an array; None if worse."""
        if user is None:
            cone = self._cone(draft, [x])
            return self._unless_worse(draft, cone) or (
                self._unless_worse(draft, dict([*cone.items()][:1])) if len(cone) > 1 else None
            )
        if id(user) in draft.nodes or not self._is_free(user):
            return None
        roles = roles_of(user, draft.lead, draft.roles)
        if roles is None:
            return None
        others = [each for each in user.inputs if id(each) not in draft.roles]
        cone = self._cone(dataclasses.replace(draft, roles=draft.roles | roles), others)
        return self._unless_worse(draft, {id(user): (user, roles)} | cone, user)

    def _without_others(self, draft: _Draft) -> _Draft | None:
        """Returns a draft without equations that its results do not need."""
        needed = {id(x) for x in draft.results}
        for node in reversed(self._in_order(draft.nodes)):
            if any(id(x) in needed for x in node.results):
                needed |= {id(x) for x in node.inputs}
        kept = {key: node for key, node in draft.nodes.items() if any(id(x) in needed for x in node.results)}
        return self._draft(draft.lead, kept, draft.roles)

    def _in_order(self, nodes: Nodes) -> list[Node]:
        return sorted(nodes.values(), key=lambda node: self.place[id(node)])

    def _is_free(self, node: Node) -> bool:
        free = id(node) in self.place and id(node) not in self.taken and not node.equation.effects
        return free and not any(id(x) in self.stored for x in node.results)

    def _cone(self, draft: _Draft, values: Iterable[Value]) -> dict[int, tuple[Node, Roles]]:
        """Returns equations that compute arrays and that a region may have, with their roles, the last one first."""
        found: dict[int, tuple[Node, Roles]] = {}
        roles, left = dict(draft.roles), list(values)
        while left and len(found) < MOST_EQUATIONS:
            x = left.pop()
            node = x.node
            if node is None or id(node) in draft.nodes or id(node) in found or not self._is_free(node):
                continue
            own = roles_of(node, draft.lead, roles)
            if own is not None and own[id(x)] != "row sum":
                found[id(node)] = node, own
                roles |= own
                left += node.inputs
        return found

    def _unless_worse(
        self, draft: _Draft, more: Mapping[int, tuple[Node, Roles]], user: Node | None = None
    ) -> _Draft | None:
        """Returns the draft with more equations; None if that is no region, or one of more traffic."""
        roles = draft.roles.copy()
        for _, own in more.values():
            roles |= own
        nodes = draft.nodes | {key: node for key, (node, _) in more.items()}
        larger = self._draft(draft.lead, nodes, roles) if more else None
        if larger is None:
            return None
        saved = self._saved(draft, larger)
        read = {id(x) for x in draft.inputs}
        rows = [x for x in (user.inputs if user else ()) if roles[id(x)] == "row"]
        if rows:
            known = read | {id(x) for node in draft.nodes.values() for x in node.results}
            if not any(id(x) in known for x in rows):
                return None  # only elements per row are common to both
            # XLA reads such rows again, or what it computes them from.
            again = known - {id(x) for x in draft.results}
            saved += sum(_bytes(x) for x in rows if id(x) in again)
        made = any(self._is_made(x) for x in larger.inputs if id(x) not in read)
        return larger if saved > 0 or (saved == 0 and not made) else None

    def _saved(self, draft: _Draft, larger: _Draft) -> int:
        """Returns the bytes that XLA and the call together read and write less if the draft has more equations.

        XLA writes an array that it would compute within the draft's equations, and reads a result of the draft for
        equations that it would compute with those of the draft. Other arrays are read or written in any case.
        """
        before, after = ({id(x): x for x in each.inputs} for each in (draft, larger))
        results = {id(x): x for x in larger.results}
        saved = 0
        for key, x in before.items():
            if key not in after:
                saved += _bytes(x) * (1 + self._is_made(x) - (key in results))
        saved -= sum(2 * _bytes(x) for key, x in after.items() if key not in before and self._is_made(x))
        for x in draft.results:
            saved += _bytes(x) * ((id(x) not in results) + self._is_fused(draft, x))
        saved -= sum(_bytes(x) * self._is_fused(larger, x) for key, x in results.items() if key not in before)
        return saved

    def _is_fused(self, draft: _Draft, x: Value) -> bool:
        """Returns whether XLA could compute a result of a draft within equations outside."""
        return any(is_fusable(user) for user in self._outside(draft.nodes, x))

    def _is_made(self, x: Value) -> bool:
        """Returns whether XLA would compute an array within the kernels that read it."""
        if id(x) in self.stored or x.node is None or id(x.node) not in self.place:
            return False
        if x.node.name in ("reshape", "squeeze", "expand_dims"):
            return self._is_made(x.node.inputs[0])
        return is_fusable(x.node) and not reduces(x.node)

    # ------------------------------------------------------------------------------
    # The bounds of a draft.

    def _draft(self, lead: Lead, nodes: Nodes, roles: Roles) -> _Draft | None:
        """Returns equations as a draft; None if they cannot be a region."""
        if len(nodes) > MOST_EQUATIONS:
            return None
        ordered = self._in_order(nodes)
        made = {id(x) for node in ordered for x in node.results}
        read = {id(x): x for node in ordered for x in node.inputs if id(x) not in made and not _is_literal(x)}
        results = self._results(ordered, nodes, roles)
        if not results:
            return None
        draft = _Draft(lead, nodes, roles, tuple(read.values()), results)
        if all(roles[id(x)] != "row" for x in draft.inputs):
            return None
        rows = [x for x in (*draft.inputs, *results) if roles[id(x)] in ("row", "row sum")]
        columns = [length for node in ordered for length in lengths(node, roles)]
        columns += [x.shape[-1] for x in draft.inputs if roles[id(x)] in ("row", "shared")]
        unit = math.gcd(*columns) if columns else 0
        if len(rows) > MOST_ARRAYS or unit < LEAST_COLUMNS or max(columns) > MOST_PARTS * unit:
            return None
        own = sum(1 << place for place in {self.place[id(x.node)] for x in results})
        return None if any(self._ancestors(x) & own for x in draft.inputs) else draft

    def _results(self, ordered: Sequence[Node], nodes: Nodes, roles: Roles) -> tuple[Value, ...] | None:
        """Returns the arrays that others need, without those that XLA computes again from one other array."""
        found: dict[int, Value] = {}
        reduced = set[int]()  # what depends on a reduction
        for node in ordered:
            if reduces(node) or any(id(x) in reduced for x in node.inputs):
                reduced |= {id(x) for x in node.results}
            for x in node.results:
                outside = self._outside(nodes, x)
                returned = id(x) in self._returned
                if not (outside or returned) or roles[id(x)] in ("shared", "number"):
                    continue
                again = not returned and id(x) not in self._exact and all(map(is_fusable, outside))
                if roles[id(x)] == "scalar" and again and id(x) not in reduced:
                    continue
                known = nodes, roles, reduced, found
                if again and roles[id(x)] == "row" and (self._is_recomputed(x, *known) or self._has_root(x, *known)):
                    continue
                if not _is_stored_as_is(x):
                    return None
                found[id(x)] = x
        return tuple(sorted(found.values(), key=lambda x: self.place[id(x.node)]))

    def _is_recomputed(self, x: Value, nodes: Nodes, roles: Roles, reduced: set[int], found: dict[int, Value]) -> bool:
        """Returns whether others compute an array from at most one array of rows; adds what they need to `found`."""
        rows, scalars, seen, left = dict[int, Value](), dict[int, Value](), {id(x)}, [x]
        while left:
            value = left.pop()
            role = roles.get(id(value), "number")
            known = value is not x and id(value) in found
            if role == "scalar" and ((id(value) in reduced and value.dtype != jnp.bool_) or known):
                scalars[id(value)] = value
            elif known or value.node is None or id(value.node) not in nodes:
                if role == "row" and not _is_literal(value):
                    rows[id(value)] = value
            elif reduces(value.node):
                return False
            else:
                left += [each for each in value.node.inputs if id(each) not in seen]
                seen |= {id(each) for each in value.node.inputs}
        if len(rows) > 1 or any(_bytes(each) > _bytes(x) for each in rows.values()):
            return False
        found |= {key: each for key, each in scalars.items() if each.node is not None and id(each.node) in nodes}
        return True

    def _has_root(self, x: Value, nodes: Nodes, roles: Roles, reduced: set[int], found: dict[int, Value]) -> bool:
        """Returns whether others compute an array from one row of the draft; adds that row to `found`."""
        for root in sorted(self._above(x, nodes), key=_bytes):
            fits = roles[id(root)] == "row" and _bytes(root) <= _bytes(x) and _is_stored_as_is(root)
            if fits and id(root) not in found:
                found[id(root)] = root
                if self._is_recomputed(x, nodes, roles, reduced, found):
                    return True
                del found[id(root)]
        return False

    def _above(self, x: Value, nodes: Nodes) -> Iterator[Value]:
        """Yields arrays of a draft that an array is computed from, without reductions."""
        left, seen = [x], {id(x)}
        while left:
            node = left.pop().node
            if node is None or id(node) not in nodes or reduces(node):
                continue
            above = [each for each in node.inputs if id(each) not in seen and each.node and id(each.node) in nodes]
            yield from above
            seen |= {id(each) for each in above}
            left += above

    def _outside(self, nodes: Nodes, x: Value) -> list[Node]:
        """Returns the equations that read an array outside of a draft."""
        return [user for key, user in self._users[id(x)].items() if key not in nodes]

    def _ancestors(self, x: Value) -> int:
        """Returns the equations that an array needs, as bits; a result of a region needs all inputs of the region."""
        left = [x]
        while left:
            value = left[-1]
            if id(value) in self._before:
                left.pop()
                continue
            if value.node is None or id(value.node) not in self.place:
                self._before[id(value)] = 0
                left.pop()
                continue
            region = self._regions.get(id(value))
            inputs = value.node.inputs if region is None else region.inputs
            missing = [each for each in inputs if id(each) not in self._before]
            if missing:
                left += missing
                continue
            bits = 1 << self.place[id(value.node)]
            for each in inputs:
                bits |= self._before[id(each)]
            self._before[id(value)] = bits
            left.pop()
        return self._before[id(x)]

    # ------------------------------------------------------------------------------
    # A draft as a call.

    def region(self, draft: _Draft) -> Region | None:
        """Returns a draft as a region; None if it is small, or no row program."""
        if sum(map(_bytes, (*draft.inputs, *draft.results))) < LEAST_BYTES or len(draft.nodes) < 2:
            return None
        ordered = self._in_order(draft.nodes)
        key = program_text(ordered, draft.inputs, draft.results)
        if key not in self._texts:
            self._texts[key] = program_of(ordered, draft.roles, draft.inputs, draft.results)
        if (text := self._texts[key]) is None:
            return None
        problem = ProgramProblem(rows=math.prod(draft.lead), text=text)
        stage = RegionStage(None, problem, (), draft.inputs, draft.results, Run(problem, draft.results))
        shown = tuple(node for node in ordered if reduces(node))
        return Region((stage,), self._roots(draft), shown)

    def _roots(self, draft: _Draft) -> tuple[Value, ...]:
        """Returns the inputs, but those of earlier regions in place of their results: a row's maximum fits the row."""
        found = {id(x): x for x in draft.inputs}
        while scalars := [key for key in found if (of := self._regions.get(key)) and of.roles[key] == "scalar"]:
            region = self._regions[scalars[0]]
            found = {key: x for key, x in found.items() if self._regions.get(key) is not region}
            found |= {id(x): x for x in region.inputs}
        return tuple(found.values())


def _is_stored_as_is(x: Value) -> bool:
    """Returns whether an array can be a result of a region."""
    return x.node is not None and len(x.node.results) == 1 and x.dtype != jnp.bool_


def _is_literal(x: Value) -> bool:
    return x.literal is not None and not x.shape


def _bytes(x: Value) -> int:
    return math.prod(x.shape) * int(jnp.dtype(x.dtype).itemsize)
