"""The schedules of a row-wise kernel: each residency has its own choices and rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCESS_BYTES, MAX_BARRIERS, SECTOR_BYTES, WARP, WARPGROUP, WARPS, not_hopper
from search_spaces.problem import nbytes
from search_spaces.rowwise.hopper.persistent_pipeline import PersistentPipeline
from search_spaces.rowwise.hopper.resident import (
    MOST_ELEMENTS,
    MOST_ELEMENTS_BEFORE_HOPPER,
    RegisterResident,
    SmemResident,
)
from search_spaces.rowwise.hopper.row_partition import RowPartition
from search_spaces.rowwise.hopper.thread_layout import REDUCTION_BYTES
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Choice, Columns, Rule, Space, round_up
from search_spaces.target import Target

# ------------------------------------------------------------------------------
# The schedule of a row-wise kernel: where a row resides while it is reduced, and the fields of that residency.


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """A union of three schedules, tagged by `residency`: fields of the other residencies stay at their defaults.

    The dataclass is flat because columns, stores and samplers need it. Stores omit defaults, so a stored schedule has
    the tag and the fields of its residency. Rules, footprints and kernels use separate types with only those fields:
    `RegisterResident`, `SmemResident` and `PersistentPipeline`.

    Attributes:
      residency: where a row resides until it has been read completely: in "registers"; in "smem", with a CTA or a
        cluster per row; or in the stages of a persistent "pipeline".
      warps: warps that share a row, or a CTA's part of it: one or four (a warpgroup) in registers, else all of the CTA.
      vector: elements of one access of one thread.
      rows: (registers) rows of which each thread loads a part before it computes.
      accesses: (smem, pipeline) accesses of a thread to one chunk.
      stages: (pipeline) chunks that a CTA has in SMEM at once.
      prefetch: (pipeline) chunks of the next row that are reduced before statistics of this one are needed.
      register_chunks: (smem) chunks that threads keep in registers.
      cluster: (smem, pipeline) CTAs that share a row, each with a part of it.
    """

    residency: str
    warps: int
    vector: int
    rows: int = 1
    accesses: int = 0
    stages: int = 0
    prefetch: int = 0
    register_chunks: int = 0
    cluster: int = 1


# ------------------------------------------------------------------------------
# Widths of the threads' accesses to rows, and the fraction of the touched sectors that is needed.


def vectors(p: RowProblem) -> tuple[int, ...]:
    """Returns elements per access, widest first: at most 16 bytes, and such that rows start at multiples of them.

    These are the widest for which a warp's 32 accesses fit a row, and half of it; for chunks, the widest for which a
    row is whole lines; and, for rows so short that a warpgroup's accesses may not fit, all narrower ones.
    """
    widest = int(np.gcd(p.columns, ACCESS_BYTES // p.itemsize))
    fitting = [vector for vector in (8, 4, 2, 1) if vector <= widest and WARP * vector <= p.columns]
    in_lines = int(np.gcd(p.columns, WARP * widest)) // WARP
    short = p.columns < WARPGROUP * widest
    return tuple(vector for vector in fitting if short or vector in (*fitting[:2], in_lines))


def coalescing(row_bytes: Any, access_bytes: Any) -> Any:
    """Returns the needed fraction of the sectors that warps' accesses touch, averaged over the starts of rows.

    A warp's 32 accesses are one run of bytes, of whole sectors in length. A run that starts within a sector touches one
    more. Rows start equally often at each multiple of the largest power of two that divides both.
    """
    run = WARP * access_bytes
    return run / (run + SECTOR_BYTES - np.gcd(row_bytes, SECTOR_BYTES))


KIB = 1024


@dataclasses.dataclass(frozen=True)
class Residency:
    """The schedules of one residency.

    Attributes:
      choices: the values of its fields.
      rules: see `Space`. They only get schedules of this residency.
    """

    choices: Mapping[str, Sequence[Choice]]
    rules: Mapping[str, Rule]


def space(p: RowProblem, target: Target) -> Space[RowSchedule]:
    """Returns the space of all three residencies; the measurements behind the rules are in docs/experiments.md.

    Without TMA, it is the space of rows in registers alone.
    """
    vector = tuple(dict.fromkeys((ACCESS_BYTES // p.itemsize, *vectors(p))))
    if not_hopper(target):
        return union({"registers": _registers(p, target.cores, vector, MOST_ELEMENTS_BEFORE_HOPPER)})
    return union(
        {
            "registers": _registers(p, target.cores, vector, MOST_ELEMENTS),
            "smem": _smem(p, vector),
            "pipeline": _pipeline(p, vector),
        }
    )


def union(residencies: Mapping[str, Residency]) -> Space[RowSchedule]:
    """Returns the union of the residencies' spaces. A field without choices in a residency stays at its default.

    Values of a field are tried in this order: the default of residencies without it, then those of the longest list.
    """
    choices: dict[str, tuple[Choice, ...]] = {"residency": tuple(residencies)}
    defaults = Space(RowSchedule, {}).defaults

    def absent(field: str) -> tuple[Choice, ...]:
        return (defaults[field],) if field in defaults else ()

    rules: dict[str, Rule] = {}
    for field in [field.name for field in dataclasses.fields(RowSchedule)][1:]:
        values = {name: tuple(each.choices.get(field, absent(field))) for name, each in residencies.items()}
        lists = sorted(values.values(), key=lambda one: (one != absent(field), -len(one)))
        choices[field] = tuple(dict.fromkeys(value for one in lists for value in one))
        if any(set(one) != set(choices[field]) for one in values.values()):
            rules[f"{field}: a value that schedules of this residency take"] = _among(field, values)
    for name, each in residencies.items():
        rules |= {reason: _for_residency(name, rule) for reason, rule in each.rules.items()}
    return Space(RowSchedule, choices, rules)


def _among(field: str, values: Mapping[str, Sequence[Choice]]) -> Rule:
    return lambda s: np.any(
        [(s.residency == name) & np.isin(getattr(s, field), np.asarray(allowed)) for name, allowed in values.items()],
        axis=0,
    )


def _for_residency(residency: str, rule: Rule) -> Rule:
    """Applies the rule to schedules of that residency only; all others satisfy it."""

    def obeyed(s: Any) -> Any:
        if not isinstance(s, Columns):
            return s.residency != residency or rule(s)
        asked = s.residency == residency
        answer = np.ones(len(s), dtype=bool)
        answer[asked] = rule(s.take(asked))
        return answer

    return obeyed


def _registers(p: RowProblem, cores: int, vector: tuple[int, ...], most: int) -> Residency:
    def plan(s: Any) -> RegisterResident:
        return RegisterResident.of(p.columns, s)

    return Residency(
        choices={"warps": (4, 1), "vector": vector, "rows": (1, 2, 4)},
        rules={
            "a register-resident row is one access a thread at least, and a problem one block": lambda s: (
                (plan(s).layout.columns <= p.columns) & (plan(s).block_rows <= p.rows)
            ),
            "more rows a block leave cores idle": lambda s: (s.rows == 1) | (p.rows >= plan(s).block_rows * cores),
            "a thread has a few hundred elements in registers at most": lambda s: plan(s).elements <= most,
            "a thread has 64 accesses to an array at most, each an instruction: 128 took a minute to lower": lambda s: (
                s.rows * plan(s).accesses <= 64
            ),
            "register-resident rows start at multiples of an access": lambda s: p.columns % s.vector == 0,
        },
    )


def _smem(p: RowProblem, vector: tuple[int, ...]) -> Residency:
    row_bytes, operands = p.row_bytes, len(p.row_operands)

    def plan(s: Any) -> SmemResident:
        return SmemResident.of(p.columns, s)

    def chunk_bytes(s: Any) -> Any:
        return operands * plan(s).chunk * p.itemsize

    return Residency(
        choices={
            "warps": (16, 8, 4),
            "vector": vector,
            "accesses": (2, 4, 8),
            "register_chunks": (0, 1, 2),
            "cluster": (1, 2, 4, 8),
        },
        rules={
            **_of_chunks(p, "SMEM-resident"),
            "a chunk is no longer than a CTA's part of the row": lambda s: plan(s).chunk_lines <= plan(s).part_lines,
            "an SMEM-resident row has 64 elements or more for each of 128 threads": lambda s: np.full(
                np.shape(s.vector), p.columns >= 64 * WARPGROUP
            ),
            "an SMEM-resident row has at most 32 chunks in SMEM, and no more in registers than it has": lambda s: (
                (plan(s).stages <= MAX_BARRIERS) & (plan(s).stages >= 0)
            ),
            "register-cached chunks take 16 of a thread's registers: more was slower": lambda s: (
                s.register_chunks * s.accesses * s.vector * p.itemsize <= 16 * 4
            ),
            "a row that fits the SMEM of a core twice resides in one CTA, a longer one in a cluster": lambda s: (
                (s.cluster > 1) == (row_bytes > 112 * KIB)
            ),
            "a CTA of a cluster keeps 24 to 80 KiB of an SMEM-resident row, or an eighth of it": lambda s: (
                (s.cluster == 1)
                | ((row_bytes >= s.cluster * 24 * KIB) & ((row_bytes <= s.cluster * 80 * KIB) | (s.cluster == 8)))
            ),
            "a CTA of a cluster keeps four chunks or more, of 8 to 16 KiB, and has one or two warpgroups": lambda s: (
                (s.cluster == 1)
                | (
                    (s.warps <= 8)
                    & (s.register_chunks <= 1)
                    & (plan(s).chunks >= 4)
                    & (chunk_bytes(s) <= 16 * KIB)
                    & ((chunk_bytes(s) >= 8 * KIB) | (s.warps * s.accesses == 64))
                )
            ),
        },
    )


def _pipeline(p: RowProblem, vector: tuple[int, ...]) -> Residency:
    row_bytes, operands = p.row_bytes, len(p.row_operands)

    def plan(s: Any) -> PersistentPipeline:
        return PersistentPipeline.of(p.columns, s)

    def stages_bytes(s: Any) -> Any:
        return operands * s.stages * plan(s).chunk * p.itemsize

    return Residency(
        # Two or four warpgroups share a chunk.
        choices={
            "warps": (16, 8),
            "vector": vector,
            "accesses": (2, 4, 8),
            "stages": (13, 6),
            "prefetch": (0, 1),
            "cluster": (1, 2, 4, 8),
        },
        rules={
            **_of_chunks(p, "pipelined"),
            "a pipeline has stages for its part of a row, for what it prefetches, and for the next chunk": lambda s: (
                plan(s).chunks + s.prefetch < s.stages
            ),
            "a pipeline of under 160 KiB keeps too little in flight, and a core has no more than 256 KiB": lambda s: (
                (stages_bytes(s) >= 160 * KIB) & (stages_bytes(s) <= 256 * KIB)
            ),
            "a row that fits the SMEM of a core three times resides there, or in registers": lambda s: np.full(
                np.shape(s.vector), row_bytes > 72 * KIB
            ),
            "a cluster that shares a pipeline has no more CTAs than it needs": lambda s: (
                (s.cluster == 1) | (row_bytes > s.cluster * 80 * KIB)
            ),
        },
    )


def _of_chunks(p: RowProblem, kind: str) -> dict[str, Rule]:
    """Returns rules for rows in chunks."""
    return {
        f"a {kind} row is whole lines of a warp, or has ends beside lines of the widest accesses": lambda s: (
            (p.columns % (WARP * s.vector) == 0) | (s.vector * p.itemsize == ACCESS_BYTES)
        ),
        f"a chunk of a {kind} row costs each thread so much that it should have 16 elements of it": lambda s: (
            (s.accesses * s.vector >= 16) | (s.accesses == 8)
        ),
        f"chunks of a {kind} row take the widest accesses that fit its lines: narrower ones were no faster": lambda s: (
            (p.columns % (WARP * s.vector * 2) != 0) | (s.vector * 2 * p.itemsize > ACCESS_BYTES)
        ),
    }


# ------------------------------------------------------------------------------
# Resource demands of one launch of each schedule of a row-wise kernel, by residency.

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
        **_footprint_registers(registers, WARPGROUP),
    )


def _of_smem(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    plan = SmemResident.of(p.columns, s)
    return _footprint_of_chunks(p, s, costs, statistics, plan, register_chunks=s.register_chunks, steps=1)


def _of_pipeline(p: RowProblem, s: Columns, costs: ElementCosts, statistics: int) -> Footprint:
    plan = PersistentPipeline.of(p.columns, s)
    return dataclasses.replace(
        _footprint_of_chunks(p, s, costs, statistics, plan, register_chunks=0, steps=plan.chunks),
        stages=s.stages,
        persistent=True,
    )


def _footprint_of_chunks(
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
        **_footprint_registers(registers, s.warps * WARP),
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


def _footprint_registers(needed: Any, threads: Any) -> Any:
    """Returns the registers of a thread and of its block, in which hardware allocates them in units of eight."""
    registers = needed.astype(np.int64)
    return {"registers": registers, "registers_per_block": threads * round_up(registers, 8)}
