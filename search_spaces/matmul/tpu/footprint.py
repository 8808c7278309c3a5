"""The footprint of a matmul launch on a TPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import Target
from search_spaces.matmul.epilogue import ACTIVATION_OPERATIONS, EXPONENTIALS
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import nbytes
from search_spaces.space import Columns, cdiv
from search_spaces.tpu.vmem import limit_bytes, window_bytes

# A launch that needs more than the default limit requests 1.5 times what it needs, for spills, plus this. When all of
# VMEM was requested, libtpu 0.0.50 rejected a program that needs 2 MiB, because XLA keeps its own arrays in VMEM (v5e,
# v6e).
SPILL_ROOM = 8 * 2**20
# Blocks of an operand in VMEM: one is loaded while the other is multiplied.
BUFFERS = 2


# Lower bound of the bytes that steps of at least 512 x 512 x 256 spill, by chip and operand dtype: the spill of the
# smallest such step in libtpu 0.0.50, rounded down. For bfloat16 there is no spill on chips with MXUs 256 wide.
LEAST_SPILLS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "TPU v4": {"bfloat16": 64 * 1024, "float32": 64 * 1024},
        "TPU v5 lite": {"bfloat16": 64 * 1024, "float32": 1024 * 1024},
        "TPU v5": {"bfloat16": 64 * 1024, "float32": 1024 * 1024},
        "TPU v6 lite": {"float32": 1024 * 1024},
        "TPU7x": {"float32": 512 * 1024},
    }
)


def footprint(p: MatmulProblem, s: Columns, target: Target, factors: int = 1) -> Footprint:
    """Returns the footprint; a block is a tile of the grid, and each factor has its weights, bias and accumulators."""
    rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    itemsize, out = jnp.dtype(p.dtype).itemsize, p.whole
    part_m, part_n, part_k = p.m / rows, p.n / columns, p.k / steps
    minor_is_n = np.equal(s.grid_minor_dim, "n")
    results = s.tile_m * s.tile_n
    exponentials = results * EXPONENTIALS[p.activation]
    a = Operand(bytes=part_m * part_k * itemsize, axes=(0, 1), name="a")
    b = Operand(bytes=part_k * part_n * itemsize, axes=(0, 2), name="b")
    bias = (Operand(bytes=part_n * jnp.dtype(p.bias).itemsize, axes=(0, 2), name="bias"),) if p.bias else ()
    residual = part_m * part_n * jnp.dtype(p.residual).itemsize if p.residual else 0
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(np.full(len(s), p.batch), rows, columns),
        step=Phase(loads=(a, *[b] * factors), flops=2.0 * factors * results * s.tile_k),
        tile=Phase(
            loads=(
                *bias * factors,
                *((Operand(bytes=residual, axes=(0, 1, 2), name="residual"),) if p.residual else ()),
            ),
            fp32_ops=ACTIVATION_OPERATIONS * exponentials,
            mufu_ops=exponentials,
            bytes_written=part_m * part_n * out.dtype.itemsize,
        ),
        onchip_bytes=_vmem_bytes(p, s, target, factors),
        spill_bytes=_least_spill(p, s, target, steps),
        onchip_limit_bytes=vmem_limit(p, s, target, factors),
        steps=steps,
        minor=np.where(minor_is_n, 2, 1),
        group=np.where(minor_is_n, columns, rows),
        axes=("batch", "m", "n"),
        stages=BUFFERS,
        persistent=True,
        # Several results are slices of one array.
        copied_bytes=2.0 * nbytes(out) if p.split_sizes else 0.0,
        launches=1 + len(p.columns) if p.split_sizes else 1,
    )


def _vmem_bytes(p: MatmulProblem, s: Columns, target: Target, factors: int) -> Any:
    """Returns the bytes of the windows of operands and result, and of the accumulators.

    The compiler allocates one buffer for a window that is constant over all steps of the grid, and for all windows if
    the grid gives each core one step. There are no accumulators if a step takes all of k.
    """
    rows, columns, steps = cdiv(p.m, s.tile_m), cdiv(p.n, s.tile_n), cdiv(p.k, s.tile_k)
    one_step = steps == 1
    one_each = one_step & (p.batch * rows * columns == target.cores)

    def window(tile: tuple[Any, Any], dtype: Any, constant: Any, turned: bool = False) -> Any:
        buffers = np.where(constant | one_each, 1, BUFFERS)
        return window_bytes(*(tile[::-1] if turned else tile), dtype, buffers)

    one_row, one_column = (p.batch == 1) & (rows == 1), (p.batch == 1) & (columns == 1)
    one_tile = one_row & one_column
    total = window((s.tile_m, s.tile_k), p.dtype, one_row & one_step, p.transpose_a)
    total = total + factors * window((s.tile_k, s.tile_n), p.dtype, one_column & one_step, p.transpose_b)
    if p.bias:
        total = total + factors * window((1, s.tile_n), p.bias, one_column)
    if p.residual:
        total = total + window((s.tile_m, s.tile_n), p.residual, one_tile)
    total = total + window((s.tile_m, s.tile_n), p.whole.dtype, one_tile)
    accumulators = factors * window_bytes(s.tile_m, s.tile_n, p.acc_dtype)
    return total + np.where(one_step, 0, accumulators)


def vmem_limit(p: MatmulProblem, s: Columns, target: Target, factors: int = 1) -> Any:
    """Returns the VMEM bytes that a launch requests; 0 means the compiler's default."""
    needed = _vmem_bytes(p, s, target, factors)
    return np.minimum(limit_bytes(s.vmem_limit_mib), needed + needed // 2 + SPILL_ROOM)


def _least_spill(p: MatmulProblem, s: Columns, target: Target, steps: Any) -> Any:
    """Returns a lower bound of the spill, so that no schedule is dropped that the compiler accepts."""
    large = (s.tile_m >= 512) & (s.tile_n >= 512) & (s.tile_k >= 256) & (steps > 1)
    return np.where(large, LEAST_SPILLS.get(target.architecture, {}).get(p.dtype, 0), 0)
