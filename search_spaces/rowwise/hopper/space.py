"""The schedules of a row-wise kernel: each residency has its own choices and rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from search_spaces.hopper.limits import ACCESS_BYTES, MAX_BARRIERS, WARP, WARPGROUP
from search_spaces.hopper.operands import not_hopper
from search_spaces.kernel import Target
from search_spaces.rowwise.hopper.accesses import vectors
from search_spaces.rowwise.hopper.persistent_pipeline import PersistentPipeline
from search_spaces.rowwise.hopper.register_resident import MOST_ELEMENTS, MOST_ELEMENTS_BEFORE_HOPPER, RegisterResident
from search_spaces.rowwise.hopper.schedule import RowSchedule
from search_spaces.rowwise.hopper.smem_resident import SmemResident
from search_spaces.rowwise.problem import RowProblem
from search_spaces.space import Choice, Columns, Rule, Space

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
