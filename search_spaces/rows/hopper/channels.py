"""Rows of adjacent channels at all positions of a sample: the kernel, its space and its footprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.hopper import ACCESS_BYTES, MAX_BARRIERS, MAX_TMA_BOX, WARP, WARPS, not_hopper
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.problem import nbytes
from search_spaces.rows.builder import online
from search_spaces.rows.hopper.channel_layout import ChannelPlan
from search_spaces.rows.hopper.resident_channels import resident_channels, unsupported_program
from search_spaces.rows.hopper.streamed_channels import streamed_channels
from search_spaces.rows.program import Operand as Array
from search_spaces.rows.program import Program, Result
from search_spaces.rows.stages import most_statistics
from search_spaces.space import Columns, Space, round_up
from search_spaces.target import Target

if TYPE_CHECKING:
    from search_spaces.rows.channels import GroupNormProblem
    from search_spaces.rows.problem import ProgramAlongProblem

    ChannelProblem: TypeAlias = GroupNormProblem | ProgramAlongProblem

P = TypeVar("P", bound="ChannelProblem")

# Element types of rows.
LOADED = frozenset({"float32", "bfloat16", "float16", "int32"})


@dataclasses.dataclass(frozen=True)
class ChannelSchedule:
    """A schedule.

    Attributes:
      warps: warps of a CTA: 4, 8 or 16.
      vector: elements of one access of one thread.
      accesses: accesses of a thread to a chunk, all of which are in flight at once.
      cluster: CTAs that share a sample, each with a part of its positions.
      kept: eighths of a CTA's chunks that stay in SMEM after the first stage.
      resident: channels of a block that SMEM holds as a whole (`resident_channels`); 0 means that CTAs stream blocks
        of all channels, or of as many as a warp loads at once.
      ctas: persistent CTAs of a core, if blocks are resident.
    """

    warps: int
    vector: int
    accesses: int
    cluster: int = 1
    kept: int = 0
    resident: int = 0
    ctas: int = 1


def run_channels(
    program: Program,
    plan: ChannelPlan,
    ctas: int,
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel of a plan.

    Args:
      ctas: persistent CTAs of the chip, of resident blocks.
      results: shapes and dtypes: rows ``[samples, positions, channels]``, scalars ``[samples, channels // group]``.
      arrays: operands in the same form, and shared vectors ``[channels]`` or ``[positions]``.
    """
    if plan.resident:
        return resident_channels(program, plan, ctas, results, arrays)
    return streamed_channels(program, plan, results, arrays)


# Registers of a thread besides those for its elements (ptxas).
_REGISTERS = 40


class HopperChannels(Kernel[P, ChannelSchedule], Generic[P]):
    """A row program of adjacent channels, or of each channel, at all positions of a sample."""

    backend = "mosaic_gpu"
    version = 2
    most_elements = INDICES_OF_32_BITS
    verified_on = frozenset({"sm_90"})  # tests/device on an NVIDIA H200

    def supports(self, problem: P, target: Target) -> str | None:
        p, program = problem, problem.program_of()
        if reason := not_hopper(target):
            return reason
        if program.sums_rows or program.has_parts:
            return "neither sums over rows nor reads parts of a row, if the columns are not the last axis"
        if not program.stages or not any(x.kind == "row" for x in program.operands):
            return "reduces rows, and the program reads or reduces none"
        if others := ({x.dtype for x in program.operands} | {x.dtype for x in program.results}) - LOADED:
            return f"loads and stores no {', '.join(sorted(others))} along an axis that is not the last"
        if not HAS_GPU_INTERPRETER and most_statistics(program) > 1:
            return "reduces a stage to several numbers of each channel, for which JAX infers layouts from 0.11 on"
        if not _vectors(p):
            return (
                f"{p.positions} positions of {p.channels} channels in groups of {p.group}: a warpgroup loads 4 "
                "positions at least, a warp's line and the channels divide one another, as do a group and an access"
            )
        return None

    def space(self, problem: P, target: Target) -> Space[ChannelSchedule]:
        p = problem
        word = 4 / max(_itemsizes(p.program_of()))  # elements of a register

        def plan(s: Any) -> ChannelPlan:
            return ChannelPlan.of(p, s)

        return Space(
            ChannelSchedule,
            choices={
                "warps": (8, 4, 16),
                "vector": _vectors(p),
                "accesses": (4, 2, 8, 1, 7, 6, 5, 3),
                "cluster": (8, 4, 2, 1),
                "kept": (0, 4, 7, 8),
                "resident": (0, *_resident(p)),
                "ctas": (1, 2, 4),
            },
            rules={
                "a chunk is no longer than a part of the positions": lambda s: (
                    (plan(s).chunk <= plan(s).part) & (plan(s).part_overlap <= plan(s).part)
                ),
                "streamed chunks have a power of two of accesses": lambda s: (
                    (s.resident > 0) | (s.accesses & (s.accesses - 1) == 0)
                ),
                "SMEM has a chunk or more, or none": lambda s: (s.kept == 0) | (plan(s).chunks * s.kept >= 8),
                "a resident block is kept as a whole": lambda s: (s.resident == 0) | (s.kept == 0),
                "a core has as many CTAs that stream as fit": lambda s: (s.resident > 0) | (s.ctas == 1),
                "a line of a warp has one or more positions of a resident block, all complete": lambda s: (
                    (s.resident == 0) | ((WARP * s.vector % np.maximum(s.resident, 1) == 0) & (s.vector <= s.resident))
                ),
                "an access to a resident block has one group, or channels are groups": lambda s: (
                    (s.resident == 0) | (s.vector <= p.group) | (p.group == 1)
                ),
                "a resident block has at most 32 chunks, each with a barrier": lambda s: (
                    (s.resident == 0) | (plan(s).chunks * plan(s).warpgroups <= MAX_BARRIERS)
                ),
                "a copy has at most 256 positions": lambda s: (s.resident == 0) | (plan(s).chunk <= MAX_TMA_BOX),
                "chunks of a resident part overlap by an eighth of it at most": lambda s: (
                    (s.resident == 0) | (8 * plan(s).chunks * plan(s).chunk <= 9 * plan(s).part)
                ),
                "a thread loads 32 registers at once at most, each with up to two elements to widen": lambda s: (
                    s.accesses * s.vector <= 32 * np.minimum(word, 2)
                ),
            },
        )

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        program, plan = _read_once(p.program_of()), ChannelPlan.of(p, schedules)
        operands = list(zip(p.operands(), program.operands, strict=True))
        of_rows = sum(nbytes(x) for x, of in operands if of.kind == "row")
        vectors = [x for x, of in operands if of.kind == "shared"]
        scalars = [x for x, of in operands if of.kind == "scalar"]
        shared = sum(map(nbytes, vectors)) + sum(map(nbytes, scalars)) / p.samples
        costs, passes = program.costs(again=True), len(program.stages) + 1
        resident = s.resident > 0
        elements = plan.chunk * plan.block * np.where(resident, plan.warpgroups, 1)
        loads = np.where(resident, plan.warpgroups, s.warps * s.accesses * (passes + 1))  # accesses or copies
        # Later stages of streams read the rest again, mostly from L2.
        again = np.where(resident, 0.0, (passes - 1) * (1 - s.kept / 8))
        read = sum(jnp.dtype(x.dtype).itemsize for x in program.operands if x.kind == "row")
        several = most_statistics(program)
        # Lanes are reduced for each element of an access, which then has several groups.
        reduced = np.where(plan.splits_vector, 2 * several - 1 + 2 * several * (p.group > 1 < several), 0) * s.vector
        # Elements are float32 while several statistics of them are updated.
        loaded = s.accesses * (read / 4 if several == 1 else max(1, read / 4))
        words = loaded + several + sum(x.dtype.itemsize for x in vectors) / 4
        registers = np.asarray(_REGISTERS + words * s.vector + reduced).astype(np.int64)
        ctas = p.samples * plan.blocks * s.cluster
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(s), p.samples), plan.blocks, s.cluster),
            minor=2,
            axes=("samples", "blocks of channels", "parts of the positions"),
            step=Phase(
                loads=(
                    Operand(
                        bytes=of_rows / ctas / plan.chunks,
                        axes=(0, 1, 2),
                        filled_bytes=of_rows / ctas / plan.chunks * (1 + again),
                        name="rows",
                    ),
                ),
                fp32_ops=costs[0] * elements + WARP * s.warps * s.accesses * (passes + 1),
                mufu_ops=costs[1] * elements,
                onchip_bytes_read=np.where(resident, passes * elements * read, 0),
                transactions=loads,
                flops=p.flops / ctas / plan.chunks,
            ),
            tile=Phase(
                loads=(Operand(bytes=shared / plan.blocks, axes=(1,), name="shared vectors"),),
                bytes_written=sum(map(nbytes, p.results())) / ctas,
            ),
            steps=plan.chunks,
            stages=np.where(resident, plan.chunks, 1),
            persistent=resident,
            per_core=s.ctas,
            onchip_bytes=np.asarray(plan.smem_bytes(program), dtype=np.int64),
            exchanges=len(program.stages),
            threads=s.warps * WARP,
            registers=registers,
            registers_per_block=s.warps * WARP * round_up(registers, 8),
            cluster=s.cluster,
            dsmem_bytes=np.where(s.cluster > 1, 4.0 * s.cluster * several * plan.numbers, 0.0),
            access_bytes=s.vector * max(_itemsizes(program)),
        )

    def run(self, problem: P, schedule: ChannelSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            program = _read_once(problem.program_of(**params))
            plan, ctas = ChannelPlan.of(problem, schedule), target.cores * schedule.ctas
            return problem.pack(run_channels(program, plan, ctas, problem.results(), args))


def _read_once(program: Program) -> Program:
    """Returns the program with as few stages as this version of JAX can lay out."""
    return online(program) if HAS_GPU_INTERPRETER else program


def _itemsizes(program: Program) -> list[int]:
    """Returns the bytes of an element of each array of rows."""
    arrays: list[Array | Result] = [*program.operands, *program.results]
    return [jnp.dtype(x.dtype).itemsize for x in arrays if x.kind == "row"]


def _resident(p: ChannelProblem) -> tuple[int, ...]:
    """Returns the channels of resident blocks, which have 64 to 256 bytes: whole sectors of DRAM, and whole groups."""
    if unsupported_program(p.program_of()):
        return ()
    itemsize = max(_itemsizes(p.program_of()))
    found = [size // itemsize for size in (64, 128, 256)]
    # Mosaic GPU of JAX 0.11.2 finds no layout for eight groups of 32 bytes, or multiples of both.
    fails = [x for x in found if p.group > 1 and x // p.group % 8 == 0 and p.group * itemsize % 32 == 0]
    return tuple(x for x in found if p.channels % x == 0 and x % p.group == 0 and x not in fails)


def _vectors(p: ChannelProblem) -> tuple[int, ...]:
    """Returns the two largest numbers of elements per access for which threads have whole groups, or parts of one."""
    found = []
    for x in (8, 4, 2, 1):
        line = WARP * x
        block = min(p.channels, line)
        divides = max(p.channels, line) % block == 0 and block % p.group == 0
        if divides and max(p.group, x) % min(p.group, x) == 0 and WARPS * line // block <= p.positions:
            found.append(x)
    widest = max(_itemsizes(p.program_of()))
    return tuple(x for x in found if x * widest <= ACCESS_BYTES)[:2]
