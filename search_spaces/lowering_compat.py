"""Private JAX APIs of compiled calls: the lowering of an equation, and the context that `jax.jit` caches by."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import api_util, checkify, config, debugging, pjit, source_info_util, tree_util
from jax._src.interpreters import mlir, pxla
from jax._src.pallas.pallas_call import pallas_call_p
from jax.experimental import jet
from jax.extend.core import Primitive
from jaxlib.mlir import ir, passmanager

from search_spaces import jax_compat

# (platform, whether XLA partitions it over devices, the equation's inputs, its parameters) -> a function that computes
# its results; None leaves the equation to JAX.
Answer = Callable[[str, bool, tuple[Any, ...], Mapping[str, Any]], Callable[..., tuple[jax.Array, ...]] | None]

_JITTED: Any = type(jax.jit(lambda: None))


def lower(
    traced: Any,
    answers: Mapping[Any, Answer],
    untouched: Collection[Any] = (),
    *,
    platforms: tuple[str, ...] | None = None,
) -> Any:
    """Returns ``traced.lower(lowering_platforms=platforms)`` with equations of these primitives replaced by `answers`.

    Replacement works at any nesting: in lowering, scans, branches, remat, custom derivatives and batching are plain
    equations, so none is lost. Other lowerings of the same function are unaffected. The replacement itself is lowered
    by JAX's default rules, as are the contents of equations of `untouched` and of Pallas kernels.
    """
    rules: dict[Any, Any] = {primitive: functools.partial(_answered, answer) for primitive, answer in answers.items()}
    rules |= dict.fromkeys((pallas_call_p, *untouched), _plain)
    how = mlir.LoweringParameters(override_lowering_rules=_as_wanted(rules))
    return traced.lower(lowering_platforms=platforms, _private_parameters=how)


def _as_wanted(rules: Mapping[Any, Any]) -> Any:
    """Returns the rules in the form that this version of JAX takes: pairs, or a mapping."""
    annotation = str(mlir.LoweringParameters.__dataclass_fields__["override_lowering_rules"].type)
    return dict(rules) if "apping" in annotation or "dict" in annotation else tuple(rules.items())


def _answered(answer: Answer, ctx: Any, *args: Any, **params: Any) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    elsewhere = getattr(ctx.jaxpr_eqn_ctx, "compute_type", None)  # for example the host of an accelerator
    if len(platforms) == 1 and elsewhere is None:
        partitioned = jax_compat.is_partitioned(ctx.module_context.axis_context)
        run = answer(platforms[0], partitioned, tuple(ctx.avals_in), params)
        if run is not None:
            return jax_compat.lower(run, _unruled(ctx), args)
    return _plain(ctx, *args, **params)


def _plain(ctx: Any, *args: Any, **params: Any) -> Any:
    """Lowers the equation by JAX's own rule."""
    ctx = _unruled(ctx)
    platforms, default, _ = mlir._get_lowering_rules(ctx.module_context, ctx.primitive, ctx.jaxpr_eqn_ctx)
    described = str(ctx.primitive)
    return tuple(mlir.lower_per_platform(ctx, described, platforms, default, frozenset(), *args, **params))


def _unruled(ctx: Any) -> Any:
    """Returns the context without these rules and without cached lowerings that used them."""
    parameters = mlir.LoweringParameters()
    module = ctx.module_context.replace(
        lowering_parameters=parameters, lowering_cache={}, cached_primitive_lowerings={}
    )
    return ctx.replace(module_context=module)


def is_jitted(fn: Any) -> bool:
    """Returns whether `fn` comes from `jax.jit`; functions with another library's own jit do not."""
    return isinstance(fn, _JITTED)


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the positions and the names of a jitted function's static arguments."""
    known = jitted._jit_info
    return tuple(known.static_argnums or ()), tuple(known.static_argnames or ())


def donated_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the positions and the names of a jitted function's donated arguments."""
    known = jitted._jit_info
    return tuple(known.donate_argnums or ()), tuple(known.donate_argnames or ())


def runs_anywhere(jitted: Any) -> bool:
    """Returns whether a jitted function has neither a device nor a backend set."""
    known = jitted._jit_info
    return known.device is None and known.backend is None


def trace_context() -> Any:
    """Returns JAX's trace cache key besides the arguments: a mesh, the default precision, `scheduler.target`."""
    return config.trace_context()


def dispatched(
    name: str,
    fn: Callable[..., Any],
    select: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]] | None],
    static: tuple[tuple[int, ...], tuple[str, ...]],
) -> Callable[..., Any]:
    """Returns a function with the call cost of a `jax.jit` function: JAX's C++ code finds the program of a call.

    The key of JAX includes the structure, shapes, dtypes and placement of the arguments, and `trace_context`.

    Args:
      fn: What is called under `jax.disable_jit`.
      select: From the arguments of a call with a new key to a `jax.stages.Compiled` and the arguments that it takes,
        without the static ones. None makes this call, and later ones with this key, return `NotImplemented`.
      static: Indices and names of the static arguments.
    """

    def miss(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        selected = select(args, kwargs)
        if selected is None:
            return NotImplemented, None, False
        compiled, given, named = selected
        params = compiled._params
        results, flat_results, flat = type(compiled).call(params, *given, **named)
        executable, fast = params.executable, None
        if not executable.unsafe_call.has_host_callbacks:  # the entry would not keep the callbacks alive
            constants = executable.shard_const_args(params.const_args)
            fast = pjit._get_fastpath_data(executable, params.out_tree, flat, flat_results, (), (), None, constants)
        return results, fast, False  # keep the entry

    keys, shard = pxla.JitGlobalCppCacheKeys(), pxla.cc_shard_arg
    function: Callable[..., Any] = pjit._jax.pjit(  # type: ignore[attr-defined]
        name, fn, miss, list(static[0]), list(static[1]), keys, tree_util.dispatch_registry, shard
    )
    return function


def infer_layouts_sooner() -> None:
    """Makes Mosaic GPU, in this process, name each operation of a kernel only once while it infers layouts.

    JAX 0.11 sorts by the text of operations, and prints an operation for each comparison, which numbers all values of
    the kernel anew. That is half of the lowering time of attention. The inferred layouts are the same. Other versions
    need no text.
    """
    if jax_compat.JAX_VERSION[:2] != (0, 11):
        return
    inference: Any = importlib.import_module("jax.experimental.mosaic.gpu.layout_inference")
    if hasattr(inference.infer_layout, "__wrapped__"):
        return
    infer, name_of = inference.infer_layout, inference.ValueSite.__str__
    numbering: Any = importlib.import_module("jaxlib.mlir.ir").AsmState
    names: dict[Any, str] = {}
    numbered: list[Any] = []  # value numberings of the kernel in layout inference

    @functools.wraps(infer)
    def infer_layout(module: Any, **how: Any) -> Any:
        numbered.append(numbering(module.operation))
        try:
            return infer(module, **how)
        finally:
            numbered.pop()
            names.clear()

    def name(site: Any) -> str:
        if not numbered:
            return str(name_of(site))
        if site.operation not in names:
            text = io.StringIO()
            site.operation.print(numbered[-1], file=text)
            names[site.operation] = inference._op_name_regex.match(text.getvalue())[0]
        return f"{names[site.operation]}:{site.type.name[0].lower()}-{site.index}"

    inference.infer_layout, inference.ValueSite.__str__ = infer_layout, name


def assume_architecture(major: int, minor: int) -> None:
    """Makes Mosaic GPU, in this process, compile for GPUs of this compute capability.

    For a GPU that JAX does not see, Mosaic GPU of JAX 0.12 assumes Hopper.
    """
    utils: Any = importlib.import_module("jax.experimental.mosaic.gpu.utils")
    utils._infer_arch = lambda: (major, minor)


# ------------------------------------------------------------------------------
# Private JAX APIs for debugging modes, `checkify` and `jet`: how they handle an application of a primitive.

# Raised by JAX if a result of a compiled program is NaN or infinite while a debugging mode checks for that.
InternalFloatingPointError: type[Exception] = api_util.InternalFloatingPointError
# The effect of `jax.debug.callback`, which loops, checkpoints and custom derivatives allow.
DEBUG_EFFECT: Any = debugging.debug_effect


def as_one_operation(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Jits `function` as a single operation for `jax.debug_nans` and `jax.debug_infs`.

    If a result is NaN, JAX runs a jitted function again, equation by equation, to find the equation that produced it.
    For a function that JAX treats as one operation, it raises `FloatingPointError` with `name` instead.
    """
    function.__name__ = function.__qualname__ = name
    function._apply_primitive = True  # type: ignore[attr-defined]
    return jax.jit(function)


def is_expanded_by_jet(args: Sequence[Any]) -> bool:
    """Returns whether `jax.experimental.jet` expands a call with these arguments: it fails on any `jax.custom_vjp`."""
    return any(isinstance(x, jet.JetTracer) for x in args)


def let_checkify_see(primitive: Primitive, name: Callable[..., str]) -> None:
    """Makes the float checks of `checkify` look for NaN in the results of `primitive`.

    Args:
      primitive: a JAX primitive with multiple results.
      name: from the parameters of an application to the name in the message.
    """

    def check(*args: Any, **params: Any) -> Any:
        named: Any = types.SimpleNamespace(name=name(**params), bind=primitive.bind, multiple_results=True)
        return checkify.nan_error_check(named, *args, **params)

    checkify.error_checks[primitive] = check


def let_jet_see(primitive: Primitive, name: Callable[..., str], formula: Callable[..., Any]) -> None:
    """Makes `jax.experimental.jet` expand applications of `primitive` by ``formula(*args, **params)``.

    If JAX has no rule for an equation of the formula, a `NotImplementedError` with the call's `name` is raised.
    """

    def expand(primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        try:
            return jet.jet2(functools.partial(formula, **params), tuple(primals), tuple(series))
        except KeyError as error:
            if not isinstance(error.args[0], Primitive):
                raise
            raise NotImplementedError(
                f"jax.experimental.jet has no rule for {error.args[0]}, which the formula of {name(**params)} needs: "
                "use jax.jvp several times instead"
            ) from None

    rules: dict[Any, Any] = jet.jet_rules
    rules[primitive] = expand


# ------------------------------------------------------------------------------
# Private JAX APIs for jaxprs: evaluate one equation, and lower a trace with another jaxpr.


def source_of(equation: Any) -> AbstractContextManager[Any]:
    """Traces with the source line and the scope of an equation of a jaxpr."""
    name_stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    context: AbstractContextManager[Any] = source_info_util.user_context(
        equation.source_info.traceback, name_stack=name_stack
    )
    return context


def evaluate_equation(equation: Any, *args: Any) -> list[Any]:
    """Returns the results of an equation of a jaxpr; a trace of them keeps the equation's source line and scope."""
    if equation.primitive.name == "convert_element_type" and isinstance(args[0], np.ndarray):
        # JAX casts numbers that it knows by NumPy, which wraps where XLA saturates.
        args = (lax.optimization_barrier(args[0]),)
    with source_of(equation), equation.ctx.manager:
        results = equation.primitive.bind(*args, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def scan_inputs(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a `scan` equation are constants, and how many are the carry."""
    if "num_carry" in params:  # JAX 0.10
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def device_count(lowered: Any) -> int:
    """Returns the number of devices, of all processes, over which XLA partitions a lowered function."""
    return int(lowered._lowering.compile_args["num_devices"])


def compiler_options(lowered: Any) -> dict[str, Any]:
    """Returns the compiler options of the `jax.jit` of a lowered function."""
    return dict(lowered._lowering._compiler_options_kvs)


def module_bytes(lowered: Any, plain: Any) -> bytes | None:
    """Returns the program of a lowered function, to be put in place of that of `plain` by `with_module`.

    Returns None if another process could not run it with the arguments of `plain`: it runs on several devices, calls
    the host, or takes other arguments or constants.
    """
    own, other = lowered._lowering, plain._lowering
    held = ("unordered_effects", "ordered_effects", "host_callbacks", "keepalive")
    taken, given = ([*map(id, x.const_args), *sorted(x.compile_args["kept_var_idx"])] for x in (own, other))
    if taken != given or device_count(lowered) > 1 or any(own.compile_args[name] for name in held):
        return None
    return program_bytes(lowered)


def program_bytes(lowered: Any) -> bytes:
    """Returns the program of a lowered function without source lines."""
    module, found = lowered._lowering._hlo, io.BytesIO()
    with module.context:
        copied = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copied.operation)
    copied.operation.write_bytecode(found)
    return found.getvalue()


def with_module(plain: Any, module: bytes) -> Any:
    """Returns a copy of a lowered function with another program, from `module_bytes`."""
    lowered, computation = copy.copy(plain), copy.copy(plain._lowering)
    computation._hlo, computation._executable = ir.Module.parse(module, mlir.make_ir_context()), None
    lowered._lowering = computation
    return lowered


def with_jaxpr(traced: Any, jaxpr: Any) -> Any:
    """Returns a copy of the result of a `jax.jit` trace that lowers `jaxpr`, of the same arguments and results."""
    other = copy.copy(traced)
    other._params = {**traced._params, "jaxpr": jaxpr}
    other._lojax = None
    return other
