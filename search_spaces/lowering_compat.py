"""Private JAX APIs of compiled calls: the lowering of an equation, and the context that `jax.jit` caches by."""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax._src import config
from jax._src.interpreters import mlir
from jax._src.pallas.pallas_call import pallas_call_p

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


def infer_layouts_sooner() -> None:
    """Makes Mosaic GPU, in this process, name each operation of a kernel only once while it infers layouts.

    JAX 0.11 sorts by the text of operations, and prints an operation for each comparison, which numbers all values of
    the kernel anew. That is half of the lowering time of attention. The inferred layouts are the same. Other versions
    need no text.
    """
    inference: Any = importlib.import_module("jax.experimental.mosaic.gpu.layout_inference")
    if jax_compat.JAX_VERSION[:2] != (0, 11) or hasattr(inference.infer_layout, "__wrapped__"):
        return
    infer, name_of = inference.infer_layout, inference.ValueSite.__str__
    numbering: Any = importlib.import_module("jaxlib.mlir.ir").AsmState
    names: dict[Any, str] = {}
    numbered: list[Any] = []  # value numberings of the kernel whose layouts are being inferred

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
