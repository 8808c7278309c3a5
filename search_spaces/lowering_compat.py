"""JAX's private half of a compiled call: what an equation is lowered to, and by what `jax.jit` tells calls apart."""

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

# (platform, whether XLA divides it over devices, the equation's inputs, its parameters) -> what computes its results
# there; None leaves it to JAX.
Answer = Callable[[str, bool, tuple[Any, ...], Mapping[str, Any]], Callable[..., tuple[jax.Array, ...]] | None]

_JITTED: Any = type(jax.jit(lambda: None))


def lower(
    traced: Any,
    answers: Mapping[Any, Answer],
    untouched: Collection[Any] = (),
    *,
    platforms: tuple[str, ...] | None = None,
) -> Any:
    """``traced.lower(lowering_platforms=platforms)``, with equations of these primitives lowered to what answers give.

    Wherever they are: by then scans, branches, remat, custom derivatives and batching are plain equations, so none is
    lost, and other lowerings of the same function stay as they are. What an answer computes is lowered as JAX always
    does it, and so is what equations of `untouched` and Pallas kernels hold.
    """
    rules: dict[Any, Any] = {primitive: functools.partial(_answered, answer) for primitive, answer in answers.items()}
    rules |= dict.fromkeys((pallas_call_p, *untouched), _plain)
    how = mlir.LoweringParameters(override_lowering_rules=_as_wanted(rules))
    return traced.lower(lowering_platforms=platforms, _private_parameters=how)


def _as_wanted(rules: Mapping[Any, Any]) -> Any:
    """As this version of JAX has it: pairs, or a mapping."""
    annotation = str(mlir.LoweringParameters.__dataclass_fields__["override_lowering_rules"].type)
    return dict(rules) if "apping" in annotation or "dict" in annotation else tuple(rules.items())


def _answered(answer: Answer, ctx: Any, *args: Any, **params: Any) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    elsewhere = getattr(ctx.jaxpr_eqn_ctx, "compute_type", None)  # on the host of an accelerator, above all
    if len(platforms) == 1 and elsewhere is None:
        partitioned = jax_compat.is_partitioned(ctx.module_context.axis_context)
        run = answer(platforms[0], partitioned, tuple(ctx.avals_in), params)
        if run is not None:
            return jax_compat.lower(run, _unruled(ctx), args)
    return _plain(ctx, *args, **params)


def _plain(ctx: Any, *args: Any, **params: Any) -> Any:
    """What JAX lowers the equation to by itself."""
    ctx = _unruled(ctx)
    platforms, default, _ = mlir._get_lowering_rules(ctx.module_context, ctx.primitive, ctx.jaxpr_eqn_ctx)
    described = str(ctx.primitive)
    return tuple(mlir.lower_per_platform(ctx, described, platforms, default, frozenset(), *args, **params))


def _unruled(ctx: Any) -> Any:
    """The context without rules of ours, and without what was lowered by them."""
    parameters = mlir.LoweringParameters()
    module = ctx.module_context.replace(
        lowering_parameters=parameters, lowering_cache={}, cached_primitive_lowerings={}
    )
    return ctx.replace(module_context=module)


def is_jitted(fn: Any) -> bool:
    """Whether it is a function of `jax.jit`; those that a library jits in a way of its own are not."""
    return isinstance(fn, _JITTED)


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers and the names of a jitted function's static arguments."""
    known = jitted._jit_info
    return tuple(known.static_argnums or ()), tuple(known.static_argnames or ())


def donated_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers and the names of a jitted function's donated arguments."""
    known = jitted._jit_info
    return tuple(known.donate_argnums or ()), tuple(known.donate_argnames or ())


def runs_anywhere(jitted: Any) -> bool:
    """Whether a jitted function was told neither a device nor a backend."""
    known = jitted._jit_info
    return known.device is None and known.backend is None


def trace_context() -> Any:
    """What JAX traces anew for, beside arguments: a mesh, the default precision, `scheduler.target`."""
    return config.trace_context()


def infer_layouts_sooner() -> None:
    """From here on, in this process, Mosaic GPU names each operation of a kernel once while it infers layouts.

    JAX 0.11 sorts what it solves for by the text of operations, and prints one, for which all of the kernel's values
    are numbered anew, for each comparison: half of the time that attention takes to be lowered. What it infers is the
    same. Other versions ask for no text.
    """
    inference: Any = importlib.import_module("jax.experimental.mosaic.gpu.layout_inference")
    if jax_compat.JAX_VERSION[:2] != (0, 11) or hasattr(inference.infer_layout, "__wrapped__"):
        return
    infer, name_of = inference.infer_layout, inference.ValueSite.__str__
    numbering: Any = importlib.import_module("jaxlib.mlir.ir").AsmState
    names: dict[Any, str] = {}
    numbered: list[Any] = []  # the values of the kernel whose layouts are inferred now

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
    """From here on, in this process, Mosaic GPU compiles for GPUs of this compute capability.

    For a GPU that JAX does not see, Mosaic GPU of JAX 0.12 assumes Hopper.
    """
    utils: Any = importlib.import_module("jax.experimental.mosaic.gpu.utils")
    utils._infer_arch = lambda: (major, minor)
