"""The schedules of row programs on Hopper, their rules, and their footprint; each residency has its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from search_spaces.hopper import ACCESS_BYTES, MAX_BARRIERS, SECTOR_BYTES, WARP, WARPGROUP, not_hopper
from search_spaces.rows.builder import online
from search_spaces.rows.hopper.partition import RegisterPlan, RowPartition, chunk_bytes
from search_spaces.rows.problem import RowProblem
from search_spaces.rows.program import Program
from search_spaces.space import Choice, Columns, Rule, Space
from search_spaces.target import Target

# Maximum elements of a row per thread: the number of its registers. Where no other residency takes longer rows, a
# search should have no schedules that spill: one with 153 elements does, and norms of sums with 96 take all registers
# (ptxas, sm_80).
MOST_ELEMENTS = 256
MOST_ELEMENTS_BEFORE_HOPPER = 96

# ------------------------------------------------------------------------------
# The schedule of a row-wise kernel: where a row resides while it is reduced, and the fields of that residency.


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """A union of three schedules, tagged by `residency`: fields of the other residencies stay at their defaults.

    The dataclass is flat because columns, stores and samplers need it. Stores omit defaults, so a stored schedule has
    the tag and the fields of its residency. Rules, footprints and kernels use `RegisterPlan` and `RowPartition`.

    Attributes:
      residency: where a row resides until it has been read completely: in "registers", or a "span" of it if elements
        are independent; in registers, from a "ring" of groups of rows in SMEM; in "smem", with a CTA or a cluster per
        row; in the stages of a persistent "pipeline"; or nowhere: each stage must "reread" it.
      warps: warps that share a row, or a CTA's part of it: one or four (a warpgroup) in registers, else all of the CTA.
      vector: elements of one access of one thread.
      rows: (registers, span, ring) rows of which each thread loads a part before it computes.
      accesses: (smem, reread, pipeline, span) accesses of a thread to one chunk, or to the span.
      stages: (pipeline, ring) chunks, or groups of rows, that a CTA has in SMEM at once.
      prefetch: (pipeline) chunks of the next row that are reduced before statistics of this one are needed.
      register_chunks: (smem) chunks that threads keep in registers.
      cluster: (smem, reread, pipeline) CTAs that share a row, each with a part of it.
      blocks: (registers, span, ring) persistent blocks per core; 0 if each group of rows has a block.
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
    blocks: int = 0


# ------------------------------------------------------------------------------
# Widths of the threads' accesses to rows, and the fraction of the touched sectors that is needed.


def itemsizes(program: Program) -> tuple[int, ...]:
    """Returns the bytes of an element of each array of rows that is read or written."""
    read = [program.source(x).dtype for x in program.inputs_of("row")]
    written = [x.dtype for x in program.results for _ in x.values if x.kind == "row"]
    return tuple(jnp.dtype(dtype).itemsize for dtype in (*read, *written))


def widest(program: Program) -> int:
    """Returns the most elements of one access: 16 bytes of the narrowest rows of 16 bits or more."""
    return ACCESS_BYTES // max(2, min(itemsizes(program), default=4))


def vectors(program: Program) -> tuple[int, ...]:
    """Returns elements per access, widest first: at most 16 bytes, and such that rows start at multiples of them.

    These are the widest for which a warp's 32 accesses fit a row, and half of it; for chunks, the widest for which a
    row is whole lines; and, for rows so short that a warpgroup's accesses may not fit, all narrower ones.
    """
    columns = program.columns
    most = int(np.gcd(columns, widest(program)))
    fitting = [vector for vector in (8, 4, 2, 1) if vector <= most and WARP * vector <= columns]
    in_lines = int(np.gcd(columns, WARP * most)) // WARP
    short = columns < WARPGROUP * most
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
    """Returns the space of all residencies; the measurements behind the rules are in docs/experiments.md.

    Without TMA, it is the space of rows in registers alone.
    """
    program = p.program
    own = vectors(program)
    vector = tuple(dict.fromkeys((widest(program), *own)))
    if program.has_parts:
        vector = own  # parts of a row start at multiples of an access, too
    before = not_hopper(target) is not None
    most = MOST_ELEMENTS_BEFORE_HOPPER if before else MOST_ELEMENTS
    found = {}
    if not program.stages:
        found["span"] = _span(p, target.cores, own)
    if program.stages or program.sums_rows:
        found["registers"] = _registers(p, target.cores, vector, most)
    if not before and program.sums_rows:
        found["ring"] = _ring(p, vector)
    if not before and program.stages and not program.sums_rows:
        found["smem"] = _smem(p, vector)
        # Longer rows than the SMEM of eight cores holds. Narrower accesses were no faster.
        if not program.has_parts and program.columns * chunk_bytes(program) > 8 * 200 * KIB:
            choices = {"warps": (16, 8), "vector": vector[:1], "accesses": (4, 8), "cluster": (8, 4, 2)}
            found["reread"] = Residency(choices, rules={})
        if len(online(program).stages) == 1:
            found["pipeline"] = _pipeline(p, vector)
    return union(found)


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


def _weight(program: Program) -> int:
    """Returns how many arrays of elements a thread holds at once, in units of the smallest program: one row."""
    sums = sum(len(x.values) for x in program.results if x.kind == "row sum")
    return max(1, len(program.inputs_of("row")) + 2 * sums)


def _registers(p: RowProblem, cores: int, vector: tuple[int, ...], most: int) -> Residency:
    program, plan = p.program, functools.partial(RegisterPlan.of, p.program.columns)
    return Residency(
        choices={
            "warps": (4, 1),
            "vector": vector,
            "rows": (1, 2, 4),
            "blocks": (2, 4, 8) if program.sums_rows else (0,),
        },
        rules={
            "a register-resident row is one access a thread at least, and a problem one block": lambda s: (
                (plan(s).width <= program.columns) & (plan(s).group <= p.rows)
            ),
            "more rows a block leave cores idle": lambda s: (s.rows == 1) | (p.rows >= plan(s).group * cores),
            "a thread has a few hundred elements in registers at most": lambda s: (
                plan(s).elements * _weight(program) <= most
            ),
            "a thread has 64 accesses to an array at most, each an instruction: 128 took a minute to lower": lambda s: (
                s.rows * plan(s).accesses <= 64
            ),
            "register-resident rows start at multiples of an access": lambda s: program.columns % s.vector == 0,
        },
    )


def _span(p: RowProblem, cores: int, vector: tuple[int, ...]) -> Residency:
    program, plan = p.program, functools.partial(RegisterPlan.of, p.program.columns)

    def blocks(s: Any) -> Any:
        return plan(s).grid(p.rows, cores) * plan(s).spans

    return Residency(
        choices={
            "warps": (4, 1),
            "vector": vector,
            "accesses": (1, 2, 4, 8),
            "rows": (1, 2, 4),
            "blocks": (1, 2, 4) if program.sums_rows else (0,),
        },
        rules={
            "a span is no wider than a row, and has no more rows than there are": lambda s: (
                (plan(s).span <= program.columns) & (plan(s).group <= p.rows)
            ),
            "more than one load of each array a thread leave cores idle": lambda s: (
                (s.accesses * s.rows == 1) | (blocks(s) >= cores)
            ),
            "more than 16 elements of each array a thread hide no more latency, and were slower": lambda s: (
                s.accesses * s.rows * s.vector <= 16
            ),
            "several rows a thread only where the row is one span": lambda s: (
                (s.rows == 1) | (plan(s).span == program.columns)
            ),
        },
    )


def _ring(p: RowProblem, vector: tuple[int, ...]) -> Residency:
    program, plan = p.program, functools.partial(RegisterPlan.of, p.program.columns)
    aligned = all(
        x.parts * program.columns * jnp.dtype(x.dtype).itemsize % ACCESS_BYTES == 0
        for x in program.operands
        if x.kind == "row"
    )

    def ring_bytes(s: Any) -> Any:
        return plan(s).smem_bytes(program)

    return Residency(
        choices={
            "warps": (4, 8, 16, 1),
            "vector": vector,
            "rows": (1, 2),
            "stages": (2, 3, 4, 6),
            "blocks": (1, 2, 3, 4),
        },
        rules={
            "rows in a ring start at multiples of 16 bytes, and of an access": lambda s: (
                np.full(np.shape(s.vector), aligned) & (program.columns % s.vector == 0)
            ),
            "a row in a ring is one access a thread at least, and a problem one group": lambda s: (
                (plan(s).width <= program.columns) & (plan(s).group <= p.rows)
            ),
            "several rows a thread only if each warp has rows of its own": lambda s: (s.rows == 1) | (s.warps == 1),
            "a thread has a few hundred elements in registers at most, and 32 accesses to an array": lambda s: (
                (plan(s).elements * _weight(program) <= 224) & (s.rows * plan(s).accesses <= 32)
            ),
            "a thread of several warps has 8 elements at least: less work does not pay for an all-reduce": lambda s: (
                (s.warps == 1) | (plan(s).elements >= 8)
            ),
            "the rings of a core have 48 KiB at least, or all are as deep as they get": lambda s: (
                (s.blocks * ring_bytes(s) >= 48 * KIB) | (s.stages == 6)
            ),
            "the rings of a core fit its SMEM, and its registers": lambda s: (
                (s.blocks * (ring_bytes(s) + KIB) <= 228 * KIB) & (s.blocks * np.maximum(4, s.warps) <= 32)
            ),
        },
    )


def _smem(p: RowProblem, vector: tuple[int, ...]) -> Residency:
    program = p.program
    columns, element_bytes = program.columns, chunk_bytes(program)
    row_bytes, plan = columns * element_bytes, functools.partial(RowPartition.of, columns)

    def bytes_of_chunk(s: Any) -> Any:
        return plan(s).chunk * element_bytes

    return Residency(
        choices={
            "warps": (16, 8, 4),
            "vector": vector,
            "accesses": (2, 4, 8),
            "register_chunks": (0, 1, 2),
            "cluster": (1, 2, 4, 8),
        },
        rules={
            **_of_chunks(program, "SMEM-resident"),
            "a chunk is no longer than a CTA's part of the row": lambda s: plan(s).chunk_lines <= plan(s).part_lines,
            "an SMEM-resident row has 64 elements or more for each of 128 threads": lambda s: np.full(
                np.shape(s.vector), columns >= 64 * WARPGROUP
            ),
            "an SMEM-resident row has at most 32 chunks in SMEM, and no more in registers than it has": lambda s: (
                (plan(s).stages <= MAX_BARRIERS) & (plan(s).stages >= 0)
            ),
            "register-cached chunks take 16 of a thread's registers: more was slower": lambda s: (
                s.register_chunks * s.accesses * s.vector * element_bytes <= 16 * 4
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
                    & (bytes_of_chunk(s) <= 16 * KIB)
                    & ((bytes_of_chunk(s) >= 8 * KIB) | (s.warps * s.accesses == 64))
                )
            ),
        },
    )


def _pipeline(p: RowProblem, vector: tuple[int, ...]) -> Residency:
    program = p.program
    columns, element_bytes = program.columns, chunk_bytes(program)
    row_bytes, plan = columns * element_bytes, functools.partial(RowPartition.of, columns)

    def stages_bytes(s: Any) -> Any:
        return s.stages * plan(s).chunk * element_bytes

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
            **_of_chunks(program, "pipelined"),
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


def _of_chunks(program: Program, kind: str) -> dict[str, Rule]:
    """Returns rules for rows in chunks."""
    columns, narrowest = program.columns, min(itemsizes(program)[: len(program.inputs_of("row"))])
    any_length = not program.has_parts or columns % 8 == 0
    return {
        f"a {kind} row is whole lines of a warp, or has ends beside lines of the widest accesses": lambda s: (
            (columns % (WARP * s.vector) == 0)
            | (np.full(np.shape(s.vector), any_length) & (s.vector * narrowest == ACCESS_BYTES))
        ),
        f"a chunk of a {kind} row costs each thread so much that it should have 16 elements of it": lambda s: (
            (s.accesses * s.vector >= 16) | (s.accesses == 8)
        ),
        f"chunks of a {kind} row take the widest accesses that fit its lines: narrower ones were no faster": lambda s: (
            (columns % (WARP * s.vector * 2) != 0) | (s.vector * 2 * narrowest > ACCESS_BYTES)
        ),
    }
