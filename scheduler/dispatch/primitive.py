"""The JAX primitive that a tuned call is: traced by shape alone, answered when it is lowered for a platform."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Options
from search_spaces import jax_compat
from search_spaces.kernel import Library, Operation, Problem, Target

Params = tuple[tuple[str, Any], ...]

tuned_call_p = Primitive("tuned_call")

# The library's answer is plain XLA: it asks no target.
ANY_TARGET = Target(platform="any", kind="any", architecture="any", cores=1)


def tuned_call(
    operation: Operation[Any], problem: Problem, *args: Any, params: Params = (), options: Options
) -> jax.Array:
    """`operation` on arrays shaped as `problem.operands()`, by the schedule that `options` allow and choose.

    Raises:
      ValueError: the arrays are not those that the problem describes.
      NoCandidate, IllegalSchedule: as `dispatch.leave_to_library`, on a mesh with explicit axes.
    """
    wanted = problem.operands()
    found = [(jnp.shape(x), jnp.result_type(x)) for x in args]
    if found != [(s.shape, s.dtype) for s in wanted]:
        raise ValueError(
            f"{operation.name} {problem} wants {', '.join(map(_typed, [(s.shape, s.dtype) for s in wanted]))} "
            f"and got {', '.join(map(_typed, found)) or 'nothing'}"
        )
    if jax_compat.has_explicit_axes(args):
        dispatch.leave_to_library(operation, options, dispatch.EXPLICIT_AXES)
        return library(operation, problem, params, *args)
    args = jax_compat.alike(args)
    bound = tuned_call_p.bind(*args, operation=operation, problem=problem, params=params, options=options)
    return cast("jax.Array", bound)


def library(operation: Operation[Any], problem: Problem, params: Params, /, *args: Any) -> jax.Array:
    """The library kernel's answer."""
    return operation.library.run(problem, Library(), ANY_TARGET, *args, **dict(params))


def _typed(array: tuple[tuple[int, ...], Any]) -> str:
    shape, dtype = array
    return f"{dtype}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=1024)
def _compiled(operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Callable[..., Any]:
    return jax.jit(
        lambda *args: tuned_call_p.bind(*args, operation=operation, problem=problem, params=params, options=options)
    )


def _run(*args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Any:
    # Eager calls come as jitted ones; here are the eager products that a derivative or a batching rule makes.
    with jax.disable_jit(False):  # lowering is where the answer is, so there is no way to run without
        return _compiled(operation, problem, params, options)(*args)


def _type(*avals: Any, problem: Problem, **_: Any) -> Any:
    result = problem.result()
    return jax_compat.result_aval(result.shape, result.dtype, like=avals[0])


def _lower(ctx: Any, *args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Any:
    if jax_compat.is_partitioned(ctx.module_context.axis_context):
        # XLA cannot divide a kernel of ours over devices.
        dispatch.leave_to_library(operation, options, f"{problem}: {dispatch.ON_A_MESH}")
        return jax_compat.lower(functools.partial(library, operation, problem, params), ctx, args)

    (platform,) = ctx.platforms or ctx.module_context.platforms
    found = dispatch.decide(operation, problem, platform, options)
    run = functools.partial(found.kernel.run, problem, found.schedule, found.target, **dict(params))
    return jax_compat.lower(run, ctx, args)


def _differentiate(
    primals: Any, tangents: Any, *, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    given = [None if isinstance(t, ad.Zero) else t for t in tangents]
    call = _caller(operation, problem, params, options)
    if operation.jvp is not None:
        result, tangent = operation.jvp(call, problem, primals, given)
    else:
        result, tangent = call(problem, *primals), _library_tangent(operation, problem, params, primals, given)
    return result, jnp.zeros_like(result) if tangent is None else tangent


def _library_tangent(operation: Operation[Any], problem: Problem, params: Params, primals: Any, given: Any) -> Any:
    moving = [i for i, tangent in enumerate(given) if tangent is not None]

    def run(*some: Any) -> jax.Array:
        args = list(primals)
        for i, x in zip(moving, some, strict=True):
            args[i] = x
        return library(operation, problem, params, *args)

    return jax.jvp(run, tuple(primals[i] for i in moving), tuple(given[i] for i in moving))[1]


def _transpose(
    cotangent: Any, *args: Any, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    linear = [ad.is_undefined_primal(x) for x in args]
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval) if is_linear else None for x, is_linear in zip(args, linear, strict=True)]
    if operation.transpose is None:
        raise NotImplementedError(f"{operation.name} has no transpose; give its Operation one, or no jvp that needs it")
    known = [None if is_linear else x for x, is_linear in zip(args, linear, strict=True)]
    return operation.transpose(_caller(operation, problem, params, options), problem, cotangent, known)


def _batch(
    args: Any, dims: Any, *, operation: Operation[Any], problem: Problem, params: Params, options: Options
) -> Any:
    sizes = [x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None]
    call = _caller(operation, problem, params, options)
    if sizes[0] == 0:
        return jnp.zeros((0, *problem.result().shape), problem.result().dtype), 0
    if operation.batch is not None:
        return operation.batch(call, problem, args, dims)
    moved = tuple(jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True) if dim is not None)

    def one(elements: Any) -> jax.Array:
        rest = iter(elements)
        return call(problem, *(x if dim is None else next(rest) for x, dim in zip(args, dims, strict=True)))

    return lax.map(one, moved), 0


def _caller(operation: Operation[Any], problem: Problem, params: Params, options: Options) -> Callable[..., jax.Array]:
    """Poses another problem as part of this one; a schedule that the caller gave was meant for this one only."""

    def call(other: Problem, /, *args: Any) -> jax.Array:
        own = options if other == problem else dataclasses.replace(options, schedule=None)
        return tuned_call(operation, other, *args, params=params, options=own)

    return call


tuned_call_p.def_impl(_run)
tuned_call_p.def_abstract_eval(_type)
mlir.register_lowering(tuned_call_p, _lower)
# A rule of its own for each of these makes JAX lower several platforms apart: Mosaic GPU kernels refuse company.
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(tuned_call_p, functools.partial(_lower), platform=_platform)
ad.primitive_jvps[tuned_call_p] = _differentiate
ad.primitive_transposes[tuned_call_p] = _transpose
batching.primitive_batchers[tuned_call_p] = _batch
jax_compat.let_policies_see(tuned_call_p, lambda *, problem, **_: problem.dimension_numbers)
