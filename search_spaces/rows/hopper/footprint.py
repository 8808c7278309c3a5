"""Resource demands of one launch of a row program on Hopper."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCESS_BYTES, WARP, WARPS
from search_spaces.problem import nbytes
from search_spaces.rows.builder import online
from search_spaces.rows.hopper.partition import RegisterPlan, RowPartition, chunk_bytes
from search_spaces.rows.hopper.space import coalescing, itemsizes
from search_spaces.rows.problem import RowProblem
from search_spaces.rows.stages import most_statistics
from search_spaces.space import Columns, round_up
from search_spaces.target import Target

# Registers of a thread besides those for its elements (ptxas; see docs/kernels/rows-hopper.md).
_RESIDENT_REGISTERS = 24
_CHUNK_REGISTERS = 32


def footprint(p: RowProblem, s: Columns, target: Target) -> Footprint:
    """Returns the footprint of each schedule, by its residency."""
    parts = {
        "registers": _of_registers,
        "span": _of_registers,
        "ring": _of_registers,
        "smem": _of_chunks,
        "reread": _of_chunks,
        "pipeline": _of_pipeline,
    }
    masks = [s.residency == residency for residency in parts]
    found = [of(p, s.take(mask), target.cores) for of, mask in zip(parts.values(), masks, strict=True) if mask.any()]
    masks = [mask for mask in masks if mask.any()]
    merged: Footprint = _merged(found, masks)
    return merged


def _merged(values: list[Any], masks: list[npt.NDArray[np.bool_]]) -> Any:
    """Merges values by the masks of their schedules, field by field; a common scalar stays a scalar."""
    first = values[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: _merged([getattr(value, name) for value in values], masks) for name in fields})
    if isinstance(first, tuple):
        return tuple(_merged(list(each), masks) for each in zip(*values, strict=True))
    if all(np.ndim(value) == 0 and value == first for value in values):
        return first
    column = np.zeros(len(masks[0]), np.result_type(*values))
    for value, mask in zip(values, masks, strict=True):
        column[mask] = value
    return column


def _of_registers(p: RowProblem, s: Columns, cores: int) -> Footprint:
    program = p.program
    plan = RegisterPlan.of(program.columns, s)
    arrays = _Arrays(p)
    rows = np.minimum(plan.group, p.rows)
    blocks = -(-p.rows // rows)
    persistent = s.blocks > 0
    team = np.where(s.warps == 1, WARPS, 1)
    warps = np.maximum(WARPS, s.warps)
    accesses = (
        plan.accesses * np.minimum(warps, team * s.warps) * (arrays.count * s.rows + arrays.shared_accesses(s.vector))
    )
    costs = program.costs(again=False)
    elements = rows * plan.accesses * WARP * s.warps * s.vector
    sums = sum(len(x.values) for x in program.results if x.kind == "row sum")
    held = s.rows + arrays.itemsize / 4 + len(program.inputs_of("row")) - 1 + sums + 1.25 * (sums > 0)
    registers = _RESIDENT_REGISTERS + held * plan.accesses * s.vector
    step = Phase(
        mufu_ops=costs[1] * elements,
        fp32_ops=costs[0] * elements + WARP * accesses,
        transactions=accesses,
        onchip_bytes_read=np.where(s.stages > 0, chunk_bytes(program) * elements, 0),
    )
    common = _common(p, s, blocks=blocks, rows=rows, parts=plan.spans, steps=1, arrays=arrays, step=step)
    partial = 4.0 * sums * program.columns * plan.grid(p.rows, cores) * team * plan.spans
    return Footprint(
        **common,
        onchip_bytes=np.asarray(plan.smem_bytes(program), dtype=np.int64),
        threads=warps * WARP,
        **_footprint_registers(registers, warps * WARP),
        stages=np.maximum(1, s.stages),
        persistent=persistent,
        copied_bytes=2 * partial,
        launches=np.where(partial > 0, 2, 1),
    )


def _of_pipeline(p: RowProblem, s: Columns, cores: int) -> Footprint:
    return dataclasses.replace(_of_chunks(p, s, cores), stages=s.stages, persistent=True)


def _of_chunks(p: RowProblem, s: Columns, cores: int) -> Footprint:
    program, plan, register_chunks = online(p.program), RowPartition.of(p.program.columns, s), s.register_chunks
    steps = plan.chunks if s.stages.any() else 1
    arrays, operands = _Arrays(p), len(program.inputs_of("row"))
    costs, passes = program.costs(again=True), len(program.stages) + 1
    # Copies, loads of register-cached chunks, stores, loads of shared operands, and the ends.
    reread = plan.reread
    in_smem = np.where(reread, 0, plan.chunks - register_chunks)
    accesses = operands * (in_smem + register_chunks * plan.chunk_lines)
    accesses = accesses + operands * np.where(reread, passes * plan.chunks * plan.chunk_lines, 0)
    accesses = accesses + plan.chunks * plan.chunk_lines * (arrays.count - operands + arrays.shared_accesses(s.vector))
    accesses = accesses + plan.end_fragments * WARPS * (arrays.count + (arrays.shared > 0)) / s.cluster
    # ptxas keeps register-cached chunks of softmax as float32 (docs/kernels/rows-hopper.md).
    kept_words = 1.0 if costs[1] else chunk_bytes(program) / 4
    words = most_statistics(program) + s.accesses * (1 + arrays.itemsize / 4 + register_chunks * kept_words)
    registers = _CHUNK_REGISTERS + words * s.vector
    copied = (plan.alignments > 1) & (arrays.shared > 0)
    elements = program.columns / s.cluster
    step = Phase(
        mufu_ops=costs[1] * elements / steps,
        fp32_ops=(costs[0] * elements + WARP * accesses) / steps,
        onchip_bytes_read=in_smem / plan.chunks * passes * chunk_bytes(program) * elements / steps,
        transactions=accesses / steps,
    )
    blocks = np.full(len(s), p.rows)
    return Footprint(
        **_common(
            p,
            s,
            blocks=blocks,
            rows=1,
            parts=s.cluster,
            steps=steps,
            arrays=arrays,
            step=step,
            passes=np.where(reread, passes, 1),
        ),
        steps=steps,
        onchip_bytes=plan.smem_bytes(program),
        threads=s.warps * WARP,
        **_footprint_registers(registers, s.warps * WARP),
        cluster=s.cluster,
        copied_bytes=np.where(copied, (1 + plan.alignments) * arrays.shared, 0.0),
        launches=np.where(copied, 2, 1),
    )


class _Arrays:
    """The arrays that a kernel reads and writes.

    Attributes:
      count: arrays of rows, counting parts.
      read, written: bytes of each operand with rows, and of results.
      itemsize, shared: bytes of one element, and of all, of the operands that all rows share.
    """

    def __init__(self, p: RowProblem) -> None:
        operands, results = zip(p.operands(), p.arrays[0], strict=True), zip(p.results(), p.arrays[1], strict=True)
        self.count = len(p.program.inputs_of("row")) + sum(x.parts for x in p.arrays[1] if x.kind == "row")
        shared, self.read = list[Any](), list[tuple[str, int]]()
        for number, (x, of) in enumerate(operands, 1):
            if of.kind in ("row", "scalar"):
                self.read.append((f"operand {number}", nbytes(x)))
            elif of.kind == "shared":
                shared.append(x)
        self.written = sum(nbytes(x) for x, of in results if of.kind != "row sum")
        self.itemsize, self.shared = sum(x.dtype.itemsize for x in shared), sum(map(nbytes, shared))

    def shared_accesses(self, vector: Any) -> Any:
        """Returns the accesses to shared operands for each access to a row."""
        return -(-vector * self.itemsize // ACCESS_BYTES)


def _common(
    p: RowProblem,
    s: Columns,
    *,
    blocks: Any,
    rows: Any,
    parts: Any,
    steps: Any,
    arrays: _Arrays,
    step: Phase,
    passes: Any = 1,
) -> dict[str, Any]:
    """Returns the fields common to all residencies, for blocks of `rows` rows; `step` has the work of the lanes."""
    narrowest = min(itemsizes(p.program))
    return {
        "arithmetic": p.arithmetic,
        "grid": (blocks, parts),
        "minor": 1,
        "axes": ("rows", "parts of a row"),
        "step": dataclasses.replace(
            step,
            loads=(
                *(
                    Operand(bytes=passes * each / (blocks * parts) / steps, axes=(0, 1), name=name)
                    for name, each in arrays.read
                ),
                Operand(bytes=arrays.shared / parts / steps, axes=(1,), name="shared"),
            ),
            flops=p.flops / p.rows * rows / parts / steps,
        ),
        "tile": Phase(bytes_written=arrays.written / (blocks * parts)),
        "coalescing": coalescing(p.program.columns * narrowest, s.vector * narrowest),
        "access_bytes": s.vector * narrowest,
    }


def _footprint_registers(needed: Any, threads: Any) -> Any:
    """Returns the registers of a thread and of its block, in which hardware allocates them in units of eight."""
    registers = np.asarray(needed).astype(np.int64)
    return {"registers": registers, "registers_per_block": threads * round_up(registers, 8)}
