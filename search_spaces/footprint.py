"""What one launch of each schedule demands of a chip: in each step, for each tile, and once; and what may overlap."""

from __future__ import annotations

import dataclasses
import functools

from search_spaces.errors import DeclarationError
from search_spaces.space import Column


@dataclasses.dataclass(frozen=True)
class Operand:
    """What one block loads of one operand in one phase.

    Attributes:
      bytes: bytes loaded, ragged edges averaged in.
      axes: the axes of `Footprint.grid` that select the block: blocks that agree on them load the same bytes.
      multicast: blocks of a cluster that one load serves (1 where each loads for itself).
      filled_bytes: on-chip bytes that it fills, what lies beyond ragged edges included; 0 where these are `bytes`.
      tma_row_bytes: width of the SMEM rows in which TMA delivers them, one row at a time; 0 where TMA does not.
      fill_rows: of these rows, those in groups of eight that lie wholly beyond an edge of the array, which TMA fills
        with zeros, on average.
      start_bytes: the largest power of two at a multiple of which all of these rows start in device memory; 0 where
        that is a line of its cache.
      name: what a person calls it, "" where it has no name.
    """

    bytes: Column | float
    axes: tuple[int, ...]
    multicast: Column | int = 1
    filled_bytes: Column | float = 0
    tma_row_bytes: Column | int = 0
    fill_rows: Column | float = 0
    start_bytes: Column | int = 0
    name: str = ""

    def over(self, steps: Column | float) -> Operand:
        """What one of so many steps loads of it on average."""
        return dataclasses.replace(
            self, bytes=self.bytes / steps, filled_bytes=self.filled_bytes / steps, fill_rows=self.fill_rows / steps
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """What one block demands in one phase of its work. Every `Column` has one entry per schedule; a scalar serves all.

    Attributes:
      loads: what it loads, by operand.
      flops: floating-point operations at the peak rate of `Footprint.arithmetic`, padding included: MMA, but for
        "float32", which no tensor core computes.
      fp32_ops: plain operations of FP32 lanes.
      mufu_ops: exponentials and the like.
      onchip_bytes_read: on-chip bytes that matrix units read; 0 where unknown.
      bytes_written: bytes stored to device memory, ragged edges averaged in.
      transactions: accesses of warps to device memory, and bulk copies; 0 where unknown.
      iterations: of the code's own loops, one after the other, each as long at least as its chain of dependent
        instructions; 0 where other threads work meanwhile.
    """

    loads: tuple[Operand, ...] = ()
    flops: Column | float = 0
    fp32_ops: Column | float = 0
    mufu_ops: Column | float = 0
    onchip_bytes_read: Column | float = 0
    bytes_written: Column | float = 0
    transactions: Column | float = 0
    iterations: Column | float = 0


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one launch of each schedule demands. Every `Column` has one entry per schedule; a scalar serves all.

    A tile is what one block of the grid computes, in `steps` steps of a loop; a persistent block takes one tile after
    another. What overlaps follows from this:

    - Loads overlap with all else as far as `stages` reach.
    - FP32 lanes and MUFU work on the results of MMA, and MMA waits for them, unless there is another to issue MMA: the
      other consumers (`ping_pong`), another block of the same core, or, within a tile, the same consumer
      (`delay_release`). Where there is no MMA, they overlap with loads and with each other.
    - A tile's own phase comes after its steps, and overlaps with steps of the next tile where blocks are persistent
      and `ping_pong`.

    Attributes:
      arithmetic: whose peak rate `flops` have: a dtype name, "tf32" (see `Problem.arithmetic`).
      grid: tiles along each axis; their product is the number of tiles.
      step: what each step of a tile demands.
      tile: what each tile demands beside its steps: operands loaded once, the epilogue, the result.
      onchip_bytes: on-chip memory that one block asks for, exact to the byte.
      spill_bytes: what the compiler takes beside them for registers that it spills, at the least.
      onchip_limit_bytes: what the launch asks that a block may have of on-chip memory at most; 0 is the chip's default.
      steps: steps of a tile; the mean over tiles where these differ.
      step_range: steps of the shortest and of the longest tile where tiles differ (causal attention); else None.
      minor: the axis of `grid` that advances first (the others follow from the last to the first)...
      group: ...for so many tiles, before the next axis advances.
      snake: the next axis advances backwards in every other group.
      axes: what a person calls the axes of `grid`; empty where they have no names.
      stages: steps whose loads may be in flight at once.
      consumers: consumer warpgroups that multiply a step between them, each a part of its own, and wait until matrix
        units have done so; 0 where none does.
      ping_pong: consumers take turns, by steps or by tiles: while lanes work on what one has multiplied, another
        multiplies.
      accumulators: of a tile of MMA, that its consumers round, store and zero before the next tile's MMA; 0 where that
        is counted elsewhere, or nothing follows.
      delay_release: steps whose MMA a consumer issues before those of the step before have ended.
      threads: threads of one block that compute.
      registers: 32-bit registers that one of these threads needs; above what hardware gives, they spill.
      registers_per_block: registers of the whole block, producers included; 0 where unknown.
      cluster: blocks that start together, share loads, and reach each other's on-chip memory.
      dsmem_bytes: what one block writes into the on-chip memory of the others of its cluster.
      tail_parts: parts of its steps into which each tile of the last wave is split, a block for each...
      tail_bytes: ...of which all but one leave so much in device memory, for that one to add.
      persistent: blocks stay and take the next tile, so that one's end overlaps the next one's loads.
      copied_bytes: bytes moved by copies before or after the launch (padding, layout changes).
      launches: device launches in all.
      coalescing: share of what transactions move, in whole sectors of 32 bytes, that is wanted: 1 where nothing is in
        vain.
      access_bytes: bytes of one access of one thread, at a multiple of which it must start; 0 where unknown.

    Raises:
      DeclarationError: a load is selected by an axis that the grid does not have.
    """

    arithmetic: str
    grid: tuple[Column | float, ...]
    step: Phase
    onchip_bytes: Column
    tile: Phase = Phase()
    steps: Column | float = 1
    step_range: tuple[Column | float, Column | float] | None = None
    minor: Column | int = 0
    group: Column | int = 1
    snake: bool = False
    axes: tuple[str, ...] = ()
    spill_bytes: Column | float = 0
    onchip_limit_bytes: Column | int = 0
    stages: Column | int = 1
    consumers: Column | int = 0
    ping_pong: Column | bool = False
    accumulators: Column | float = 0
    delay_release: Column | int = 0
    threads: Column | int = 128
    registers: Column | int = 0
    registers_per_block: Column | int = 0
    cluster: Column | int = 1
    dsmem_bytes: Column | float = 0
    tail_parts: Column | int = 1
    tail_bytes: Column | float = 0
    persistent: Column | bool = False
    copied_bytes: Column | float = 0.0
    launches: Column | int = 1
    coalescing: Column | float = 1.0
    access_bytes: Column | int = 0

    def __post_init__(self) -> None:
        for number, operand in enumerate((*self.step.loads, *self.tile.loads)):
            for axis in operand.axes:
                if not 0 <= axis < len(self.grid):
                    last = f"has axes 0 to {len(self.grid) - 1}" if self.grid else "has none"
                    raise DeclarationError(
                        f"operand {number} of the footprint is selected by axis {axis}: its grid {last}"
                    )

    @functools.cached_property
    def mean_step(self) -> Phase:
        """What a step demands on average with its part of what each tile demands; loads of steps come first."""
        step, tile = self.step, self.tile
        amounts = [field.name for field in dataclasses.fields(Phase) if field.name != "loads"]
        return Phase(
            loads=(*step.loads, *(load.over(self.steps) for load in tile.loads)),
            **{name: getattr(step, name) + getattr(tile, name) / self.steps for name in amounts},
        )

    @property
    def shortest(self) -> Column | float:
        """Steps of the shortest tile."""
        return self.steps if self.step_range is None else self.step_range[0]

    @property
    def longest(self) -> Column | float:
        """Steps of the longest tile."""
        return self.steps if self.step_range is None else self.step_range[1]
