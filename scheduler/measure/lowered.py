"""Reads the on-chip memory that a lowered kernel requests from its program, before it is compiled or run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib.mlir import ir

from search_spaces.kernel import Kernel, Target
from search_spaces.problem import Problem

# Names in Mosaic GPU's lowering, in every version: the kernel's call target, and the launch operation in its module.
_MOSAIC_GPU = "mosaic_gpu"
_LAUNCH = ".gpu.launch"


def lower(kernel: Kernel[Any, Any], problem: Problem, schedule: Any, target: Target) -> jax.stages.Lowered:
    """Lowers a candidate for a chip that may be absent; raises any exception of the kernel or of JAX."""
    run = jax.jit(lambda *args: kernel.results(problem, schedule, target, *args))
    return run.trace(*problem.operands()).lower(lowering_platforms=(target.platform,))


def asked_onchip_bytes(lowered: jax.stages.Lowered) -> int | None:
    """Returns the bytes of on-chip memory that one block requests; the maximum over all launches of the program.

    Returns None if the program does not contain the size. Triton determines it when it compiles, and an interpreter has
    no on-chip memory.
    """
    module = lowered.compiler_ir("stablehlo")
    if not isinstance(module, ir.Module):
        return None
    calls = (op for op in _operations(module.operation) if op.name == "stablehlo.custom_call")
    kernels = (call for call in calls if _MOSAIC_GPU in str(call.attributes["call_target_name"]))
    try:
        return max((size for kernel in kernels for size in _asked(kernel, module.context)), default=None)
    except ir.MLIRError:  # the module has a version that this jaxlib cannot parse
        return None


def _asked(kernel: Any, context: ir.Context) -> Iterator[int]:
    """Yields the bytes that each launch of a Mosaic GPU kernel requests; nothing if this JAX stores them elsewhere.

    `context` belongs to the enclosing program, in which the kernel's types are registered.
    """
    if "mhlo.backend_config" not in kernel.attributes:
        return
    settings = kernel.attributes["mhlo.backend_config"]
    if not isinstance(settings, ir.DictAttr) or "module" not in settings:
        return
    serialized = ir.StringAttr(settings["module"]).value_bytes
    with _allowing_other_dialects(context):  # the serialized module has its own dialect
        module = ir.Module.parse(serialized, context)
    for op in _operations(module.operation, but=_LAUNCH):
        if op.name.endswith(_LAUNCH):
            # The extents of grid, block and cluster have type index. The on-chip memory is the only i32 operand.
            made_by = (operand.owner for operand in op.operands if str(operand.type) == "i32")
            yield from (ir.IntegerAttr(o.attributes["value"]).value for o in made_by if not isinstance(o, ir.Block))


@contextlib.contextmanager
def _allowing_other_dialects(context: ir.Context) -> Iterator[None]:
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        yield
    finally:
        context.allow_unregistered_dialects = before


def _operations(within: Any, but: str | None = None) -> Iterator[Any]:
    """Yields all operations in pre-order, without the contents of operations with a name that ends with `but`."""
    for region in within.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                if but is None or not op.operation.name.endswith(but):
                    yield from _operations(op.operation, but)
