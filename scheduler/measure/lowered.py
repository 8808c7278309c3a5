"""The on-chip memory that a lowered kernel asks for, read from its program: before it is compiled or run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib.mlir import ir

from search_spaces.kernel import Kernel, Target
from search_spaces.problem import Problem

# What Mosaic GPU's lowering calls a kernel, whichever version of it, and the launch within its module.
_MOSAIC_GPU = "mosaic_gpu"
_LAUNCH = ".gpu.launch"


def lower(kernel: Kernel[Any, Any], problem: Problem, schedule: Any, target: Target) -> jax.stages.Lowered:
    """A candidate lowered for a chip that need not be here; raises whatever the kernel, or JAX of it, raises."""
    run = jax.jit(lambda *args: kernel.results(problem, schedule, target, *args))
    return run.trace(*problem.operands()).lower(lowering_platforms=(target.platform,))


def asked_onchip_bytes(lowered: jax.stages.Lowered) -> int | None:
    """What one block of a lowered program asks for, the most of its launches.

    None where the program does not say: Triton settles it when it compiles, and an interpreter has no such memory.
    """
    module = lowered.compiler_ir("stablehlo")
    if not isinstance(module, ir.Module):
        return None
    calls = (op for op in _operations(module.operation) if op.name == "stablehlo.custom_call")
    kernels = (call for call in calls if _MOSAIC_GPU in str(call.attributes["call_target_name"]))
    try:
        return max((size for kernel in kernels for size in _asked(kernel, module.context)), default=None)
    except ir.MLIRError:  # of another version than this jaxlib reads
        return None


def _asked(kernel: Any, context: ir.Context) -> Iterator[int]:
    """The bytes that each launch of a Mosaic GPU kernel asks for; nothing where this JAX says it elsewhere.

    `context` is that of the program around it, which knows the kernel's types.
    """
    if "mhlo.backend_config" not in kernel.attributes:
        return
    settings = kernel.attributes["mhlo.backend_config"]
    if not isinstance(settings, ir.DictAttr) or "module" not in settings:
        return
    serialized = ir.StringAttr(settings["module"]).value_bytes
    with _allowing_other_dialects(context):  # that of the serialized form
        module = ir.Module.parse(serialized, context)
    for op in _operations(module.operation, but=_LAUNCH):
        if op.name.endswith(_LAUNCH):
            # The extents of grid, block and cluster are of type index; its on-chip memory alone is an i32.
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
    """Every operation within, an outer one before those within it; of one whose name ends with `but`, not those."""
    for region in within.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                if but is None or not op.operation.name.endswith(but):
                    yield from _operations(op.operation, but)
