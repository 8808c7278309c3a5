"""Asynchronous wgmma products whose accumulators are values, to be waited for later (hopper/wgmma_async.py).

`plgpu.wgmma` keeps accumulators in references, which a loop cannot carry from one step to the next while they are in
flight. Here accumulators are values.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from search_spaces.hopper import untiled_swizzled
from search_spaces.hopper.dsmem import ptx
from search_spaces.hopper.limits import WGMMA_ROWS
from search_spaces.jax_compat import interprets, mosaic_gpu_code, plgpu

WGMMA_DEPTH = 16  # 16-bit elements of the contracted axis in one instruction (PTX ISA, wgmma.mma_async)
# The package exports a function of the same name.
_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")


def start(
    acc: jax.Array | None, a: Any, b: Any, *, columns: int, transforms: Any, transpose_a: bool, transpose_b: bool
) -> jax.Array:
    """Starts ``acc + a b``, float32 with 64 rows; call `wgmma_async.wait` before using the result.

    Args:
      acc: an earlier result, in flight or not, that has not been used since; None means zeros.
      a: 64 rows, in SMEM, or an array in registers in wgmma's layout. No product may be in flight before its cast to 16
        bits; otherwise ptxas waits for each product before it starts the next one, with warning C7513.
      b: `columns` columns, in SMEM.
      transforms: of `a` (None in registers) and `b` in SMEM. Untiled operands have three axes (smem_layout.py).
      transpose_a, transpose_b: whether rows of the operand in SMEM are columns of the factor.
    """
    in_registers = isinstance(a, jax.Array)
    shape = (WGMMA_ROWS, columns)

    def meaning(*operands: Any) -> jax.Array:
        *sum_so_far, a, b = operands
        a, b = a if in_registers else _matrix(a), _matrix(b)
        plgpu.commit_smem()  # Threads, unlike wgmma, read these: later copies must be ordered after the reads.
        a, b = a.T if transpose_a else a, b.T if transpose_b else b
        product: jax.Array = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
        return sum_so_far[0] + product if sum_so_far else product

    layout = plgpu.Layout.WGMMA
    a_type = layout if in_registers else plgpu.RefType(transforms[0])

    @mosaic_gpu_code(
        meaning,
        arg_types=(*(() if acc is None else (layout,)), a_type, plgpu.RefType(transforms[1])),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def product(_: Any, *operands: Any) -> Any:
        *sum_so_far, a, b = operands
        if sum_so_far:
            accumulator = mgpu.WGMMAAccumulator.from_registers(sum_so_far[0], sync=False)
        else:  # Undefined, because it is not read.
            zero = llvm.ConstantOp(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0)).result
            zeros = mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu())
            accumulator = mgpu.WGMMAAccumulator.from_registers(zeros, sync=False)
        if in_registers:
            a = _wgmma.wgmma_fence(a)
        else:
            nvvm.wgmma_fence_aligned()
            a = _core_matrices(a, transpose_a)
        b = _core_matrices(b, transpose_b)
        return _issue(accumulator, a, b, columns, fresh=not sum_so_far)

    started: jax.Array = product(*(() if acc is None else (acc,)), a, b)
    return started


def own_index(index: Any) -> Any:
    """Returns `index`, the index of the calling warpgroup, recomputed at each call.

    Addresses that depend on it are then computed where they are used. Otherwise they would all be computed before a
    loop and occupy registers throughout (LLVM's loop-invariant code motion; about 40 addresses of 64 bits, which
    spill).
    """

    @mosaic_gpu_code(
        lambda: index,
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def again(_: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        text = "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff; }"
        value: Any = llvm.inline_asm(i32, [], text, "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return again()


def end_basic_block(index: Any) -> None:
    """Keeps ptxas from moving preceding code, for example exponentials, after a later wait.

    It emits a branch that is never taken, which ptxas cannot know.

    Args:
      index: from `own_index`.
    """

    @mosaic_gpu_code(lambda index: None, arg_types=(plgpu.Layout.WG_SPLAT,))
    def branch(_: Any, index: Any) -> None:
        text = "{ .reg .pred p; setp.eq.s32 p, $0, -1; again: @!p bra done; nanosleep.u32 1; bra again; done: }"
        ptx(text, [index.registers.item()], "r")

    branch(index)


def meet(barrier: Any, *, threads: int) -> None:
    """Synchronizes all consumers, and makes their SMEM stores visible to wgmma and TMA.

    Args:
      barrier: in the interpreter, which has no named barriers, a barrier with one arrival for each consumer; otherwise
        None.
      threads: of all consumers.
    """

    def meaning() -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    @mosaic_gpu_code(meaning)
    def together(_: Any) -> None:
        ptx(f"fence.proxy.async.shared::cta; bar.sync {NAMED_BARRIER}, {threads};")

    together()


def add(gmem: Any, value: jax.Array, smem: Any) -> None:
    """Adds an array in registers atomically to one in device memory, through `smem`, once that is free."""
    if interprets():  # The interpreter has no such copies, and runs CTAs in sequence.
        gmem[...] += value
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, gmem, reduction_op="add")


# Mosaic GPU uses the low ones of 16 for its warpgroups.
NAMED_BARRIER = 8


def _matrix(ref: Any) -> jax.Array:
    value: jax.Array = ref[...]
    return untiled_swizzled.matrix(value) if value.ndim == 3 else value


def _core_matrices(ref: Any, transpose: bool) -> Any:
    if len(ir.MemRefType(ref.type).shape) == 3:
        ref = untiled_swizzled.core_matrices(ref)
    return mgpu.memref_transpose(ref, untiled_swizzled.TRANSPOSED) if transpose else ref


def _issue(accumulator: Any, a: Any, b: Any, columns: int, *, fresh: bool) -> Any:
    """Emits the instructions of a product, as one group to wait for."""
    (depth, _), element = mma_utils.tiled_memref_shape(b)
    registers: np.ndarray[Any, Any] = accumulator._value.registers.copy()
    b_base, b_steps, b_transpose = _descriptor(b, columns, depth, left=False)
    a_base: Any = None
    a_steps: list[int] | None = None
    a_transpose = False
    if not isinstance(a, mgpu.FragmentedArray):
        a_base, a_steps, a_transpose = _descriptor(a, WGMMA_ROWS, depth, left=True)
    for step in range(depth // WGMMA_DEPTH):
        if a_steps is None:
            factor = a[:, step * WGMMA_DEPTH : (step + 1) * WGMMA_DEPTH]
        else:
            factor = _advance(a_base, a_steps[step])
        registers = _instruction(
            registers,
            factor,
            _advance(b_base, b_steps[step]),
            transposes=((a_transpose,) if a_steps else ()) + (b_transpose,),
            columns=columns,
            dtype=element,
            accumulate=not fresh or step > 0,
        )
    ptx("wgmma.commit_group.sync.aligned;")
    value = mgpu.FragmentedArray(
        _registers=registers, _layout=accumulator._value.layout, _is_signed=accumulator._value.is_signed
    )
    return mgpu.WGMMAAccumulator(_value=value, _original_layout=accumulator._original_layout, _sync=False).value


def _instruction(
    registers: Any, a: Any, b: Any, *, transposes: tuple[bool, ...], columns: int, dtype: Any, accumulate: bool
) -> Any:
    """Emits one wgmma; without `accumulate` the accumulators are results only, and need not be defined before.

    An instruction that defines them while products are in flight makes ptxas wait for each product (C7515).
    """
    i32 = ir.IntegerType.get_signless(32)
    one = registers.flat[0].type
    count = registers.size
    left = [llvm.bitcast(i32, x) for x in a.registers.flat] if isinstance(a, mgpu.FragmentedArray) else [a]
    inputs = list(registers.flat) if accumulate else []
    first = count + len(inputs)
    names = [f"${first + number}" for number in range(len(left) + 1)]
    factor = names[0] if len(left) == 1 else "{" + ",".join(names[:-1]) + "}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(accumulate)}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{WGMMA_DEPTH}.f32.{dtype}.{dtype} "
        "{" + ",".join(f"${number}" for number in range(count)) + "}"
        f", {factor}, {names[-1]}, p, 1, 1, " + ", ".join(str(int(t)) for t in transposes) + "; }"
    )
    constraints = ["=f"] * count + [str(number) for number in range(len(inputs))]
    constraints += (["l"] if len(left) == 1 else ["r"] * len(left)) + ["l"]
    results: Any = llvm.inline_asm(
        llvm.StructType.get_literal([one] * count),
        [*inputs, *left, b],
        text,
        ",".join(constraints),
        has_side_effects=True,
    )
    new = np.empty_like(registers)
    for number in range(count):
        new.flat[number] = llvm.extractvalue(one, results, [number])
    return new


def _descriptor(ref: Any, extent: int, depth: int, *, left: bool) -> tuple[Any, list[int], bool]:
    """Returns a factor's descriptor in SMEM, the byte offsets of its steps, and whether it is transposed."""
    tiling = ir.MemRefType(ref.type).shape[2:]
    k_tiling = tiling[1] if left else tiling[0]
    width = max(tiling)
    # 8 x width elements are contiguous; the contracted axis is the longer one, or the shorter one, of 8.
    group = width if k_tiling == width else WGMMA_DEPTH
    (base, _), (_, stride), fastest = mma_utils.create_descriptor(
        ref,
        swizzle=2 * width,
        group_size=(extent, group) if left else (group, extent),
        logical_k_major=not left,
    )
    steps = [k // group * stride + k % group * 2 for k in range(0, depth, WGMMA_DEPTH)]
    return base, steps, fastest != mma_utils.Dim.K


def _advance(descriptor: Any, distance: int) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    offset = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, mma_utils.encode_addr(distance))).result
    return llvm.add(descriptor, offset, overflow_flags=llvm.IntegerOverflowFlags.none)
