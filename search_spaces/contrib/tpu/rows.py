"""Row programs on TPUs: schedules, their grids and footprints, and the kernel."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces.contrib.tpu.row_kernels import (
    ChunkGrid,
    Plan,
    RowLoop,
    Step,
    compute,
    empty,
    over_rows,
    plan,
    reduce_rows,
    restored,
    zero,
)  # fmt: skip
from search_spaces.contrib.tpu.vmem import LANES, SUBLANES, VMEM_LIMITS_MIB, limit_bytes, limit_or_none, window_bytes
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel
from search_spaces.rows.problem import RowProblem
from search_spaces.rows.program import Program, within
from search_spaces.rows.stages import Stage
from search_spaces.space import Column, Columns, Space, cdiv, round_up
from search_spaces.target import Target


@dataclasses.dataclass(frozen=True)
class RowSchedule:
    """The schedule of a row program.

    Attributes:
      residency: where a row resides until it has been read completely: in the "window" of a block that has all of it;
        in a "scratch" array, chunk by chunk, while the previous rows' results are written; or nowhere ("reread").
        A program without reductions has only "elements", in windows of whole rows.
      rows: rows of a block.
      columns: columns of a block, in each part of a row: all, or those of a chunk.
      step_rows: rows of a block that are computed at the same time.
      lanes: columns of one fragment; each reduction has an accumulator of the same size.
      fragments: fragments per step of the loop that reduces a row; 1 for "elements".
      vmem_limit_mib: VMEM limit that the launch requests (`search_spaces.contrib.tpu.vmem`).
    """

    residency: str
    rows: int
    columns: int
    step_rows: int
    lanes: int
    fragments: int
    vmem_limit_mib: int = 0


# ------------------------------------------------------------------------------
# Blocks of whole rows: each row is reduced and computed in the pipeline's window.


def whole_rows(
    plan: Plan, s: RowSchedule, rows: int, cores: int, arrays: Sequence[Any], outs: Sequence[Any], name: str
) -> Any:
    """Returns all results; sums over rows are ``[cores * 8, parts * padded columns]``, to be summed.

    Args:
      arrays: for each window; `outs`: shapes of the results.
    """
    program, blocks = plan.program, pl.cdiv(rows, s.rows)
    loop = RowLoop(s.columns, s.lanes, s.fragments)
    # A core adds the rows of all of its blocks to the same window.
    each = pl.cdiv(blocks, min(cores, blocks)) if program.sums_rows else 1
    axes: list[tuple[int, Any]] = [(pl.cdiv(blocks, each), "parallel"), (each, "arbitrary")]
    uneven = axes[0][0] * each != blocks
    # libtpu's estimate aborts over a grid with an axis of one step.
    grid = [x for x in axes if x[0] > 1] or axes[:1]

    def place(*at: Any) -> tuple[Any, Any]:
        """Returns the core, and the block."""
        core = at[0] if axes[0] in grid else 0
        return core, core * each + (at[-1] if axes[1] in grid else 0)

    def kernel(*refs: Any) -> None:
        windows, results = refs[: len(arrays)], refs[len(arrays) :]
        core, block = place(*map(pl.program_id, range(len(grid))))

        def compute_rows(at: Any) -> None:
            step = Step(plan, at, s.step_rows, windows)
            known = step.scalars()
            for stage in (Stage(program, number) for number in range(len(program.stages))):
                known = stage.finish(reduce_rows(stage, step, loop, known), known)
            compute(step, loop, known, results, rows - block * s.rows - at.start if rows % s.rows else None)

        for result, out in zip(program.results, results, strict=True):
            if result.kind == "row sum":
                pl.when(block == core * each)(functools.partial(zero, out))
        pl.when(block < blocks if uneven else True)(lambda: over_rows(s.rows, s.step_rows, compute_rows))

    def whole(shape: tuple[int, ...], kind: str) -> pl.BlockSpec:
        match kind:
            case "number":
                return pl.BlockSpec(memory_space=pltpu.SMEM)
            case "shared":
                return pl.BlockSpec(shape, lambda *at: (0, 0))
            case "row sum":
                return pl.BlockSpec((SUBLANES, shape[1]), lambda *at: (place(*at)[0], 0))

        def index(*at: Any) -> tuple[Any, int]:
            _, block = place(*at)
            return jnp.minimum(block, blocks - 1) if uneven else block, 0

        return pl.BlockSpec((s.rows, shape[1]), index)

    kinds = [program.operands[x.operand].kind for x in plan.windows]
    return pl.pallas_call(
        kernel,
        grid=tuple(extent for extent, _ in grid),
        in_specs=[whole(x.shape, kind) for x, kind in zip(arrays, kinds, strict=True)],
        out_specs=[whole(x.shape, r.kind) for x, r in zip(outs, program.results, strict=True)],
        out_shape=list(outs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(kind for _, kind in grid), vmem_limit_bytes=limit_or_none(s.vmem_limit_mib)
        ),
        name=name,
    )(*arrays)


# ------------------------------------------------------------------------------
# Rows too long for one window, in chunks: reduced chunk by chunk, and computed after all chunks have been read.
#
# With a scratch array for a block's rows, a grid step computes a chunk of one block and reads the same chunk of the
# next block into its place. Loads and stores are then always in flight, and each element moves once. Without it, the
# chunks of a block are loaded twice.


def chunked_rows(
    plan: Plan, s: RowSchedule, rows: int, cores: int, arrays: Sequence[Any], outs: Sequence[Any], name: str
) -> Any:
    """Returns all results of a program with one stage; arguments as in `whole_rows`."""
    program, keeps = plan.program, s.residency == "scratch"
    over = ChunkGrid(pl.cdiv(rows, s.rows), pl.cdiv(program.columns, s.columns), keeps, cores)
    loop = RowLoop(s.columns, s.lanes, s.fragments)
    last = RowLoop(program.columns - (over.chunks - 1) * s.columns, s.lanes, s.fragments)
    stage = Stage(program, 0)
    count = stage.count

    def kernel(*refs: Any) -> None:
        windows, refs = refs[: len(arrays)], refs[len(arrays) :]
        results, scratch = refs[: len(outs)], refs[len(outs) :]
        running, kept = scratch[:count], scratch[2 * count :]
        # The next rows can be read only after the statistics of whole rows have been copied.
        seen = scratch[count : 2 * count] if keeps else running
        outer, step, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        rows_of = functools.partial(
            Step, plan, rows=s.step_rows, refs=windows, first=chunk * s.columns, chunk=chunk, kept=kept
        )

        def write(at: Any) -> None:
            here = rows_of(at=at, late=True)
            known = stage.finish(tuple(ref[at, :] for ref in seen), here.scalars())
            compute(here, loop, known, results, None)

        def take_in(loop: RowLoop, at: Any) -> None:
            here = rows_of(at=at)
            found = reduce_rows(stage, here, loop, here.scalars())
            for ref, value in zip(running, stage.combine(tuple(ref[at, :] for ref in running), found), strict=True):
                ref[at, :] = value

        takes_in = over.takes_in(outer, step)

        # Before the same chunk of the next block replaces it.
        @pl.when(over.computes(outer, step))
        def _() -> None:
            over_rows(s.rows, s.step_rows, write)

        @pl.when(takes_in & (chunk == 0))
        def _() -> None:
            for ref, value in zip(running, empty(stage, s.rows, 1), strict=True):
                ref[...] = value

        @pl.when(takes_in & (chunk < over.chunks - 1))
        def _() -> None:
            over_rows(s.rows, s.step_rows, functools.partial(take_in, loop))

        @pl.when(takes_in & (chunk == over.chunks - 1))
        def _() -> None:
            over_rows(s.rows, s.step_rows, functools.partial(take_in, last))
            for done, ref in zip(seen if keeps else (), running if keeps else (), strict=True):
                done[...] = ref[...]

    def chunks_of(kind: str, when: str) -> pl.BlockSpec:
        index = over.at(when)
        match kind:
            case "number":
                return pl.BlockSpec(memory_space=pltpu.SMEM)
            case "shared":
                return pl.BlockSpec((1, s.columns), lambda *at: (0, index(*at)[1]))
            case "scalar":
                return pl.BlockSpec((s.rows, 1), lambda *at: (index(*at)[0], 0))
        return pl.BlockSpec((s.rows, s.columns), index)

    statistics = [pltpu.VMEM((s.rows, 1), jnp.float32)] * (count * (2 if keeps else 1))
    kept = [pltpu.VMEM((over.chunks, s.rows, s.columns), plan.kept_dtype(x)) for x in plan.kept]
    return pl.pallas_call(
        kernel,
        grid=over.grid,
        in_specs=[chunks_of(program.operands[x.operand].kind, x.when) for x in plan.windows],
        out_specs=[chunks_of(r.kind, "late") for r in program.results],
        out_shape=list(outs),
        scratch_shapes=[*statistics, *kept],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=limit_or_none(s.vmem_limit_mib),
        ),
        name=name,
    )(*arrays)


# ------------------------------------------------------------------------------
# Resource demands of one launch of each schedule.

# Buffers of a window: the current block, and the next or the previous one.
BUFFERS = 2
# Chips without a load of one sublane into all: the compiler gives each such load in its code a temporary of one
# register.
REPLICATING = frozenset({"TPU v4"})
REGISTER_BYTES = SUBLANES * LANES * 4
# Chips that unpack two-byte arrays of at most four rows, which have smaller tiles, through memory.
UNPACKING = frozenset({"TPU v4", "TPU v5 lite", "TPU v5"})
UNPACKED_BYTES = 9 * REGISTER_BYTES


def footprint(p: RowProblem, s: Columns, target: Target) -> Footprint:
    """Returns the footprint of each schedule."""
    program = plan(p.program, "window").program
    operands, results = p.arrays
    blocks, chunks = cdiv(p.rows, s.rows), cdiv(program.columns, s.columns)
    loads = []
    for number, count in _loads(p.program, s).items():
        x = operands[number]
        whole, axes = (program.columns * 4.0, (1,)) if x.kind == "shared" else (_hbm_bytes(p, x) / blocks, (0, 1))
        if x.kind != "number":
            loads.append(Operand(bytes=count * whole / chunks, axes=axes, name=f"{x.kind} {number}"))
    converted = sum(x.axes == (1,) for x in loads) + program.sums_rows
    elements = round_up(s.rows, SUBLANES) * round_up(s.columns, LANES)
    # With a scratch array, the grid has one more round than blocks per core: it loads the first block and computes
    # nothing.
    rounds = np.where(s.residency == "scratch", (blocks + np.minimum(target.cores, blocks)) / blocks, 1.0)
    fp32_ops, mufu_ops = program.costs(again=True)
    passes = len(program.stages) + 1
    return Footprint(
        arithmetic=p.arithmetic,
        grid=(blocks, chunks),
        minor=1,
        group=chunks,
        axes=("rows", "chunks of a row"),
        step=Phase(
            loads=tuple(loads),
            flops=p.flops / p.rows * s.rows / chunks,
            fp32_ops=fp32_ops * elements * rounds,
            mufu_ops=mufu_ops * elements * rounds,
            iterations=cdiv(s.rows, s.step_rows) * passes * cdiv(s.columns, s.lanes * s.fragments) * rounds,
        ),
        tile=Phase(bytes_written=sum(_hbm_bytes(p, x, target.cores) for x in results) / (blocks * chunks)),
        onchip_bytes=_vmem_bytes(p, s, target),
        onchip_limit_bytes=limit_bytes(s.vmem_limit_mib),
        stages=BUFFERS,
        persistent=True,
        launches=1 + converted,
    )


def _hbm_bytes(p: RowProblem, x: Any, cores: int = 1) -> float:
    """Returns the bytes of an array in HBM, where each scalar has 128 lanes of its own."""
    columns = p.columns_of_program
    of_sums = cores * SUBLANES * x.parts * round_up(columns, LANES) * 4
    of_rows = p.rows * x.parts * columns * jnp.dtype(x.dtype).itemsize
    return float({"scalar": p.rows * LANES * 4, "row sum": of_sums}.get(x.kind, of_rows))


def _plans(program: Program, s: Columns) -> Mapping[str, tuple[Plan, Column]]:
    """Returns the plan of each residency, and the schedules that have it."""
    return {name: (plan(program, name), s.residency == name) for name in residencies(program)}


def _loads(program: Program, s: Columns) -> dict[int, Column]:
    """Returns how often each operand is loaded; parts of operands that all rows share count as one each."""
    counts: dict[int, Column] = {}
    for name, (made, chosen) in _plans(program, s).items():
        for window in made.windows:
            twice = name == "reread" and window.when == "both"
            counts[window.operand] = counts.get(window.operand, 0) + chosen * (1 + twice)
    return counts


def _vmem_bytes(p: RowProblem, s: Columns, target: Target) -> npt.NDArray[np.int64]:
    """Returns the VMEM of all windows and scratch arrays; XLA may keep small arrays in VMEM without a window."""
    blocks, chunks = cdiv(p.rows, s.rows), cdiv(p.columns_of_program, s.columns)
    once = (blocks == 1) | (blocks == target.cores)
    # A window has one buffer if its block never changes, in a grid of one step, or of one per core.
    by_block, by_chunk = np.where(once, 1, BUFFERS), np.where(once & (chunks == 1), 1, BUFFERS)

    def window(x: Any) -> Column:
        match x.kind:
            case "row":
                return by_chunk * rows_bytes(s.rows, x.parts * s.columns, jnp.dtype(x.dtype).itemsize)
            case "shared":
                return window_bytes(1, s.columns, jnp.float32, np.where(chunks > 1, BUFFERS, 1))
            case "row sum":
                return rows_bytes(SUBLANES, x.parts * round_up(s.columns, LANES), 4)
            case "scalar":
                return by_block * rows_bytes(s.rows, 1, 4)
        return np.zeros(len(s), np.int64)

    operands, results = p.arrays
    onchip: Any = sum(map(window, results))
    for name, (made, chosen) in _plans(p.program, s).items():
        taken: Any = sum(window(operands[x.operand]) for x in made.windows)
        taken = taken + sum(chunks * rows_bytes(s.rows, s.columns, made.kept_dtype(x).itemsize) for x in made.kept)
        if name in CHUNKED:
            statistics = Stage(made.program, 0).count
            taken = taken + (1 + (name == "scratch")) * statistics * rows_bytes(s.rows, 1, 4)
        if target.architecture in REPLICATING:
            shared = [operands[x.operand].kind for x in made.windows].count("shared")
            taken = taken + shared * REGISTER_BYTES * _registers_in_code(s)
        onchip = onchip + chosen * taken
    few = p.rows <= SUBLANES // 2 and any(x.kind == "row" and jnp.dtype(x.dtype).itemsize == 2 for x in operands)
    return np.asarray(onchip + few * (target.architecture in UNPACKING) * UNPACKED_BYTES, dtype=np.int64)


def rows_bytes(rows: Column | int, columns: Column | int, itemsize: int) -> npt.NDArray[np.int64]:
    """Returns the VMEM of one buffer of rows: a tile is eight rows of 128 columns, for narrow types, too."""
    return np.asarray(round_up(rows, SUBLANES) * round_up(columns, LANES) * itemsize, dtype=np.int64)


def _registers_in_code(s: Columns) -> Column:
    """Returns the registers of a row that the code of one pass names: of a loop step, and of the remainder."""
    step = s.lanes * s.fragments
    left, tail = s.columns % step // s.lanes * s.lanes, s.columns % s.lanes
    return np.where(s.columns >= step, step, 0) // LANES + left // LANES + cdiv(tail, LANES)


# ------------------------------------------------------------------------------
# The space: the blocks of the grid, and the steps in which a block is computed.

# Rows of a block: below these, the overhead of a grid step shows; above, the wait for the first block does.
ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
STEP_ROWS = (8, 16, 32, 64)
CHUNKS = (4096, 16384)
# From this length on, rows may be too long for windows that hold a whole row.
LONG = 2**16


CHUNKED = ("scratch", "reread")


@functools.lru_cache(maxsize=1024)
def residencies(program: Program) -> tuple[str, ...]:
    """Returns the residencies that a kernel of the program has.

    Long rows are read in chunks if one pass reduces them, and if each row of an array is one vector. A chunk leaves no
    place for sums over rows.
    """
    stages = plan(program, "window").program.stages
    if not stages:
        return ("elements",)
    parts = [x.parts for x in program.operands if x.kind == "row"] + [len(x.values) for x in program.results]
    chunked = len(stages) == 1 and max(parts) == 1 and not program.sums_rows and program.columns >= LONG
    return ("window", *(CHUNKED if chunked else ()))


def row_space(p: RowProblem) -> Space[RowSchedule]:
    """Returns the space of a problem."""
    columns, found = p.columns_of_program, residencies(p.program)
    reduced, chunked = found != ("elements",), len(found) > 1
    made = plan(p.program, "scratch" if chunked else "window")
    narrowest = min([made.kept_dtype(x).itemsize for x in made.kept], default=4)
    least, most = (8, 16) if reduced else (4, 8)
    narrow = any(x.kind == "row" and jnp.dtype(x.dtype).itemsize == 1 for each in p.arrays for x in each)
    tile = SUBLANES * (4 if narrow else 1)

    def registers(s: RowSchedule) -> int:
        return s.step_rows // SUBLANES * (s.lanes // LANES) * s.fragments

    return Space(
        RowSchedule,
        choices={
            "residency": found,
            "rows": tuple(rows for rows in ROWS if rows <= round_up(p.rows, tile)),
            "columns": (columns, *(CHUNKS if chunked else ())),
            "step_rows": STEP_ROWS,
            "lanes": (128, 256, 512) if reduced else (128, 256, 512, 1024),
            "fragments": (2, 4, 8) if reduced else (1,),
            "vmem_limit_mib": VMEM_LIMITS_MIB,
        },
        rules={
            "a window has all columns of a row, and other residencies have chunks": lambda s: (
                (s.residency == found[0]) == (s.columns == columns)
            ),
            "of chunks, more than 64 rows a block gain nothing": lambda s: (s.columns == columns) | (s.rows <= 64),
            "rows of a step divide those of a block": lambda s: s.rows % s.step_rows == 0,
            # "cannot statically prove that index in dimension 0 is a multiple of 32" (E2003).
            "steps of 8-bit elements are of whole tiles": lambda s: s.step_rows >= tile,
            # TPU7x: "cannot statically prove that index in dimension 1 is a multiple of 16" (E2003).
            "steps through a scratch array of narrow elements are of whole tiles": lambda s: (
                (s.residency != "scratch") | (s.step_rows * narrowest >= SUBLANES * 4) | (s.rows == s.step_rows)
            ),
            f"a step takes {least} to {most} registers of each vector": lambda s: (
                (registers(s) >= least) & (registers(s) <= most)
            ),
            "a fragment is no wider than a row": lambda s: (s.lanes <= columns) | (s.lanes == 128),
        },
    )


# Those of which the compilers for v5e, v6e and TPU7x load and store rows (libtpu 0.0.48).
DTYPES = frozenset(
    {"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int16", "int8", "uint32", "uint16", "uint8"}
)


class TpuRows(Kernel[RowProblem, RowSchedule]):
    """A row program on a TPU, in blocks of rows."""

    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: RowProblem, target: Target) -> str | None:
        if target.platform != "tpu":
            return f"is written for TPUs, not for {target.kind} ({target.architecture})"
        operands, results = problem.arrays
        rounded = [str(e.params[0]) for e in problem.program.equations if e.name == "round"]
        if "float16" in (*rounded, *(x.dtype for x in (*operands, *results) if x.kind == "row")):
            return "the compiler for TPUs loads and rounds no float16 in a kernel"
        refused = {x.dtype for x in (*operands, *results) if x.kind == "row"} - DTYPES
        return f"rows of {min(refused)} would have to be converted before or after the kernel" if refused else None

    def space(self, problem: RowProblem, target: Target) -> Space[RowSchedule]:
        return row_space(problem)

    def footprint(self, problem: RowProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target)

    def run(self, problem: RowProblem, schedule: RowSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        p, s = problem, schedule
        made = plan(p.program_of(**params), s.residency)
        named = getattr(p, "name", "") or type(p).__name__.removesuffix("Problem")
        run = chunked_rows if s.residency in CHUNKED else whole_rows
        # Indices are 32 bits wide, whatever the user's default.
        with jax.enable_x64(False):
            arrays = [_placed(made.program, args[x.operand], x.operand, x.part) for x in made.windows]
            outs = [_declared(p, x, target.cores, s) for x in p.arrays[1]]
            found = run(made, s, p.rows, target.cores, arrays, outs, re.sub(r"\W+", "_", f"{named}_tpu"))
            results = zip(found, p.results(), made.program.results, strict=True)
            return p.pack([restored(x, shape, r.kind, made.program.columns) for x, shape, r in results])


def _placed(program: Program, x: jax.Array, operand: int, part: int) -> jax.Array:
    """Returns an operand as its window needs it.

    It is in HBM: XLA's copies for a kernel (of odd columns) may otherwise take VMEM of its windows. A shared row of a
    narrow type would have to be unpacked in each step.
    """
    declared = program.operands[operand]
    if declared.kind == "row":
        return pltpu.with_memory_space_constraint(x, pltpu.HBM)
    dtype = within(declared.dtype)
    x = x.astype("int32" if dtype == "bool" else dtype)
    if declared.kind == "number":
        return x.reshape(1, 1)
    if declared.kind == "shared":
        x = x[part * program.columns : (part + 1) * program.columns]
    return pltpu.with_memory_space_constraint(x.reshape(1, -1) if declared.kind == "shared" else x[:, None], pltpu.HBM)


def _declared(p: RowProblem, x: Any, cores: int, s: RowSchedule) -> jax.ShapeDtypeStruct:
    """Returns a result as the kernel computes it."""
    dtype, columns = within(x.dtype), p.columns_of_program
    blocks = cdiv(p.rows, s.rows)
    used = cdiv(blocks, cdiv(blocks, min(cores, blocks)))
    match x.kind:
        case "row":
            return jax.ShapeDtypeStruct((p.rows, x.parts * columns), jnp.dtype(x.dtype))
        case "scalar":
            return jax.ShapeDtypeStruct((p.rows, 1), jnp.dtype("int32" if dtype == "bool" else dtype))
    return jax.ShapeDtypeStruct((used * SUBLANES, x.parts * round_up(columns, LANES)), jnp.dtype(jnp.float32))
