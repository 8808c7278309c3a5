"""Calls of row operations as users write them: leading axes are rows, and XLA computes what no program describes."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from search_spaces.bindings import tracing
from search_spaces.fingerprint import digest, opened_jaxpr
from search_spaces.front_end import lead, require_array, unsupported_reason, weakly_typed
from search_spaces.operation import NO_PARAMS, BoundCall, Params, Unsupported
from search_spaces.partitioning_compat import empty_mesh
from search_spaces.problem import as_tuple
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.keys import key_of, words_of
from search_spaces.rows.named import Formula, FormulaProblem
from search_spaces.rows.problem import ProgramAlongProblem, ProgramProblem, RowProblem
from search_spaces.rows.reader import trace
from search_spaces.rows.translation import is_key
from search_spaces.rows.written import Written, mapped, remember


def bind_formula(problem: type[FormulaProblem], *arrays: Any, **params: Any) -> BoundCall[Any] | Unsupported:
    """Binds a call of a formula on rows ``[..., columns]``, elements per row ``[...]``, and shared vectors."""
    formula = problem.formula
    for name, x in zip(formula.operands, arrays, strict=True):
        require_array(name, x)
    fields = {name: params.pop(name) for name in tuple(params) if name in problem.__dataclass_fields__}
    posed = _problem(problem, fields, *arrays)
    if isinstance(posed, str):
        return Unsupported(posed, functools.partial(by_vmap, formula, *arrays, **params, **fields))
    leading = arrays[0].shape[:-1]
    folded = [_folded(x, of.kind, leading) for x, of in zip(arrays, formula.operands.values(), strict=True)]
    return BoundCall(posed, tuple(folded), functools.partial(_restored, posed, leading), tuple(params.items()))


def _problem(problem: type[FormulaProblem], fields: Mapping[str, Any], *arrays: Any) -> FormulaProblem | str:
    """Returns the problem of all rows, or the reason why there is none."""
    operands = problem.formula.operands
    if reason := unsupported_reason(dict(zip(operands, arrays, strict=True))):
        return reason
    if not arrays[0].ndim:
        return f"{next(iter(operands))} is a scalar"
    if reason := weakly_typed(*arrays):
        return reason
    leading = arrays[0].shape[:-1]
    try:
        rows = math.prod(leading)
        shapes = [
            jax.ShapeDtypeStruct(
                {"row": (rows, x.shape[-1] if x.ndim else 1), "scalar": (rows,)}.get(of.kind, x.shape), x.dtype
            )
            for x, of in zip(arrays, operands.values(), strict=True)
        ]
        made = problem.of(*shapes, **fields)
        made.program  # noqa: B018 (raises NoProgram)
    except (TypeError, ValueError, NoProgram) as error:
        return str(error)
    return made


def _folded(x: Any, kind: str, leading: tuple[int, ...]) -> Any:
    """Returns an operand with its leading axes in the form that calls take (`front_end.lead`)."""
    return x.reshape(*lead(leading), *x.shape[len(leading) :]) if kind in ("row", "scalar") else x


def _restored(posed: RowProblem, leading: tuple[int, ...], *results: jax.Array) -> Any:
    """Returns the results of a call with the caller's leading axes."""
    _, kinds = posed.arrays
    found = []
    for x, declared, shape in zip(results, kinds, posed.results(), strict=True):
        found.append(x if declared.kind == "row sum" else x.reshape(*leading, *shape.shape[1:]))
    return posed.pack(found)


def by_vmap(formula: Formula, *arrays: Any, **params: Any) -> Any:
    """Computes a formula by XLA, in float32 or in the wider or complex dtype of an operand."""
    arrays = tuple(jnp.asarray(x) for x in arrays)
    wide = formula_dtype(*arrays)
    function = functools.partial(formula.function, **params)
    leading = arrays[0].shape[:-1]
    kinds = [of.kind for of in formula.operands.values()]
    converted = [
        x.astype(wide)
        if x.dtype.itemsize > 4 or (not jnp.issubdtype(x.dtype, jnp.floating) and kind != "scalar")
        else x
        for x, kind in zip(arrays, kinds, strict=True)
    ]
    narrow = arrays[0].dtype if jnp.issubdtype(arrays[0].dtype, jnp.inexact) else None
    found = mapped(function, kinds, (len(leading), 0), converted)
    results = [
        x.astype(narrow) if narrow is not None and x.ndim == arrays[0].ndim and x.dtype == wide else x
        for x in as_tuple(found)
    ]
    return tuple(results) if isinstance(found, tuple) else results[0]


def formula_dtype(*arrays: jax.Array) -> jnp.dtype[Any]:
    """Returns float32, or a wider or complex dtype among the arrays; integers count as JAX's default float."""
    found = jnp.dtype(jnp.float32)
    for x in arrays:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        if dtype.itemsize > 1:  # JAX has no implicit promotion of 8-bit dtypes
            found = jnp.promote_types(found, dtype)
    return found


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """A user's function of one row, as a static argument of calls.

    Attributes:
      scalars: names of the arguments with one element per row.
      generation: `Bindings.generation` of the function.
      keys: for each argument that is a random key, its place, its implementation, and the number of its words, which
        are arguments in its place.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    scalars: tuple[str, ...]
    generation: int = 0
    keys: tuple[tuple[int, Any, int], ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def given(self, statics: Params) -> Callable[..., Any]:
        """Returns the function of arrays alone."""
        run = functools.partial(self.function, **dict(statics))
        return functools.partial(self._with_keys, run)

    def _with_keys(self, run: Callable[..., Any], *arrays: Any) -> Any:
        args = list(arrays)
        for place, impl, count in self.keys:
            args[place : place + count] = [key_of(args[place : place + count], impl)]
        with tracing(self.generation):
            result = run(*args)
        self._require_arrays(result)
        return result

    def _require_arrays(self, result: Any) -> None:
        wanted = f"{self.name} of one row must return rows, scalars, or a pytree of both, found"
        if not (leaves := jax.tree.leaves(result)):
            raise TypeError(f"{wanted} {result!r}")
        for x in leaves:
            try:
                jax.typeof(x)
            except TypeError:
                raise TypeError(f"{wanted} {reprlib.repr(x)} of type {type(x).__name__}") from None

    def of_words(self, arrays: Sequence[Any]) -> tuple[RowFunction, tuple[Any, ...]]:
        """Returns the function and its arguments with the words of random keys in place of the keys."""
        names, args, keys = list(self.names), list(arrays), []
        for place in reversed(range(len(args))):
            if is_key(args[place]):
                words = words_of(args[place])
                keys.append((place, jax.random.key_impl(args[place]), len(words)))
                args[place : place + 1] = words
                names[place : place + 1] = [f"{names[place]}, word {i}" for i in range(len(words))]
        of_keys = tuple(name for name in names if name not in self.names)
        # The last key was replaced first: joining from the first on finds each at its place.
        scalars = (*self.scalars, *of_keys)
        return dataclasses.replace(self, names=tuple(names), scalars=scalars, keys=tuple(keys[::-1])), tuple(args)


P = TypeVar("P", bound=ProgramProblem)


def inner_of(x: Any, axis: int) -> int:
    """Returns how many rows along an axis of x have adjacent elements: 1 along the last axis with several elements."""
    return math.prod(_around(jnp.shape(x), axis)[1])


def _around(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes before, and after, one of a shape; raises a ValueError if there is no such axis."""
    axes = max(1, len(shape))
    if not -axes <= axis < axes:
        raise ValueError(f"axis={axis} is none of an array of shape {shape}")
    place = axis % axes
    return shape[:place], shape[place + 1 :]


def bind_program(
    type_of_problem: type[P], *arrays: Any, function: RowFunction, statics: Params = NO_PARAMS, axis: int = -1
) -> BoundCall[P] | Unsupported:
    """Binds a call of a function of one row.

    Arguments with as many axes as the first are rows. Those with one axis less that `RowFunction.scalars` names have
    one element per row, as random keys have. All rows share the others.

    Args:
      type_of_problem: `ProgramAlongProblem` if `inner_of` the first array is more than 1, else `ProgramProblem`.
      axis: the axis of the first array along which rows lie.
    """
    for name, x in zip(function.names, arrays, strict=False):
        require_array(name, x)
    before, after = _around(jnp.shape(arrays[0]), axis)
    leading = before + after
    kinds = [_kind(name, x, axis, arrays[0], function) for name, x in zip(function.names, arrays, strict=False)]
    answer = functools.partial(mapped, function.given(statics), kinds, (len(before), len(after)), arrays)
    reason = unsupported_reason(dict(zip(function.names, arrays, strict=False)))
    if any(map(is_key, arrays)) and not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        reason = reason or f"{function.name} takes a random key, and jax_threefry_partitionable is False"
    if reason is None and leading:
        function, arrays = function.of_words(arrays)
        kinds = [_kind(name, x, axis, arrays[0], function) for name, x in zip(function.names, arrays, strict=True)]
        reason = weakly_typed(*arrays)
    inner = math.prod(after)
    if (inner > 1) != issubclass(type_of_problem, ProgramAlongProblem):
        reason = reason or f"{axis=} of an array of shape {jnp.shape(arrays[0])} is that of another operation on rows"
    if reason is not None or not leading:
        return Unsupported(reason or f"{function.names[0]} is a single row", answer)
    rows = [
        {"row": x.shape[len(before) : len(before) + 1], "scalar": ()}.get(k, x.shape)
        for x, k in zip(arrays, kinds, strict=True)
    ]
    structs = [jax.ShapeDtypeStruct(shape, x.dtype) for x, shape in zip(arrays, rows, strict=True)]
    jaxpr, captured, returned = _traced(function.given(statics), structs)
    reason = unsupported_reason({f"value {i} that {function.name} captures": x for i, x in enumerate(captured)})
    if any(x.ndim > 1 or is_key(x) for x in captured):
        reason = reason or f"{function.name} captures a traced key, or a traced array of several axes"
    if reason is not None:
        return Unsupported(reason, answer)
    # Captured values are arrays that all rows share.
    arrays += tuple(lax.convert_element_type(x, x.dtype) for x in captured)
    kinds += ["shared" if x.ndim else "number" for x in captured]
    rows += [x.shape for x in captured]
    x64 = bool(jax.config.read("jax_enable_x64"))
    origin = ProgramOrigin(function, statics, tuple(kinds), x64, digest(jaxpr), jaxpr)
    found = _program(origin)
    if isinstance(found, str):
        return Unsupported(found, answer)
    text, segments, kept = found
    remember(text, kept)
    leaves, structure = jax.tree.flatten(returned)
    several = {"inner": inner} if inner > 1 else {}
    program = type_of_problem(rows=math.prod(leading) * segments, text=text, name=function.name, **several)
    rest = lead(after) if inner > 1 else ()

    def folded(x: Any, kind: str, row: tuple[int, ...]) -> Any:
        return x.reshape(*lead(before), *row, *rest) if kind in ("row", "scalar") else x

    operands = [
        folded(x, kind, shape) if segments == 1 else x.reshape(s.shape)
        for x, kind, shape, s in zip(arrays, kinds, rows, program.operands(), strict=True)
    ]

    def restore(*results: jax.Array) -> Any:
        shaped = [x.reshape(*before, *of.shape, *after) for x, of in zip(results, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    return BoundCall(program, tuple(operands), restore, (("origin", origin),))


def _kind(name: str, x: Any, axis: int, first: Any, function: RowFunction) -> str:
    shape, (before, after) = jnp.shape(x), _around(jnp.shape(first), axis)
    if is_key(x) and shape != before + after:
        raise ValueError(
            f"{name} has shape {shape}: each row draws from a key of its own, as of jax.random.split(key, "
            f"{before + after})"
        )
    if name in function.scalars or is_key(x):
        if shape != before + after:
            raise ValueError(f"{name} has shape {shape}; one element for each row needs {before + after}")
        return "scalar"
    if len(shape) == len(before + after) + 1 and len(shape) > 1:
        if _around(shape, axis) != (before, after):
            axes = f"leading axes {before}" if not after else f"axes {before} and {after} around the rows"
            raise ValueError(f"{name} has shape {shape}, and {function.names[0]} the {axes}: both are rows")
        return "row"
    return "shared" if shape else "number"


def _traced(run: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, tuple[jax.Array, ...], Any]:
    """Returns the jaxpr of a function of one row, values of outer traces that it captures, and its results.

    Captured values are the last arguments of the jaxpr.
    """
    with empty_mesh():  # equations keep the mesh of their trace
        closed, returned = jax.make_jaxpr(run, return_shape=True)(*shapes)
        consts = getattr(closed, "consts", ())
        captured = tuple(x for x in consts if isinstance(x, jax.core.Tracer))

        def of_all(*args: Any) -> list[Any]:
            rest = iter(args[len(shapes) :])
            held = [next(rest) if isinstance(x, jax.core.Tracer) else x for x in consts]
            results: list[Any] = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, held))(*args[: len(shapes)])
            return results

        if captured:
            closed = jax.make_jaxpr(of_all)(*shapes, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured))
    return closed, captured, returned


@dataclasses.dataclass(frozen=True)
class ProgramOrigin:
    """The function of which a program was derived, as a parameter of the call.

    Custom derivatives of a function, such as those of `jax.lax.stop_gradient`, are not in its program.

    Attributes:
      statics: static arguments as `bind_program` takes them.
      kinds: of each array, as in `Operand`.
      x64: whether JAX's default types have 64 bits.
      digest: of the jaxpr. It changes with all that the function reads; derivative rules change with the others.
      jaxpr: of the function of one row.
    """

    function: RowFunction
    statics: Params
    kinds: tuple[str, ...]
    x64: bool
    digest: str
    jaxpr: Any = dataclasses.field(compare=False, repr=False)

    @property
    def traceable(self) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], list[str]]:
        """Returns the arguments of `trace`."""
        arrays = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in opened_jaxpr(self.jaxpr).invars]
        return core.jaxpr_as_fun(self.jaxpr), arrays, list(self.kinds)

    @property
    def written(self) -> Written:
        return Written(self.jaxpr, self.kinds)

    def over_rows(self, p: RowProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the function by XLA, for operands and results as in the problem of its program."""
        return self.written.over_rows(p, *arrays, rounded=True)


@functools.lru_cache(maxsize=1024)
def _program(origin: ProgramOrigin) -> tuple[str, int, Written] | str:
    """Returns the program's text, its segments and its function; or why there is none."""
    try:
        program, segments = trace(*origin.traceable)
    except NoProgram as error:
        return f"{origin.function.name} {error}"
    return program.text(), segments, Written(origin.jaxpr, origin.kinds, segments)
