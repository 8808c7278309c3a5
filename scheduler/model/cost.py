"""Predicts the time of a launch from its resource demands (`Footprint`) and the chip's capacities (`Hardware`).

The model is analytic. The blocks of a launch run in waves over the cores. In each step of a wave, arithmetic units and
copies into the cores overlap. The slowest of these, or device memory, determines the time of the step. A p-norm adds a
contribution of the others. The model need not be exact: it ranks schedules, and measurements select among the best
ranked. `benchmarks/search_quality.py` measures the contribution of each term to the ranking.

Sources: roofline (Williams, Waterman, Patterson, CACM 2009); waves and windows of concurrent blocks as in
nvMatmulHeuristics and tritonBLAS (arXiv:2512.04226); bytes in flight by Little's law. Terms without a published source
were derived from recorded matmul sweeps on one H200, as stated at each term.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.model.library import LibraryWork
from scheduler.model.traffic import block_count, column, concurrent, resident, traffic
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import Problem

# ------------------------------------------------------------------------------
# Empirical constants of the cost model that no data sheet specifies: efficiencies and overheads.


@dataclasses.dataclass(frozen=True)
class Constants:
    """Empirical constants of the cost model: efficiencies and overheads.

    The defaults are round numbers from sweeps of 19 matmuls and from XLA's times of 253 problems on one H200. Kernel
    constants refitted to other shapes rank no better, so a calibration sets only the two scales and constants of the
    library (`calibration.py`).

    Attributes:
      scale: ratio of measured to predicted time of this kernel on this chip.
      e_power: fraction of the chip's peak rate that all cores sustain together, at the clock that the power limit
        allows.
      e_hbm: fraction of the device memory's bandwidth that a kernel reaches.
      tma_row_s: time of a core's TMA for one row of a swizzled tile, independent of the row's width, in seconds.
      fill_row_s: time to fill one row beyond an array's edge with zeros, in seconds. All other loads of the core stall.
      sector_misalignment: extra time of a row that starts within a sector of the last-level cache, relative to the
        cache's time for the row's bytes.
      l2_share: fraction of the last-level cache that keeps operands until their next use.
      p: order of the norm over the overlapping terms of a step: 1 means no overlap, infinity means the roofline.
      step_s: time of one step's barriers and loop, in seconds.
      iteration_s: overhead of one iteration of a loop within a step, without its operations, in seconds
        (`Phase.iterations`).
      wgmma_bubble_s: time from the end of a step's wgmma until the next one runs, if the next one is issued only then,
        in seconds.
      accumulator_s: time per accumulator of a tile between its last wgmma and the first of the next tile, in seconds,
        if no other consumer multiplies meanwhile. The accumulator is rounded, stored and zeroed.
      stage_s: time to set up the buffers and barriers of one pipeline stage, in seconds.
      cluster_sync_s: time that the CTAs of a cluster wait for each other, at their start and end, in seconds.
      dsmem_s: fixed time of an exchange between the CTAs of a cluster through DSMEM, in seconds.
      dsmem_bytes_per_s: rate at which one core writes into the on-chip memory of another.
      exchange_s: time of an exchange between the threads of a block, in seconds (`Footprint.exchanges`).
      tail_reduction_s: time that the CTAs of a split last wave wait for each other, in addition to the transfer of
        their bytes, in seconds (H200: 14 matmuls took 2 us longer than their bytes, compared with whole tiles).
      launch_share: time of an empty launch, relative to `Hardware.launch_s`.
      library_scale, library_e_mma, library_e_hbm, library_p: scale, fraction of the peak arithmetic rate, fraction of
        the memory bandwidth, and order of the norm for the library's kernels.
      library_grain: result elements per core at which the library reaches half of its arithmetic rate.
      library_s, library_fused_s: fixed time of a library kernel on tensor cores, and of a fused kernel, each including
        its launch, in seconds.
      library_unaligned, library_halving: increase of the library's arithmetic time for each operand whose rows are not
        aligned (`problem.row_alignment`), relative to aligned rows, and for each halving below 8 bytes: its kernels
        then use neither TMA nor WGMMA.
      library_unaligned_memory: share of that increase by which the memory time increases.
      library_fused_unaligned: increase of the memory time of a fused kernel with unaligned rows.
      library_store: increase of the memory time of results with unaligned rows, relative to aligned rows.
    """

    scale: float = 1.0
    e_power: float = 0.9
    e_hbm: float = 0.95
    tma_row_s: float = 1e-9
    fill_row_s: float = 9e-10
    sector_misalignment: float = 1.0
    l2_share: float = 0.56
    p: float = 4.0
    step_s: float = 1e-8
    iteration_s: float = 0.0
    wgmma_bubble_s: float = 1e-7
    accumulator_s: float = 3e-11
    stage_s: float = 4e-8
    cluster_sync_s: float = 2e-7
    dsmem_s: float = 5e-7
    dsmem_bytes_per_s: float = 2.5e10
    exchange_s: float = 1e-6
    tail_reduction_s: float = 2e-6
    launch_share: float = 0.55
    library_scale: float = 1.0
    library_e_mma: float = 0.845
    library_e_hbm: float = 0.88
    library_p: float = 5.0
    library_grain: float = 700.0
    library_s: float = 4e-6
    library_fused_s: float = 1.3e-6
    library_unaligned: float = 1.5
    library_halving: float = 0.4
    library_unaligned_memory: float = 0.4
    library_fused_unaligned: float = 0.35
    library_store: float = 1.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in SHARES and not 0 < value <= 1:
                raise ValueError(f"{name} is a share of a peak and must be in (0, 1], found {value}")
            if name in ORDERS and not value >= 1:
                raise ValueError(f"{name} is the order of a norm and must be at least 1, found {value}")
            if name in FACTORS and not value > 0:
                raise ValueError(f"{name} is a factor or a rate and must be above 0, found {value}")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is a time or size and must be finite and at least 0, found {value}")


SHARES = ("e_power", "e_hbm", "l2_share", "library_e_mma", "library_e_hbm")
ORDERS = ("p", "library_p")
FACTORS = ("scale", "library_scale", "dsmem_bytes_per_s")

# In the interpreter on a CPU, nothing overlaps, and each grid step costs about a millisecond.
_ANY_ROWS = {"library_unaligned": 0.0, "library_fused_unaligned": 0.0, "library_halving": 0.0, "library_store": 0.0}
_CPU = Constants(
    p=1, step_s=1e-3, stage_s=0, launch_share=1, library_grain=0, library_s=1e-3, library_fused_s=1e-3, **_ANY_ROWS
)
# No TPU has been measured. The constants of steps, loops and XLA's arithmetic are from libtpu's static schedules
# (docs/search-and-model.md).
_TPU = Constants(
    e_power=1.0, step_s=2.5e-7, iteration_s=2e-8, wgmma_bubble_s=0, stage_s=0, library_e_mma=0.95, library_grain=0,
    library_fused_s=4e-6, **_ANY_ROWS,
)  # fmt: skip

# Platform -> constants; other platforms have the defaults.
BY_PLATFORM: Mapping[str, Constants] = MappingProxyType({"cpu": _CPU, "tpu": _TPU})


Array = npt.NDArray[np.float64]


# XLA writes and reads intermediate arrays several times. If this traffic exceeds this multiple of the last-level cache
# size, all of it moves through device memory.
PASSES_BETWEEN = 8.0


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a whole launch by cause, one entry per schedule. `CostModel.terms` documents the names.

    Attributes:
      overlapped: terms that overlap within each step.
      serial: terms before, after and between the steps.
      steps_s: time of all steps after overlap. The prediction is the sum of `steps_s` and all `serial` terms.
    """

    overlapped: Mapping[str, Array]
    serial: Mapping[str, Array]
    steps_s: Array


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Predicts times on one chip.

    Attributes:
      hardware: the chip.
      constants: efficiencies and overheads; None selects the defaults of the architecture.
    """

    hardware: Hardware
    constants: Constants | None = None

    @functools.cached_property
    def in_force(self) -> Constants:
        """The constants that predictions use."""
        return self.constants or BY_PLATFORM.get(self.hardware.platform, Constants())

    def seconds(self, footprint: Footprint) -> Array:
        """Returns the predicted time of the whole launch, including copies, in seconds; one entry per schedule."""
        parts = self.breakdown(footprint)
        return parts.steps_s + sum(parts.serial.values())

    def terms(self, footprint: Footprint) -> dict[str, Array]:
        """Returns the seconds of the whole launch by cause, one entry per schedule.

        Terms of the first group overlap within a step (see `_pace`). Terms of the second group add up.

        mma: arithmetic of the busiest core at the highest clock, including padding and the last wave.
        wgmma_bubble: idle time of tensor cores between one step's wgmma and the next, unless another consumer warpgroup
          or a previously issued step keeps them busy (H200: 0.1 us; a step of 64 x 64 x 64 takes 0.07 us).
        step_bubble, tile_bubble: idle time of tensor cores while FP32 lanes and MUFU process the products of a step or
          of a whole tile. Zero with ping-pong warpgroups: one multiplies during the softmax or epilogue of the other.
        tile_end: idle time of tensor cores while consumers round, store and zero accumulators between two tiles of a
          core. Zero with ping-pong, as another consumer multiplies meanwhile (H200: 1 us per tile of 128 x 256).
        power: arithmetic of all active cores, at e_power of the chip's peak rate. An H200 ran at 1.78 GHz with all
          cores busy, and at its highest clock with a quarter of them busy.
        smem: reads of tensor cores from on-chip memory.
        l2: on-chip bytes that loads fill in a core, including edges, at the core's share of the last-level cache's
          bandwidth. A multicast load counts in full for each core that it serves.
        tma_rows: rows issued by the core's TMA. Rows of 64 bytes take as long as rows of 128 bytes (H200: one row per
          1.9 clocks). Rows that start within a sector take longer. The CTAs of a multicast load issue one part each.
        oob_fill: zero-filling of rows beyond an array's edge, during which all other loads of the core stall (H200: for
          an array with one row, tiles of 64 rows take 1.4 times as long as tiles of 8 rows). A multicast load stalls
          all cores that it serves.
        hbm: loads that miss the last-level cache, and results, at e_hbm of the device memory's bandwidth.
        mufu, fp32: exponentials and plain lane operations, at the rates of their units. `fp32` includes the latency of
          dependent instructions in each loop iteration.
        latency: the time that a pipeline of `stages` cannot hide. Each stage is loaded after the latency, then read by
          the computation, and only then loaded again. A step takes at least (latency + load + compute) / stages
          (Little's law). If the computing loop also starts the loads, the current step always occupies one stage. The
          bound is then (latency + load) / (stages - 1).

        step: loop overhead of each step.
        pipeline_setup: setup of the pipeline's stages.
        prologue: latency of a block's first operands, and the smaller of a step's load and compute time, because the
          first load and the last computation overlap with nothing. Counts for the first block only if blocks are
          persistent or share a core.
        epilogue: storing a block's result through the last-level cache. Counts for the last block only if blocks are
          persistent or share a core. Includes lane operations after the last MMA that overlap with MMA before it.
        copies: copies before or after the launch (padding, layouts), at e_hbm of the memory's bandwidth.
        cluster_sync: CTAs of a cluster wait for each other at their start and end.
        dsmem: the CTAs of a cluster write into each other's on-chip memory, and wait for these writes (H200: 0.5 us,
          and 25 bytes per ns).
        exchange: the threads of a block wait for each other's numbers before the block continues, and through DSMEM for
          those of its cluster (fitted to 300 schedules of rows along an axis, H200).
        tail_reduction: in a split last wave, cores write partial tiles, one core per tile reads those of the others,
          and the cores wait for each other. Bytes move at the core's share of the last-level cache's bandwidth.
        launch: empty launches, and the memory latency of each launch after the first, which has no prefetched loads.
        """
        parts = self.breakdown(footprint)
        return {**parts.overlapped, **parts.serial}

    def breakdown(self, footprint: Footprint) -> Breakdown:
        """Returns the terms in two groups, overlapping and serial, and the time of all steps after overlap."""
        c = self.in_force
        overlapped, serial, steps = self._analyse(footprint)
        return Breakdown(
            overlapped={name: c.scale * (steps * seconds).sum(axis=0) for name, seconds in overlapped.items()},
            serial={name: c.scale * seconds for name, seconds in serial.items()},
            steps_s=c.scale * (steps * _pace(overlapped, c.p)).sum(axis=0),
        )

    def floor(self, footprint: Footprint) -> Array:
        """Returns a lower bound on the time of each schedule, in seconds, independent of the constants.

        The bound is the largest of three times. It is 0 if the chip's figures are extrapolated.

        - The padded arithmetic of the busiest core at the highest clock.
        - The loads of all cores together, at the bandwidth of the last-level cache. A per-core bound would be wrong: a
          core that loads while few others do gets more than its share of that bandwidth.
        - Every byte moved once through device memory. Bytes that fit into the last-level cache may be there already,
          and count at its bandwidth.
        """
        f, h = footprint, self.hardware
        each = block_count(f) / h.cores
        # If tiles differ, the busiest core has at least the mean number of steps, and at least those of the longest
        # tile.
        least = np.floor(each) + np.ceil(each % 1) / f.tail_parts
        flops = np.maximum(least * _tile_flops(f, f.shortest), each * _tile_flops(f, f.steps))
        flops = np.maximum(flops, _tile_flops(f, f.longest))
        arithmetic = flops * h.cores / (h.boost * h.peak(f.arithmetic))
        moves = traffic(f, h, l2_share=1.0)
        loads, moved = moves.cache_bytes / h.l2_bytes_per_s, moves.compulsory_bytes
        memory = moved / np.where(moved < h.l2_bytes, h.l2_bytes_per_s, h.hbm_bytes_per_s)
        return np.maximum(np.maximum(arithmetic, loads), memory) * (not h.extrapolated)

    def lower_bound(self, problem: Problem) -> float:
        """Returns the roofline time ``max(flops / peak, bytes / bandwidth)`` in seconds, for any implementation."""
        h = self.hardware
        return max(problem.flops / h.peak(problem.arithmetic), problem.bytes_moved / h.hbm_bytes_per_s)

    def library_floor(self, problem: Problem) -> float:
        """Returns a lower bound on XLA's time from its intermediate arrays, in seconds; 0 if a cache may hold them."""
        between = problem.library_bytes_moved - problem.bytes_moved
        if self.hardware.extrapolated or between <= PASSES_BETWEEN * self.hardware.l2_bytes:
            return 0.0
        return problem.library_bytes_moved / self.hardware.hbm_bytes_per_s

    def library_seconds(self, problem: Problem) -> float:
        """Returns the predicted time of XLA in seconds (`LibraryWork.seconds`)."""
        return float(LibraryWork.of(problem, self.hardware, self.in_force).seconds(self.in_force))

    def library_spread(self, problem: Problem) -> float:
        """Returns the uncertainty of `library_seconds` in log time, from `Problem.library_bytes_unsure`."""
        unsure_s = problem.library_bytes_unsure / (self.in_force.library_e_hbm * self.hardware.hbm_bytes_per_s)
        return math.log1p(unsure_s / self.library_seconds(problem)) if unsure_s else 0.0

    def _analyse(self, footprint: Footprint) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """Returns overlapping terms, serial terms and step counts.

        Overlapping terms are in seconds per step, with shape ``[full waves or last wave, schedule]``. Serial terms are
        in seconds, with shape ``[schedule]``. Step counts have the shape of overlapping terms. `terms` documents the
        names.
        """
        f, h, c, demand = footprint, self.hardware, self.in_force, footprint.mean_step
        blocks, steps, at_once = block_count(f), column(f.steps), concurrent(f, h)
        full, parts = np.floor(blocks / at_once), column(f.tail_parts)
        running = np.stack([np.where(full > 0, at_once, 0), (blocks - full * at_once) * parts])
        waves = np.stack([full, (np.ceil(blocks / at_once) - full) / parts])
        count, per_core = waves.sum(axis=0), np.ceil(running / h.cores)
        # Cores process several tiles, with the mean number of steps in each. The additional steps of the longest tile
        # count in the last wave.
        last = np.stack([waves[1] == 0, waves[1] > 0])
        paced = waves * steps + last * (column(f.longest) - steps)
        zero = np.zeros_like(count)

        moved = traffic(f, h, l2_share=c.l2_share)
        peak, core_rate, hbm_rate = h.peak(f.arithmetic), h.l2_bytes_per_s / h.cores, c.e_hbm * h.hbm_bytes_per_s
        launches = column(f.launches)
        beyond_edges = sum(column(o.fill_rows) * o.multicast for o in demand.loads)
        overlapped = {
            "mma": per_core * demand.flops * h.cores / (h.boost * peak),
            "power": running * demand.flops / (c.e_power * peak),
            "smem": per_core * column(demand.onchip_bytes_read) / (h.onchip_bytes_per_clock * h.clock_hz),
            "l2": per_core * sum(s * _filled(o) for s, o in zip(moved.fetched, demand.loads, strict=True)) / core_rate,
            "tma_rows": per_core * sum(_tma_s(o, h, c) / o.multicast for o in demand.loads),
            "oob_fill": per_core * beyond_edges * c.fill_row_s,
            "hbm": running * (moved.memory_bytes / (blocks * steps) + demand.bytes_written) / hbm_rate,
        }
        units = np.maximum(np.maximum(overlapped["mma"], overlapped["power"]), overlapped["smem"])
        overlapped["wgmma_bubble"] = _wgmma_bubble(f, per_core, units, c.wgmma_bubble_s)
        between = per_core * column(f.accumulators) * np.logical_not(f.ping_pong) * (count - 1) / (count * steps)
        overlapped["tile_end"] = c.accumulator_s * between
        load = np.maximum(np.maximum(overlapped["l2"], overlapped["tma_rows"]), overlapped["hbm"])
        load = load + overlapped["oob_fill"]
        lanes = _lanes(f, h, c, per_core, count)
        compute = units + overlapped["wgmma_bubble"] + lanes.busy_s
        latency_s = np.where(moved.l2_resident, h.l2_latency_s, h.memory_latency_s)
        overlapped["latency"] = _latency(latency_s, load, compute, per_core, f.stages, in_order=h.sequential_grid)
        overlapped |= lanes.shown

        dsmem_s = c.dsmem_s * (column(f.dsmem_bytes) > 0) + f.dsmem_bytes / c.dsmem_bytes_per_s
        surrounded = h.sequential_grid | column(f.persistent).astype(bool) | (resident(f, h) > 1)
        alone = np.where(surrounded, 1.0, count)
        # The first step loads all its operands. Later steps may find some of them on chip.
        first_load = np.where(
            load < compute, load + _kept_s(demand.loads, moved.fetched, core_rate) * per_core, compute
        )
        shorter = (first_load / np.maximum(per_core, 1)).max(axis=0)
        serial = {
            "step": c.step_s * paced.sum(axis=0),
            "pipeline_setup": c.stage_s * f.stages + zero,
            "prologue": (latency_s + shorter) * alone,
            "epilogue": per_core.max(axis=0) * f.tile.bytes_written / core_rate * alone + lanes.last_s,
            "copies": f.copied_bytes / hbm_rate + zero,
            "cluster_sync": c.cluster_sync_s * (column(f.cluster) > 1) + zero,
            "dsmem": np.where(column(f.exchanges) > 0, 0.0, dsmem_s) + zero,
            "exchange": (c.exchange_s + dsmem_s) * column(f.exchanges) * count,
            "tail_reduction": np.where(parts > 1, c.tail_reduction_s + parts * f.tail_bytes / core_rate, 0.0) + zero,
            "launch": c.launch_share * h.launch_s * launches + h.memory_latency_s * (launches - 1) + zero,
        }
        return overlapped, serial, paced


def arithmetic_intensity(footprint: Footprint) -> Array:
    """Returns the FLOP of one step per byte loaded, in FLOP/B. For a matmul tile, it is independent of tile_k.

    ``2 tile_m tile_n / (itemsize (tile_m + tile_n))``: 0.5 for a naive bfloat16 dot product, 64 for tiles of 128 x 128.
    """
    demand = footprint.mean_step
    loads = sum(column(o.bytes) for o in demand.loads)
    return demand.flops / np.maximum(loads, 1)


def _tile_flops(footprint: Footprint, steps: npt.ArrayLike) -> Array:
    """Returns the floating-point operations of MMA in a tile with this number of steps."""
    return column(steps) * footprint.step.flops + footprint.tile.flops


def _filled(operand: Operand) -> Array:
    """Returns the on-chip bytes that a block fills with this operand in one step."""
    return np.where(np.asarray(operand.filled_bytes) > 0, operand.filled_bytes, operand.bytes)


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """Times of a core's FP32 lanes and MUFU, in seconds.

    Attributes:
      busy_s: busy time per step.
      shown: terms per step: the time of each unit that overlaps with MMA, and the bubbles in which MMA waits.
      last_s: time per launch after the last MMA, which overlaps with nothing.
    """

    busy_s: Array
    shown: Mapping[str, Array]
    last_s: Array


def _lanes(footprint: Footprint, hardware: Hardware, constants: Constants, per_core: Array, count: Array) -> _Lanes:
    """Returns the times of FP32 lanes and MUFU for `count` consecutive tiles on a core.

    MMA waits for the lanes, with two exceptions. In the first, another block of the core has MMA to issue. In the
    second, lanes and MMA alternate: between ping-pong consumers, or within one consumer that has issued the next step.
    If they alternate, the last lane phase is not hidden. It occurs once per launch, or once per tile if no other
    consumer has the next tile.
    """
    f = footprint
    steps, shared = column(f.steps), resident(f, hardware) > 1
    # With float32 arithmetic, the FP32 lanes compute the products, so there is no MMA.
    multiplies = (column(f.mean_step.flops) > 0) & (f.arithmetic != "float32")
    ping_pong = column(f.ping_pong).astype(bool)
    runs = np.where(ping_pong & column(f.persistent).astype(bool), 1.0, count)
    # Per phase: lane seconds in one step, whether lanes and MMA alternate, and the number of phases per tile.
    phases = {
        "step_bubble": (
            _lane_seconds(f.step, hardware, constants, per_core),
            ping_pong | (column(f.delay_release) > 0),
            steps,
        ),
        "tile_bubble": (_lane_seconds(f.tile, hardware, constants, per_core / steps), ping_pong, np.ones_like(steps)),
    }
    shown = {"mufu": np.zeros_like(per_core), "fp32": np.zeros_like(per_core)}
    busy_s, last_s = np.zeros_like(per_core), np.zeros_like(count)
    for bubble, (lanes, in_turn, times) in phases.items():
        beside = np.where(multiplies, np.where(in_turn, 1 - runs / (count * times), shared), 1.0)
        shown |= {unit: shown[unit] + beside * seconds for unit, seconds in lanes.items()}
        total = lanes["mufu"] + lanes["fp32"]
        shown[bubble] = np.where(multiplies & ~in_turn & ~shared, total, 0.0)
        busy_s = busy_s + total
        last_s = last_s + np.where(multiplies & in_turn, total.max(axis=0) * steps / times * runs, 0.0)
    return _Lanes(busy_s, shown, last_s)


def _lane_seconds(phase: Phase, hardware: Hardware, constants: Constants, per_core: Array) -> dict[str, Array]:
    """Returns the seconds of a core's MUFU and FP32 lanes for `per_core` repetitions of a phase."""
    h = hardware
    return {
        "mufu": per_core * phase.mufu_ops / (h.special_per_clock * h.clock_hz),
        "fp32": per_core * phase.fp32_ops / (h.lanes_per_core * h.clock_hz)
        + per_core * phase.iterations * constants.iteration_s,
    }


def _wgmma_bubble(footprint: Footprint, per_core: Array, units: Array, bubble_s: float) -> Array:
    """Returns the idle seconds of a core's tensor cores in a step.

    A consumer warpgroup multiplies its part, waits `bubble_s`, and continues. A warpgroup that issues a step ahead
    waits once per two steps. The wait is hidden while the parts of other warpgroups keep the units busy.
    """
    groups = per_core * footprint.consumers
    cycle = (units / np.maximum(groups, 1) + bubble_s) / (1 + column(footprint.delay_release))
    return np.where(groups > 0, np.maximum(cycle - units, 0.0), 0.0)


def _kept_s(loads: Sequence[Operand], fetched: Sequence[Array], core_rate: float) -> Any:
    """Returns the load seconds that an average step of a core saves, for blocks on chip from the previous step."""
    return sum((1 - share) * _filled(o) for share, o in zip(fetched, loads, strict=True)) / core_rate


def _latency(latency_s: Any, load: Array, compute: Array, per_core: Array, stages: Any, *, in_order: bool) -> Array:
    """Returns the minimum seconds of a step for a pipeline with `stages`.

    `in_order` means that the computing loop also starts the loads.
    """
    each = np.maximum(per_core, 1)
    if in_order:
        ahead = np.maximum(column(stages) - 1, 1)
        return (latency_s + load / each + np.where(column(stages) > 1, 0.0, compute / each)) / ahead
    return (latency_s + (load + compute) / each) / stages


def _tma_s(operand: Operand, hardware: Hardware, constants: Constants) -> Array:
    """Returns the seconds of a core's TMA to issue a block's loads of this operand in one step."""
    width, start = column(operand.tma_row_bytes), column(operand.start_bytes)
    filled = _filled(operand)
    rows = np.where(width > 0, filled / np.maximum(width, 1), 0.0)
    misaligned = np.where((start > 0) & (start < hardware.sector_bytes), filled, 0.0)
    core_rate = hardware.l2_bytes_per_s / hardware.cores
    return rows * constants.tma_row_s + misaligned * constants.sector_misalignment / core_rate


def _pace(parts: Mapping[str, Array], p: float) -> Array:
    """Returns the seconds of a step with overlapping parts.

    Units and loads of a core are combined with the norm of order `p`. The result is combined with the bandwidth and
    latency of device memory by a norm of order ``3 p``, because these two hide the core's work almost completely.
    Evidence: matmuls with few rows reach 95 % of an H200's bandwidth with most tiles, and one stage more than necessary
    gains nothing.
    """
    mma = parts["mma"] + parts["step_bubble"] + parts["tile_bubble"]
    units = np.maximum(np.maximum(mma, parts["power"]), parts["smem"]) + parts["wgmma_bubble"] + parts["tile_end"]
    loads = np.maximum(parts["l2"], parts["tma_rows"]) + parts["oob_fill"]
    core = _norm(np.stack([units, parts["mufu"], parts["fp32"], loads]), p)
    return _norm(np.stack([core, parts["latency"], parts["hbm"] + parts["oob_fill"]]), 3 * p)


def _norm(parts: Array, p: float) -> Array:
    """Returns the p-norm over the first axis, scaled so that powers of seconds do not underflow."""
    largest = parts.max(axis=0)
    return largest * ((parts / np.maximum(largest, 1e-30)) ** p).sum(axis=0) ** (1 / p)
