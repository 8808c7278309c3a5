"""The JAX primitive of tuned calls. Tracing uses shapes only; lowering for a platform selects the schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from scheduler.core.arguments import backends_of_another, excluded_backends
from scheduler.dispatch import dispatch, lowered_kernels, sharded
from scheduler.dispatch.dispatch import Options
from scheduler.dispatch.query_recorder import RecordingOptions
from search_spaces import jax_compat, lowering_compat
from search_spaces.configuration import formulas
from search_spaces.front_end import Shape, SplitAxes, split_axes
from search_spaces.kernel import Library
from search_spaces.operation import NO_PARAMS, Operation, Params
from search_spaces.problem import Problem, as_tuple
from search_spaces.target import Target

tuned_call_p = Primitive("tuned_call")
tuned_call_p.multiple_results = True

# The library's implementation is plain XLA, which does not read the target.
ANY_TARGET = Target(platform="any", kind="any", architecture="any", cores=1)


def tuned_call(
    operation: Operation[Any], problem: Problem, *args: Any, params: Params = NO_PARAMS, options: Options
) -> Any:
    """Runs `operation` on arrays with the shapes of `problem.operands()`, with the schedule that `options` select.

    An axis with a letter in `Operation.shard` may be split into several axes (`unfolded`). All arrays with this letter
    are split alike, including results.

    Returns:
      An array, or a tuple of arrays, as in `problem.result()`.

    Raises:
      ValueError: shapes or dtypes of the arrays do not match the problem.
      NotShardable: on a mesh with explicit axes, under the same conditions as `sharded.call_sharded`.
    """
    if jax_compat.has_explicit_axes(args):

        def part(local_problem: Problem, *local: Any) -> Any:
            if jax_compat.has_explicit_axes(local):
                raise sharded.NotShardable("a `vmap` has taken an axis of the mesh that divides them")
            return tuned_call(operation, local_problem, *local, params=params, options=options)

        return sharded.call_sharded(operation, problem, options, part, *args)
    if operation.vjp_fwd is not None and not lowering_compat.is_expanded_by_jet(args):
        return _with_vjp(operation, problem, params, options)(*jax_compat.alike(args))
    return _bind(operation, problem, params_of_kernels(operation, params), options, *args)


def params_of_kernels(operation: Operation[Any], params: Iterable[tuple[str, Any]]) -> Params:
    """Returns the parameters that kernels take, without those of derivatives alone (`Operation.vjp_params`)."""
    return Params(named for named in params if named[0] not in operation.vjp_params)


def _bind(operation: Operation[Any], problem: Problem, params: Params, options: Options, /, *args: Any) -> Any:
    """Like `tuned_call`, but differentiated by the primitive's rules even if the operation has a `vjp_fwd`."""
    wanted = [(s.shape, s.dtype) for s in problem.operands()]
    found = [(jnp.shape(x), jnp.result_type(x)) for x in args]
    try:
        if [dtype for _, dtype in found] != [dtype for _, dtype in wanted]:
            raise ValueError("dtypes differ")
        _split_axes(operation, problem, tuple(shape for shape, _ in found))
    except ValueError as error:
        got = ", ".join(map(_typed, found)) or "nothing"
        raise ValueError(
            f"{operation.name} {problem} expects {', '.join(map(_typed, wanted))}, got {got}: {error}"
        ) from None
    args = jax_compat.alike(args)
    bound = tuned_call_p.bind(*args, operation=operation, problem=problem, params=params, options=options)
    return problem.pack(bound)


@functools.lru_cache(maxsize=4096)
def _split_axes(operation: Operation[Any], problem: Problem, shapes: tuple[Shape, ...]) -> SplitAxes[Any] | None:
    """Returns how operands of these shapes split axes of the problem; None if the shapes equal the problem's.

    Raises:
      ValueError: the shapes do not match the problem.
    """
    if list(shapes) == [s.shape for s in problem.operands()]:
        return None
    sharding = operation.sharding(problem)
    if sharding is None or len(shapes) != len(problem.operands()):
        raise ValueError("shapes differ")
    return split_axes(sharding, problem, shapes)


def _split_axes_of(operation: Operation[Any], problem: Problem, args: Any) -> SplitAxes[Any] | None:
    return _split_axes(operation, problem, tuple(x.shape for x in args))


def library(operation: Operation[Any], problem: Problem, params: Params, /, *args: Any) -> tuple[jax.Array, ...]:
    """Returns the results of the library kernel, for arrays as in `tuned_call`."""

    def run(own_problem: Problem, *own: Any) -> tuple[jax.Array, ...]:
        return operation.library.results(own_problem, Library(), ANY_TARGET, *own, **dict(params))

    split = _split_axes_of(operation, problem, args)
    return run(problem, *args) if split is None else split.each(problem, run, *args)


def _typed(array: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = array
    return f"{dtype}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=1024)
def _compiled(operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Callable[..., Any]:
    return lowering_compat.as_one_operation(
        lambda *args: tuned_call_p.bind(*args, operation=operation, problem=problem, params=params, options=options),
        _name(operation),
    )


def _name(operation: Operation[Any], **_: Any) -> str:
    """Returns the name of its calls in JAX's error messages."""
    return f"tuned_{operation.name}"


def _run(*args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Any:
    # Public eager calls are jitted already. Only eager calls made by a derivative or batching rule reach this.
    with jax.disable_jit(False):  # the schedule is selected during lowering, so the call must be compiled
        return _compiled(operation, problem, params, options)(*args)


def _types(*avals: Any, operation: Operation[Any], problem: Problem, **_: Any) -> Any:
    results = _results(operation, problem, tuple(x.shape for x in avals))
    return [jax_compat.result_aval(s.shape, s.dtype, like=avals[0]) for s in results]


def _results(
    operation: Operation[Any], problem: Problem, shapes: tuple[Shape, ...]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes and dtypes of the results for operands of these shapes."""
    split, own = _split_axes(operation, problem, shapes), problem.results()
    if split is None:
        return own
    return tuple(
        jax.ShapeDtypeStruct(shape, s.dtype) for shape, s in zip(split.shapes(problem)[len(shapes) :], own, strict=True)
    )


def _lower(ctx: Any, *args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Any:
    if jax_compat.is_partitioned(ctx.module_context.axis_context):
        lowered = sharded.lower_divided_call(ctx, args, _part, operation, problem, params, options)
        if not isinstance(lowered, str):
            return lowered
        dispatch.leave_to_library(operation, options, f"{problem}: {dispatch.ON_A_MESH}, and {lowered}")
        if isinstance(options, RecordingOptions):
            options.recorder.not_recorded.append(lowered)
        return jax_compat.lower(functools.partial(library, operation, problem, params), ctx, args)
    if isinstance(options, RecordingOptions):
        options.recorder.queries.append((operation, problem))
        return jax_compat.lower(functools.partial(library, operation, problem, params), ctx, args)

    (platform,) = ctx.platforms or ctx.module_context.platforms
    found = dispatch.decide(operation, problem, platform, options)

    def run(own_problem: Problem, *own: Any) -> tuple[jax.Array, ...]:
        return lowered_kernels.results(found, own_problem, dict(params), *own)

    split = _split_axes_of(operation, problem, ctx.avals_in)
    answer = functools.partial(run, problem) if split is None else functools.partial(split.at_once, problem, run)
    return jax_compat.lower(answer, ctx, args)


def _part(operation: Operation[Any], params: Params, options: Options, problem: Problem, *args: Any) -> Any:
    return tuned_call_p.bind(*args, operation=operation, problem=problem, params=params, options=options)


@formulas()
def _differentiate(
    primals: Any, tangents: Any, *, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    call = _caller(operation, problem, params, options)
    if operation.jvp is not None:
        result, tangent = operation.jvp(call, problem, primals, given)
        results = as_tuple(result)
        found = (None,) * len(results) if tangent is None else as_tuple(tangent)
    else:
        results = as_tuple(_bind(operation, problem, params, options, *primals))
        found = _library_tangents(operation, problem, params, primals, given)
    return results, [jnp.zeros_like(x) if t is None else t for x, t in zip(results, found, strict=True)]


def _library_tangents(operation: Operation[Any], problem: Problem, params: Params, primals: Any, given: Any) -> Any:
    moving = [i for i, tangent in enumerate(given) if tangent is not None]

    def run(*some: Any) -> tuple[jax.Array, ...]:
        args = list(primals)
        for i, x in zip(moving, some, strict=True):
            args[i] = x
        return library(operation, problem, params, *args)

    return jax.jvp(run, tuple(primals[i] for i in moving), tuple(given[i] for i in moving))[1]


@formulas()
def _transpose(
    cotangents: Any, *args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    linear = [ad.is_undefined_primal(x) for x in args]
    given = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    if all(ct is None for ct in given):
        return [ad.Zero(x.aval) if is_linear else None for x, is_linear in zip(args, linear, strict=True)]
    if operation.transpose is None:
        raise NotImplementedError(
            f"{operation.name} has no transpose: set Operation.transpose, or use a jvp that needs none"
        )
    known = [None if is_linear else x for x, is_linear in zip(args, linear, strict=True)]
    return operation.transpose(_caller(operation, problem, params, options), problem, problem.pack(given), known)


@functools.lru_cache(maxsize=1024)
def _with_vjp(operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Callable[..., Any]:
    """Returns the call with the operation's own backward pass.

    It is a `jax.custom_vjp`, which does not support forward-mode differentiation.
    """
    kernels_params = params_of_kernels(operation, params)
    call = _caller(operation, problem, kernels_params, options)
    call.params = dict(params)  # type: ignore[attr-defined]  # includes parameters that kernels do not receive
    forward, backward = operation.vjp_fwd, operation.vjp_bwd
    assert forward is not None
    assert backward is not None

    def answer(*args: Any) -> Any:
        return _bind(operation, problem, kernels_params, options, *args)

    answer.__name__ = _name(operation)  # appears in JAX's error for forward mode
    differentiable = jax.custom_vjp(answer)

    @formulas()
    def fwd(*primals: Any) -> Any:
        return forward(call, problem, tuple(x.value for x in primals))

    @formulas()
    def bwd(residuals: Any, cotangent: Any) -> Any:
        given = [None if isinstance(ct, SymbolicZero) else ct for ct in as_tuple(cotangent)]
        return tuple(backward(call, problem, residuals, problem.pack(given)))

    differentiable.defvjp(fwd, bwd, symbolic_zeros=True)
    return differentiable


@formulas()
def _batch(
    args: Any, dims: Any, *, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    sizes = [x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None]
    call = _caller(operation, problem, params, options)
    count = len(problem.results())
    if sizes[0] == 0:
        shapes = [
            x.shape if dim is None else (*x.shape[:dim], *x.shape[dim + 1 :]) for x, dim in zip(args, dims, strict=True)
        ]
        return [jnp.zeros((0, *s.shape), s.dtype) for s in _results(operation, problem, tuple(shapes))], [0] * count
    if sizes[0] == 1:
        only = (x if dim is None else x.squeeze(dim) for x, dim in zip(args, dims, strict=True))
        return [x[None] for x in as_tuple(call(problem, *only))], [0] * count
    joined = None if operation.batch is None else operation.batch(call, problem, args, dims)
    if joined is not None:
        result, dim = joined
        results = as_tuple(result)
        return results, dim if isinstance(dim, tuple | list) else [dim] * len(results)
    moved = tuple(jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True) if dim is not None)

    def one(elements: Any) -> tuple[jax.Array, ...]:
        rest = iter(elements)
        return as_tuple(call(problem, *(x if dim is None else next(rest) for x, dim in zip(args, dims, strict=True))))

    return lax.map(one, moved), [0] * count


def _caller(operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Callable[..., Any]:
    """Returns a function that makes other calls within this one.

    An explicit schedule of the caller applies to this problem only, so other calls do not inherit it.
    """

    def call(*args: Any, **others_params: Any) -> Any:
        if isinstance(args[0], Operation):
            other, called_problem, *arrays = args
            limits = other, operation, options.backends, options.excluded
            allowed, excluded = backends_of_another(*limits), excluded_backends(*limits)
            own = dataclasses.replace(options, schedule=None, backends=allowed, excluded=excluded)
            return tuned_call(other, called_problem, *arrays, params=Params(others_params.items()), options=own)
        called_problem, *arrays = args
        own = options if called_problem == problem else dataclasses.replace(options, schedule=None)
        return _bind(operation, called_problem, params, own, *arrays)

    call.params = dict(params)  # type: ignore[attr-defined]
    return call


def _by_formula(
    *args: Any, operation: Operation[Any], problem: Problem, params: Params, **_: Any
) -> tuple[jax.Array, ...]:
    return library(operation, problem, params, *args)


def _as_dot(*, problem: Problem, **_: Any) -> tuple[Any, ...] | None:
    numbers = problem.dimension_numbers
    return None if numbers is None else (*problem.operands()[:2], numbers)


tuned_call_p.def_impl(_run)
tuned_call_p.def_abstract_eval(_types)
mlir.register_lowering(tuned_call_p, _lower)
# A separate rule per platform makes JAX lower the platforms separately. Mosaic GPU kernels reject a multi-platform
# lowering.
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(tuned_call_p, functools.partial(_lower), platform=_platform)
ad.primitive_jvps[tuned_call_p] = _differentiate
ad.primitive_transposes[tuned_call_p] = _transpose
batching.primitive_batchers[tuned_call_p] = _batch
jax_compat.let_policies_see(tuned_call_p, _as_dot)
lowering_compat.let_checkify_see(tuned_call_p, _name)
lowering_compat.let_jet_see(tuned_call_p, _name, _by_formula)
