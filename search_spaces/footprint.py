"""Resource demands of one launch of each schedule: per step, per tile and once, and which of them may overlap."""

from __future__ import annotations

import dataclasses
import functools

from search_spaces.space import Column, DeclarationError


@dataclasses.dataclass(frozen=True)
class Operand:
    """The loads of one operand by one block in one phase.

    Attributes:
      bytes: bytes loaded, ragged edges averaged in.
      axes: the axes of `Footprint.grid` that select the block. Blocks that agree on these axes load the same bytes.
      multicast: number of blocks of a cluster that one load serves (1 if each block loads for itself).
      filled_bytes: on-chip bytes that the load fills, including parts beyond ragged edges; 0 if equal to `bytes`.
      tma_row_bytes: width of the SMEM rows in which TMA delivers the data, one row at a time; 0 without TMA.
      fill_rows: average number of these rows that lie in groups of eight wholly beyond an edge of the array, which TMA
        fills with zeros.
      start_bytes: the largest power of two such that all of these rows start at a multiple of it in device memory; 0 if
        that is a cache line.
      name: a readable name, "" if there is none.
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
        """Returns the average load of one of `steps` steps."""
        return dataclasses.replace(
            self, bytes=self.bytes / steps, filled_bytes=self.filled_bytes / steps, fill_rows=self.fill_rows / steps
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """Resource demands of one block in one phase of its work.

    Every `Column` has one entry per schedule; a scalar serves all.

    Attributes:
      loads: the loads, by operand.
      flops: floating-point operations at the peak rate of `Footprint.arithmetic`, padding included. These are MMA,
        except for "float32", which tensor cores do not compute.
      fp32_ops: plain operations of FP32 lanes.
      mufu_ops: exponentials and similar operations.
      onchip_bytes_read: on-chip bytes that matrix units read; 0 if unknown.
      bytes_written: bytes stored to device memory, ragged edges averaged in.
      transactions: accesses of warps to device memory, and bulk copies; 0 if unknown.
      iterations: iterations of the code's own loops, in sequence. Each takes at least as long as its chain of dependent
        instructions. 0 if other threads work meanwhile.
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
    """Resource demands of one launch of each schedule. A `Column` has one entry per schedule; a scalar serves all.

    One block of the grid computes one tile, in a loop of `steps` steps. A persistent block computes several tiles in
    turn. The following work overlaps:

    - Loads overlap with all other work, as far ahead as `stages` allow.
    - FP32 lanes and MUFU work on the results of MMA, and MMA waits for them, unless other code can issue MMA: the other
      consumers (`ping_pong`), another block of the same core, or, within a tile, the same consumer (`delay_release`).
      Without MMA, they overlap with loads and with each other.
    - The tile phase follows the steps of the tile. It overlaps with steps of the next tile if blocks are persistent and
      `ping_pong`.

    Attributes:
      arithmetic: the type whose peak rate applies to `flops`: a dtype name, "tf32" (see `Problem.arithmetic`).
      grid: tiles along each axis; their product is the number of tiles.
      step: demands of each step of a tile.
      tile: demands of each tile besides its steps: operands loaded once, the epilogue, the result.
      onchip_bytes: on-chip memory that one block requests, exact to the byte.
      tmem_bytes: tensor memory that one block allocates (Blackwell), in bytes.
      spill_bytes: lower bound of the additional bytes that the compiler takes for spilled registers.
      onchip_limit_bytes: limit of on-chip memory per block that the launch requests; 0 is the chip's default.
      steps: steps of a tile; the mean over tiles if these differ.
      step_range: steps of the shortest and of the longest tile if tiles differ (causal attention); else None.
      minor: the axis of `grid` that advances first. The other axes follow from the last to the first.
      group: number of tiles along `minor` before the next axis advances.
      snake: the next axis advances backwards in every other group.
      axes: readable names of the axes of `grid`; empty if they have no names.
      stages: steps whose loads may be in flight at once.
      consumers: consumer warpgroups that split the MMA of a step and wait until the matrix units have finished; 0 if
        there are none.
      ping_pong: consumers alternate, by steps or by tiles: while lanes process the results of one consumer, another
        multiplies.
      accumulators: accumulators of an MMA tile that its consumers round, store and zero before the next tile's MMA; 0
        if these are counted elsewhere, or nothing follows.
      delay_release: steps whose MMA a consumer issues before the MMA of the previous steps has finished.
      threads: threads of one block that compute.
      registers: 32-bit registers that one of these threads needs; above the hardware limit, they spill.
      registers_per_block: registers of the whole block, producers included; 0 if unknown.
      cluster: blocks that start together, share loads, and reach each other's on-chip memory.
      dsmem_bytes: bytes that one block writes into the on-chip memory of other blocks of its cluster, once or in each
        of the `exchanges`.
      exchanges: times per tile that a block waits until its threads, and those of its cluster, have exchanged numbers.
      tail_parts: parts into which the steps of each tile of the last wave are split, one block per part.
      tail_bytes: bytes that each of these blocks except one leaves in device memory, for that one to add.
      persistent: blocks stay and take the next tile, so that the end of one tile overlaps with loads of the next.
      per_core: blocks of each core, if they are persistent and fit.
      copied_bytes: bytes moved by copies before or after the launch (padding, layout changes).
      launches: number of device launches in all.
      coalescing: fraction of the bytes moved by transactions, in whole sectors of 32 bytes, that is needed; 1 if none
        is wasted.
      access_bytes: bytes of one access of one thread, which must start at a multiple of them; 0 if unknown.

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
    tmem_bytes: Column | int = 0
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
    exchanges: Column | float = 0
    tail_parts: Column | int = 1
    tail_bytes: Column | float = 0
    persistent: Column | bool = False
    per_core: Column | int = 1
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
        """Average demands of a step, including its share of the tile's demands; the loads of steps come first."""
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
