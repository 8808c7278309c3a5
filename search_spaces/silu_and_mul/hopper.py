"""SiLU-and-mul on Hopper: no element waits for another, so a block loads, computes and stores a run of a few rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import WARP, WARPGROUP, WARPS
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import Kernel, Target
from search_spaces.rowwise.hopper.accesses import coalescing, vectors
from search_spaces.rowwise.hopper.kernel import refusal
from search_spaces.rowwise.hopper.register_resident import COMPILER_PARAMS
from search_spaces.rowwise.hopper.thread_layout import ThreadLayout
from search_spaces.silu_and_mul.problem import SiluAndMulProblem
from search_spaces.space import Columns, Space, round_up

# What a thread holds besides its elements of both halves (ptxas; see docs/kernels/rows-hopper.md).
OTHER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class SiluSchedule:
    """What a block of one warpgroup computes.

    Attributes:
      warps: that share a row: one, beside three with the next rows, or all four.
      vector: elements of one access of one thread.
      accesses: accesses of a thread to each half of a row.
      rows: that the warps which share one take; loads of all are under way before they compute.
    """

    warps: int
    vector: int
    accesses: int
    rows: int


class HopperSiluAndMul(Kernel[SiluAndMulProblem, SiluSchedule]):
    backend = "mosaic_gpu"
    version = 1
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: SiluAndMulProblem, target: Target) -> str | None:
        return refusal(problem, target)

    def space(self, problem: SiluAndMulProblem, target: Target) -> Space[SiluSchedule]:
        p, cores = problem, target.cores
        return Space(
            SiluSchedule,
            choices={"warps": (4, 1), "vector": vectors(p), "accesses": (1, 2, 4, 8), "rows": (1, 2, 4)},
            rules={
                "a block is no wider than a row, and has no more rows than there are": lambda s: (
                    (_columns(s) <= p.columns) & (_rows(s) <= p.rows)
                ),
                "more than one load of each half a thread leave cores idle": lambda s: (
                    (s.accesses * s.rows == 1) | (_blocks(p, s) >= cores)
                ),
                "more than 16 elements of each half a thread hide no more latency, and were slower": lambda s: (
                    s.accesses * s.rows * s.vector <= 16
                ),
                "several rows a thread only where the row is one block": lambda s: (
                    (s.rows == 1) | (_columns(s) == p.columns)
                ),
            },
        )

    def footprint(self, problem: SiluAndMulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        rows, columns = -(-p.rows // _rows(s)), -(-p.columns // _columns(s))
        elements = _rows(s) * _columns(s)
        bytes_written = p.rows / rows * p.columns / columns * p.itemsize
        # Two loads and a store of each fragment.
        transactions = 3 * elements // (WARP * s.vector)
        registers = OTHER_REGISTERS + 2 * s.accesses * s.rows * s.vector
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(rows, columns),
            step=Phase(
                loads=(Operand(bytes=2 * bytes_written, axes=(0, 1), name="x"),),
                flops=5.0 * elements,
                fp32_ops=8 * elements + WARP * transactions,
                mufu_ops=2 * elements,  # an exponential and a reciprocal
                transactions=transactions,
            ),
            tile=Phase(bytes_written=bytes_written),
            onchip_bytes=np.zeros(len(s), dtype=np.int64),
            minor=1,
            axes=("rows", "columns"),
            group=columns,
            threads=WARPGROUP,
            registers=registers,
            registers_per_block=WARPGROUP * round_up(registers, 8),
            coalescing=coalescing(p.columns * p.itemsize, s.vector * p.itemsize),
            access_bytes=s.vector * p.itemsize,
        )

    def run(
        self, problem: SiluAndMulProblem, schedule: SiluSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        layout, rows, columns = ThreadLayout(s.warps, s.vector), int(_rows(s)), _columns(s)
        blocks = -(-p.columns // columns)  # of a row

        def kernel(x: Any, out: Any) -> None:
            block = lax.axis_index("block")
            # The last block of an axis starts early enough to be whole; what two have both is stored twice, alike.
            row = lax.min(lax.div(block, blocks) * rows, p.rows - rows)
            column = lax.min(lax.rem(block, blocks) * columns, p.columns - columns)
            places = [
                (row + step * layout.rows, column + access * layout.columns)
                for step in range(s.rows)
                for access in range(s.accesses)
            ]
            loaded = [(layout.load(x, *place), layout.load(x, place[0], place[1] + p.columns)) for place in places]
            for place, (gate, up) in zip(places, loaded, strict=True):
                layout.store(out, *place, gate * (1 / (1 + jnp.exp(-gate))) * up)

        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            out: jax.Array = plgpu.kernel(
                kernel,
                out_type=p.result(),
                grid=(int(_blocks(p, s)),),
                grid_names=("block",),
                compiler_params=COMPILER_PARAMS,
            )(*args)
        return out


def _rows(s: Any) -> Any:
    """Of a block."""
    return np.where(s.warps == 1, WARPS, 1) * s.rows


def _columns(s: Any) -> Any:
    """Of a block."""
    return WARP * s.warps * s.vector * s.accesses


def _blocks(p: SiluAndMulProblem, s: Any) -> Any:
    return -(-p.rows // _rows(s)) * -(-p.columns // _columns(s))
