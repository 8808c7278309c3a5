"""Predict how long a launch takes, from what it demands (`Footprint`) and what a chip supplies (`Hardware`).

The model is analytic: the blocks of a launch run in waves over the cores; in each step of a wave the arithmetic units
and the copies into the cores work at once, and the slowest of them sets the pace (a p-norm lets the others show), or
device memory does where it is slower still. It need not be exact: it ranks schedules, and measuring chooses among the
best ranked. What each term is worth is measured by `benchmarks/search_quality.py`.

Sources: roofline (Williams, Waterman, Patterson, CACM 2009); waves and windows of concurrent blocks as in
nvMatmulHeuristics and tritonBLAS (arXiv:2512.04226); bytes in flight by Little's law. Terms that no paper gave were
read off recorded sweeps of a matmul on one H200, as said where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.model.traffic import block_count, column, concurrent, resident, traffic
from search_spaces.kernel import Footprint, Operand, Problem

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What no data sheet tells: shares of the peaks that kernels reach, and overheads.

    The defaults are round numbers from 19 matmuls swept on one H200 and from XLA's times of 21. Refitted to other
    shapes they rank no better, so a calibration sets the two scales alone (`calibrate.py`).

    Attributes:
      scale: measured over predicted time of this kernel on this chip.
      e_power: share of the chip's peak rate that all cores sustain together, at the clock that its power allows.
      e_hbm: share of the device memory's bandwidth that a kernel reaches.
      tma_row_s: seconds in which the TMA of a core delivers one row of a swizzled tile, however narrow.
      fill_row_s: seconds for which a core gets nothing else while one row beyond an array's edge is filled with zeros.
      sector_misalignment: time that a row takes longer where it starts within a sector of the last-level cache, over
        what the cache takes to deliver its bytes.
      l2_share: share of the last-level cache that holds operands until they are used again.
      p: order of the norm that joins what overlaps in a step: 1 is no overlap at all, infinity the roofline.
      step_s: one step's barriers and loop.
      wgmma_bubble_s: seconds from the end of a step's wgmma until the next one runs, where it is issued only then.
      stage_s: seconds to set up the buffers and barriers of one stage of the pipeline.
      cluster_sync_s: seconds for which CTAs of a cluster wait for each other at their start and at their end.
      dsmem_s, dsmem_bytes_per_s: an exchange between CTAs of a cluster through DSMEM: what it takes beyond its bytes,
        and the rate at which one core writes into the on-chip memory of another.
      launch_share: an empty launch, over that in `Hardware`.
      library_scale, library_e_mma, library_e_hbm, library_p: the same for the library's kernels.
      library_grain: results that each core must have for the library to reach half of its rate of arithmetic.
      library_s: seconds of a library kernel beyond its launch and its work.
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
    wgmma_bubble_s: float = 1e-7
    stage_s: float = 4e-8
    cluster_sync_s: float = 2e-7
    dsmem_s: float = 5e-7
    dsmem_bytes_per_s: float = 2.5e10
    launch_share: float = 0.55
    library_scale: float = 1.0
    library_e_mma: float = 0.845
    library_e_hbm: float = 0.88
    library_p: float = 5.0
    library_grain: float = 3500.0
    library_s: float = 2e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in SHARES and not 0 < value <= 1:
                raise ValueError(f"{name}={value} is a share of a peak: it lies in (0, 1]")
            if name in ORDERS and not value >= 1:
                raise ValueError(f"{name}={value} is the order of a norm: at least 1")
            if name in FACTORS and not value > 0:
                raise ValueError(f"{name}={value} is a factor or a rate: above 0")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} is no time or size: finite, and at least 0")


SHARES = ("e_power", "e_hbm", "l2_share", "library_e_mma", "library_e_hbm")
ORDERS = ("p", "library_p")
FACTORS = ("scale", "library_scale", "dsmem_bytes_per_s")

# By architecture; others take the defaults. In the interpreter on a CPU, nothing overlaps and a grid step costs about a
# millisecond whatever it computes.
BY_ARCHITECTURE: Mapping[str, Constants] = MappingProxyType(
    {"cpu": Constants(p=1, step_s=1e-3, stage_s=0, launch_share=1, library_grain=0, library_s=0)}
)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Predicts times on one chip.

    Attributes:
      hardware: the chip.
      constants: efficiencies and overheads; None takes those known for the architecture.
    """

    hardware: Hardware
    constants: Constants | None = None

    @functools.cached_property
    def in_force(self) -> Constants:
        """The constants that predictions take."""
        return self.constants or BY_ARCHITECTURE.get(self.hardware.architecture, Constants())

    def seconds(self, footprint: Footprint) -> Array:
        """Predicted time of the whole launch, copies included, in seconds: one entry per schedule."""
        c = self.in_force
        overlapped, serial, steps = self._analyse(footprint)
        return c.scale * ((steps * _pace(overlapped, c.p)).sum(axis=0) + sum(serial.values()))

    def terms(self, footprint: Footprint) -> dict[str, Array]:
        """Seconds of the whole launch by cause, one entry per schedule.

        Those of the first group overlap within a step, as `_pace` says. Those of the second add up.

        mma: arithmetic of the busiest core, padding and a last wave included, at the highest clock.
        wgmma_bubble: what tensor cores wait between a step's wgmma and the next one's, as far as neither another
          consumer warpgroup nor a step that was issued before keeps them busy (H200: 0.1 us, a step of 64 x 64 x 64
          takes 0.07).
        tile_bubble: what they wait for while FP32 lanes and MUFU finish accumulators. Nothing with ping-pong
          warpgroups, one in its epilogue while another multiplies.
        power: arithmetic of all cores that run, at e_power of the chip's peak rate: with all of them busy, an H200
          multiplied at 1.78 GHz, with a quarter of them at its highest clock.
        smem: what tensor cores read from on-chip memory.
        l2: what loads fill in a core, edges included, at its part of what the last-level cache delivers. A multicast
          load still fills each core that it serves.
        tma_rows: what the core's TMA issues, a row at a time: rows of 64 bytes take as long as rows of 128 (H200: one
          in 1.9 clocks), and longer where they start within a sector. A multicast load is issued in parts.
        oob_fill: rows beyond an array's edge, which are filled with zeros and stop all other loads of the
          core meanwhile (H200: tiles of 64 rows over an array of one take 1.4 times as long as tiles of 8). A
          multicast one stops every core that it serves.
        hbm: loads that miss the last-level cache, and results, at e_hbm of the device memory's bandwidth.
        mufu, fp32: exponentials and plain lane operations, at the rates of their units.
        latency: what a pipeline of `stages` cannot hide: each is loaded after the latency, computed on, and only then
          loaded again, so a step takes at least (latency + load + compute) / stages (Little's law).

        step: the loop of each step.
        pipeline_setup: of its stages.
        prologue: latency until a block's first operands are there, and the shorter of a step's load and computing, as
          the first load and the last computing overlap with nothing; of the first block alone where blocks are
          persistent or share a core.
        epilogue: storing a block's result through the last-level cache; of the last block alone likewise, with what
          lanes do to its accumulators where they hide the others'.
        copies: before or after the launch (padding, layouts), at e_hbm of the memory's bandwidth.
        cluster_sync: CTAs of a cluster that wait for each other, at their start and at their end.
        dsmem: what such CTAs write into each other's on-chip memory, and wait for (H200: half a microsecond, and 25
          bytes a nanosecond).
        launch: empty launches.
        """
        overlapped, serial, steps = self._analyse(footprint)
        launch = {name: (steps * seconds).sum(axis=0) for name, seconds in overlapped.items()} | serial
        return {name: self.in_force.scale * seconds for name, seconds in launch.items()}

    def floor(self, footprint: Footprint) -> Array:
        """Seconds below which these schedules cannot come, whatever the constants; 0 where figures are borrowed.

        The largest of three: the padded arithmetic of the busiest core at the highest clock; what all cores load, at
        the bandwidth of the last-level cache (one that loads beside few others gets more than its share of that);
        every byte moved once (bytes that fit into that cache may be there already, and count at its bandwidth).
        """
        f, h = footprint, self.hardware
        arithmetic = np.ceil(block_count(f) / h.cores) * f.steps * f.flops * h.cores / (h.boost * h.peak(f.arithmetic))
        moves = traffic(f, h, l2_share=1.0)
        loads, moved = moves.cache_bytes / h.l2_bytes_per_s, moves.compulsory_bytes
        memory = moved / np.where(moved < h.l2_bytes, h.l2_bytes_per_s, h.hbm_bytes_per_s)
        return np.maximum(np.maximum(arithmetic, loads), memory) * (not h.borrowed)

    def lower_bound(self, problem: Problem) -> float:
        """``max(flops / peak, bytes / bandwidth)`` in seconds: the roofline, whatever computes it."""
        h = self.hardware
        return max(problem.flops / h.peak(problem.arithmetic), problem.bytes_moved / h.hbm_bytes_per_s)

    def library_seconds(self, problem: Problem) -> float:
        """What XLA is expected to take, in seconds: its shares of both roofs, joined by a norm, and what is fixed.

        A small result cannot keep all cores busy: arithmetic then runs at a share of the rate.
        """
        h, c = self.hardware, self.in_force
        results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
        busy = results / (results + c.library_grain * h.cores) if results else 1.0
        arithmetic = problem.flops / (busy * c.library_e_mma * h.peak(problem.arithmetic))
        memory = problem.bytes_moved / (c.library_e_hbm * h.hbm_bytes_per_s)
        overlapped = float(_norm(np.array([arithmetic, memory]), c.library_p))
        return c.library_scale * (overlapped + h.launch_s + c.library_s)

    def _analyse(self, footprint: Footprint) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """What overlaps in a step [full waves or the last, schedule], what adds up [schedule], and the steps of each.

        The first two in seconds; `terms` says what each name means.
        """
        f, h, c = footprint, self.hardware, self.in_force
        blocks, steps, at_once = block_count(f), column(f.steps), concurrent(f, h)
        full = np.floor(blocks / at_once)
        running = np.stack([at_once, blocks - full * at_once])
        waves = np.stack([full, np.ceil(blocks / at_once) - full])
        count, per_core = waves.sum(axis=0), np.ceil(running / h.cores)
        zero = np.zeros_like(count)

        moved = traffic(f, h, l2_share=c.l2_share)
        peak, core_rate, hbm_rate = h.peak(f.arithmetic), h.l2_bytes_per_s / h.cores, c.e_hbm * h.hbm_bytes_per_s
        beyond_edges = sum(column(o.outside_rows) * o.multicast for o in f.operands)
        overlapped = {
            "mma": per_core * f.flops * h.cores / (h.boost * peak),
            "power": running * f.flops / (c.e_power * peak),
            "smem": per_core * column(f.onchip_bytes_read) / (h.onchip_bytes_per_clock * h.clock_hz),
            "l2": per_core * sum(_filled(o) for o in f.operands) / core_rate,
            "tma_rows": per_core * sum(_tma_s(o, h, c) / o.multicast for o in f.operands),
            "oob_fill": per_core * beyond_edges * c.fill_row_s,
            "hbm": running * (moved.memory_bytes + blocks * f.bytes_written) / (blocks * steps) / hbm_rate,
        }
        lanes = {
            "mufu": per_core * f.special_ops / (h.special_per_clock * h.clock_hz),
            "fp32": per_core * f.vector_ops / (h.lanes_per_core * h.clock_hz),
        }
        units = np.maximum(np.maximum(overlapped["mma"], overlapped["power"]), overlapped["smem"])
        overlapped["wgmma_bubble"] = _wgmma_bubble(f, per_core, units, c.wgmma_bubble_s)
        load = np.maximum(np.maximum(overlapped["l2"], overlapped["tma_rows"]), overlapped["hbm"])
        load = load + overlapped["oob_fill"]
        compute = units + overlapped["wgmma_bubble"] + sum(lanes.values())
        latency_s = np.where(moved.l2_resident, h.l2_latency_s, h.memory_latency_s)
        overlapped["latency"] = (latency_s + (load + compute) / np.maximum(per_core, 1)) / f.stages
        shown, last_lanes_s = _lanes(f, lanes, count)
        overlapped |= shown

        surrounded = column(f.persistent).astype(bool) | (resident(f, h) > 1)
        alone = np.where(surrounded, 1.0, count)
        shorter = (np.minimum(load, compute) / np.maximum(per_core, 1)).max(axis=0)
        serial = {
            "step": c.step_s * steps * count,
            "pipeline_setup": c.stage_s * f.stages + zero,
            "prologue": (latency_s + shorter) * alone,
            "epilogue": per_core.max(axis=0) * f.bytes_written / core_rate * alone + last_lanes_s,
            "copies": f.copied_bytes / hbm_rate + zero,
            "cluster_sync": c.cluster_sync_s * (column(f.cluster) > 1) + zero,
            "dsmem": c.dsmem_s * (column(f.exchanged_bytes) > 0) + f.exchanged_bytes / c.dsmem_bytes_per_s + zero,
            "launch": c.launch_share * h.launch_s * column(f.launches) + zero,
        }
        return overlapped, serial, waves * steps


def arithmetic_intensity(footprint: Footprint) -> Array:
    """FLOP of one step over the bytes it loads, FLOP/B; for a matmul tile independent of tile_k.

    ``2 tile_m tile_n / (itemsize (tile_m + tile_n))``: 0.5 for a naive bfloat16 dot product, 64 for tiles of 128 x 128.
    """
    loads = sum(column(o.bytes) for o in footprint.operands)
    return footprint.flops / np.maximum(loads, 1)


def _filled(operand: Operand) -> Array:
    """On-chip bytes that a block fills with this operand in one step."""
    return np.where(np.asarray(operand.filled_bytes) > 0, operand.filled_bytes, operand.bytes)


def _lanes(footprint: Footprint, lanes: Mapping[str, Array], count: Array) -> tuple[dict[str, Array], Array]:
    """`lanes` as they show in a step, "tile_bubble" included, and their seconds on the last block's accumulators.

    Where tensor cores multiply, these wait while lanes finish a block's accumulators; or, with ping-pong warpgroups,
    they go on with the next of `count` blocks, and only the last one's shows.
    """
    accumulates, ping_pong = column(footprint.multipliers) > 0, column(footprint.alternating).astype(bool)
    finishing = np.where(accumulates, sum(lanes.values()), 0.0)
    beside = np.where(accumulates, np.where(ping_pong, 1 - 1 / count, 0.0), 1.0)
    shown = {name: beside * seconds for name, seconds in lanes.items()}
    shown["tile_bubble"] = np.where(ping_pong, 0.0, finishing)
    return shown, np.where(ping_pong, finishing.max(axis=0) * footprint.steps, 0.0)


def _wgmma_bubble(footprint: Footprint, per_core: Array, units: Array, bubble_s: float) -> Array:
    """Seconds that a core's tensor cores wait in a step beyond the seconds in which they and their reads are busy.

    A consumer warpgroup multiplies its part, waits `bubble_s`, and goes on; one that issues a step ahead does so for
    two steps at a time. The units are busy as long as the others' parts last.
    """
    groups = per_core * footprint.multipliers
    cycle = (units / np.maximum(groups, 1) + bubble_s) / (1 + column(footprint.ahead))
    return np.where(groups > 0, np.maximum(cycle - units, 0.0), 0.0)


def _tma_s(operand: Operand, hardware: Hardware, constants: Constants) -> Array:
    """Seconds in which a core's TMA issues what a block fills with this operand in one step."""
    width, start = column(operand.copy_bytes), column(operand.start_bytes)
    filled = _filled(operand)
    rows = np.where(width > 0, filled / np.maximum(width, 1), 0.0)
    misaligned = np.where((start > 0) & (start < hardware.sector_bytes), filled, 0.0)
    core_rate = hardware.l2_bytes_per_s / hardware.cores
    return rows * constants.tma_row_s + misaligned * constants.sector_misalignment / core_rate


def _pace(parts: Mapping[str, Array], p: float) -> Array:
    """Seconds of a step whose parts overlap.

    A core's units and its loads show beside each other: the norm of order `p`. Beside what waits for device memory, its
    bandwidth or its latency, they hardly show, as the norm of three times that order has it: products of few rows come
    to 95 % of an H200's bandwidth with most tiles, and one stage more than the pipeline needs gains nothing.
    """
    units = np.maximum(np.maximum(parts["mma"] + parts["tile_bubble"], parts["power"]), parts["smem"])
    units = units + parts["wgmma_bubble"]
    loads = np.maximum(parts["l2"], parts["tma_rows"]) + parts["oob_fill"]
    core = _norm(np.stack([units, parts["mufu"], parts["fp32"], loads]), p)
    return _norm(np.stack([core, parts["latency"], parts["hbm"] + parts["oob_fill"]]), 3 * p)


def _norm(parts: Array, p: float) -> Array:
    """The p-norm over the first axis; scaled, so that no power of seconds underflows."""
    largest = parts.max(axis=0)
    return largest * ((parts / np.maximum(largest, 1e-30)) ** p).sum(axis=0) ** (1 / p)
