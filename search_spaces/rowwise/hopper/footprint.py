"""Resource demands of one launch of each schedule of a row-wise kernel, by residency."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper.limits import ACCESS_BYTES, WARP, WARPGROUP, WARPS
from search_spaces.problem import nbytes
from search_spaces.rowwise.hopper.accesses import coalescing
from search_spaces.rowwise.hopper.persistent_pipeline import PersistentPipeline
from search_spaces.rowwise.hopper.register_resident import RegisterResident
from search_spaces.rowwise.hopper.row_partition import RowPartition
from search_spaces.rowwise.hopper.smem_resident import SmemResident
from search_spaces.rowwise.hopper.thread_layout import REDUCTION_BYTES
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Columns, round_up

# Registers of a thread besides those for its elements (ptxas; see docs/kernels/rows-hopper.md).
_RESIDENT_REGISTERS = 24
_CHUNK_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class ElementCosts:
    """Costs of the formula for one element.

    Attributes:
      mufu_ops: exponentials and similar operations, for a row in registers and for a row in chunks.
      fp32_ops: other instructions, likewise, without accesses.
      widens: whether ptxas keeps register-cached chunks as float32 (docs/kernels/rows-hopper.md).
    """

    mufu_ops: tuple[float, float]
    fp32_ops: tuple[float, float]
    widens: bool


def footprint(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    """Returns the footprint of each schedule, by its residency, for a formula with `statistics` statistics."""
    parts = {"registers": _of_registers, "smem": _of_smem, "pipeline": _of_pipeline}
    masks = [s.residency == residency for residency in parts]
    found = [of(p, s.take(mask), costs, statistics) for of, mask in zip(parts.values(), masks, strict=True)]
    merged: Footprint = _merged(found, masks)
    return merged


def _merged(values: list[Any], masks: list[npt.NDArray[np.bool_]]) -> Any:
    """Selects, for each schedule, the value whose mask contains it, field by field; a common scalar stays a scalar."""
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


def _of_registers(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    plan = RegisterResident.of(p.columns, s)
    rows = np.minimum(plan.block_rows, p.rows)
    shared = _Shared(p)
    to_rows = len(p.row_operands) + len(p.results())
    accesses = plan.layout.rows * plan.accesses * s.warps * (to_rows * s.rows + shared.accesses(s.vector))
    registers = _RESIDENT_REGISTERS + (s.rows + shared.words) * plan.accesses * s.vector
    step = Phase(
        mufu_ops=costs.mufu_ops[0] * rows * p.columns,
        fp32_ops=costs.fp32_ops[0] * rows * p.columns + WARP * accesses,
        transactions=accesses,
    )
    return Footprint(
        **_common(p, s, blocks=-(-p.rows // rows), rows=rows, cluster=1, steps=1, shared=shared, step=step),
        onchip_bytes=np.full(len(s), REDUCTION_BYTES),
        threads=WARPGROUP,
        **_registers(registers, WARPGROUP),
    )


def _of_smem(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    plan = SmemResident.of(p.columns, s)
    return _of_chunks(p, s, costs, statistics, plan, register_chunks=s.register_chunks, steps=1)


def _of_pipeline(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    plan = PersistentPipeline.of(p.columns, s)
    return dataclasses.replace(
        _of_chunks(p, s, costs, statistics, plan, register_chunks=0, steps=plan.chunks),
        stages=s.stages,
        persistent=True,
    )


def _of_chunks(
    p: RowProblem,
    s: Columns,
    costs: ElementCosts,
    statistics: int,
    plan: RowPartition,
    *,
    register_chunks: Any,
    steps: Any,
) -> Footprint:
    shared = _Shared(p)
    # Copies, loads of register-cached chunks, stores, loads of shared operands, and the ends.
    operands, results = len(p.row_operands), len(p.results())
    in_smem = plan.chunks - register_chunks
    accesses = operands * (in_smem + register_chunks * plan.chunk_lines)
    accesses = accesses + plan.chunks * plan.chunk_lines * (results + shared.accesses(s.vector))
    accesses = accesses + plan.ends.fragments * WARPS * (operands + results + (shared.bytes > 0)) / s.cluster
    kept_words = 1.0 if costs.widens else p.itemsize / 4
    words = statistics + s.accesses * (1 + shared.words + register_chunks * kept_words)
    registers = _CHUNK_REGISTERS + words * s.vector
    copied = (plan.alignments > 1) & (shared.bytes > 0)
    elements = p.columns / s.cluster
    step = Phase(
        mufu_ops=costs.mufu_ops[1] * elements / steps,
        fp32_ops=(costs.fp32_ops[1] * elements + WARP * accesses) / steps,
        onchip_bytes_read=in_smem / plan.chunks * 2 * operands * p.itemsize * elements / steps,
        transactions=accesses / steps,
    )
    return Footprint(
        **_common(
            p, s, blocks=np.full(len(s), p.rows), rows=1, cluster=s.cluster, steps=steps, shared=shared, step=step
        ),
        steps=steps,
        onchip_bytes=plan.smem_bytes(p.itemsize, operands, statistics),
        threads=s.warps * WARP,
        **_registers(registers, s.warps * WARP),
        cluster=s.cluster,
        copied_bytes=np.where(copied, (1 + plan.alignments) * shared.bytes, 0.0),
        launches=np.where(copied, 2, 1),
    )


class _Shared:
    """The operands that all rows share: total bytes, and 32-bit words per element, which keeps its dtype."""

    def __init__(self, p: RowProblem) -> None:
        _, shared = p.apart(p.operands())
        self.itemsize = max((x.dtype.itemsize for x in shared), default=0)
        self.bytes = sum(map(nbytes, shared))
        self.words = self.itemsize / 4

    def accesses(self, vector: Any) -> Any:
        """Returns the accesses to shared operands for each access to a row."""
        return -(-vector * self.itemsize // ACCESS_BYTES)


def _common(
    p: RowProblem, s: Columns, *, blocks: Any, rows: Any, cluster: Any, steps: Any, shared: _Shared, step: Phase
) -> dict[str, Any]:
    """Returns the fields common to all residencies, for blocks of `rows` rows; `step` has the work of the lanes."""
    bytes_of_each = p.rows / (blocks * cluster) * p.columns * p.itemsize
    return {
        "arithmetic": p.arithmetic,
        "grid": (blocks, cluster),
        "minor": 1,
        "axes": ("rows", "parts of a row"),
        "step": dataclasses.replace(
            step,
            loads=(
                *(Operand(bytes=bytes_of_each / steps, axes=(0, 1), name=name) for name in p.row_operands),
                Operand(bytes=shared.bytes / cluster / steps, axes=(1,), name="weight"),
            ),
            flops=p.flops / p.rows * rows / cluster / steps,
        ),
        "tile": Phase(bytes_written=len(p.results()) * bytes_of_each),
        "coalescing": coalescing(p.columns * p.itemsize, s.vector * p.itemsize),
        "access_bytes": s.vector * p.itemsize,
    }


def _registers(needed: Any, threads: Any) -> Any:
    """Returns the registers of a thread and of its block, in which hardware allocates them in units of eight."""
    registers = needed.astype(np.int64)
    return {"registers": registers, "registers_per_block": threads * round_up(registers, 8)}
