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
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.hardware import Hardware
from scheduler.model.overheads import BY_ARCHITECTURE, Constants
from scheduler.model.traffic import block_count, column, concurrent, resident, traffic
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import Problem

Array = npt.NDArray[np.float64]


# What XLA writes between its kernels, it writes and reads a few times over: from so many times the cache on, memory
# sees all of it.
PASSES_BETWEEN = 8.0


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a whole launch by cause, one entry per schedule; `CostModel.terms` says what each name means.

    Attributes:
      overlapped: what is at work at once in each step.
      serial: what comes before, after and between.
      steps_s: what all steps take, as far as `overlapped` overlaps: with all of `serial`, the prediction.
    """

    overlapped: Mapping[str, Array]
    serial: Mapping[str, Array]
    steps_s: Array


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
        parts = self.breakdown(footprint)
        return parts.steps_s + sum(parts.serial.values())

    def terms(self, footprint: Footprint) -> dict[str, Array]:
        """Seconds of the whole launch by cause, one entry per schedule.

        Those of the first group overlap within a step, as `_pace` says. Those of the second add up.

        mma: arithmetic of the busiest core, padding and a last wave included, at the highest clock.
        wgmma_bubble: what tensor cores wait between a step's wgmma and the next one's, as far as neither another
          consumer warpgroup nor a step that was issued before keeps them busy (H200: 0.1 us, a step of 64 x 64 x 64
          takes 0.07).
        step_bubble, tile_bubble: what they wait for while FP32 lanes and MUFU work on what a step, or a whole tile,
          multiplied. Nothing with ping-pong warpgroups, one in its softmax or epilogue while another multiplies.
        tile_end: what they wait for while consumers round, store and zero accumulators between two tiles of a core, but
          where another consumer multiplies meanwhile, in ping-pong (H200: 1 us of a tile of 128 x 256).
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
        mufu, fp32: exponentials and plain lane operations, at the rates of their units; the latter with what each
          iteration of a loop waits for its own instructions.
        latency: what a pipeline of `stages` cannot hide: each is loaded after the latency, computed on, and only then
          loaded again, so a step takes at least (latency + load + compute) / stages (Little's law). Where the loop that
          computes also starts the loads, one stage is always that of the step at work: (latency + load) / (stages - 1).

        step: the loop of each step.
        pipeline_setup: of its stages.
        prologue: latency until a block's first operands are there, and the shorter of a step's load and computing, as
          the first load and the last computing overlap with nothing; of the first block alone where blocks are
          persistent or share a core.
        epilogue: storing a block's result through the last-level cache; of the last block alone likewise, with what
          lanes do after the last MMA where they hide behind it before.
        copies: before or after the launch (padding, layouts), at e_hbm of the memory's bandwidth.
        cluster_sync: CTAs of a cluster that wait for each other, at their start and at their end.
        dsmem: what such CTAs write into each other's on-chip memory, and wait for (H200: half a microsecond, and 25
          bytes a nanosecond).
        tail_reduction: what cores leave of the tiles of a last wave that is split, and one of them reads of the others,
          at its part of what the last-level cache delivers, and what they wait for each other.
        launch: empty launches, and the memory's latency in each after the first, which nothing was loaded ahead for.
        """
        parts = self.breakdown(footprint)
        return {**parts.overlapped, **parts.serial}

    def breakdown(self, footprint: Footprint) -> Breakdown:
        """The same by what overlaps and what adds up, with what the steps come to."""
        c = self.in_force
        overlapped, serial, steps = self._analyse(footprint)
        return Breakdown(
            overlapped={name: c.scale * (steps * seconds).sum(axis=0) for name, seconds in overlapped.items()},
            serial={name: c.scale * seconds for name, seconds in serial.items()},
            steps_s=c.scale * (steps * _pace(overlapped, c.p)).sum(axis=0),
        )

    def floor(self, footprint: Footprint) -> Array:
        """Seconds below which these schedules cannot come, whatever the constants; 0 where figures are borrowed.

        The largest of three: the padded arithmetic of the busiest core at the highest clock; what all cores load, at
        the bandwidth of the last-level cache (one that loads beside few others gets more than its share of that);
        every byte moved once (bytes that fit into that cache may be there already, and count at its bandwidth).
        """
        f, h = footprint, self.hardware
        each = block_count(f) / h.cores
        # Of tiles that differ, a core has the mean number of steps or more, and so has the one with the longest tile.
        least = np.floor(each) + np.ceil(each % 1) / f.tail_parts
        flops = np.maximum(least * _tile_flops(f, f.shortest), each * _tile_flops(f, f.steps))
        flops = np.maximum(flops, _tile_flops(f, f.longest))
        arithmetic = flops * h.cores / (h.boost * h.peak(f.arithmetic))
        moves = traffic(f, h, l2_share=1.0)
        loads, moved = moves.cache_bytes / h.l2_bytes_per_s, moves.compulsory_bytes
        memory = moved / np.where(moved < h.l2_bytes, h.l2_bytes_per_s, h.hbm_bytes_per_s)
        return np.maximum(np.maximum(arithmetic, loads), memory) * (not h.borrowed)

    def lower_bound(self, problem: Problem) -> float:
        """``max(flops / peak, bytes / bandwidth)`` in seconds: the roofline, whatever computes it."""
        h = self.hardware
        return max(problem.flops / h.peak(problem.arithmetic), problem.bytes_moved / h.hbm_bytes_per_s)

    def library_floor(self, problem: Problem) -> float:
        """Seconds below which XLA cannot come for what it writes between its kernels; 0 where a cache may hold that."""
        between = problem.library_bytes_moved - problem.bytes_moved
        if self.hardware.borrowed or between <= PASSES_BETWEEN * self.hardware.l2_bytes:
            return 0.0
        return problem.library_bytes_moved / self.hardware.hbm_bytes_per_s

    def library_seconds(self, problem: Problem) -> float:
        """What XLA is expected to take, in seconds: its shares of both roofs, joined by a norm, and what is fixed.

        A small result cannot keep all cores busy: arithmetic then runs at a share of the rate. What one kernel writes
        for another to read overlaps with neither: XLA's kernels follow each other.
        """
        h, c = self.hardware, self.in_force
        results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
        busy = results / (results + c.library_grain * h.cores) if results else 1.0
        arithmetic = problem.flops / (busy * c.library_e_mma * h.peak(problem.arithmetic))
        hbm_rate = c.library_e_hbm * h.hbm_bytes_per_s
        overlapped = float(_norm(np.array([arithmetic, problem.bytes_moved / hbm_rate]), c.library_p))
        between = (problem.library_bytes_moved - problem.bytes_moved) / hbm_rate
        following = between + c.launch_share * h.launch_s if between else 0.0
        return c.library_scale * (overlapped + following + c.library_s)

    def library_spread(self, problem: Problem) -> float:
        """How far, in log time, XLA may be off that for what it moves or does not (`Problem.library_bytes_unsure`)."""
        unsure_s = problem.library_bytes_unsure / (self.in_force.library_e_hbm * self.hardware.hbm_bytes_per_s)
        return math.log1p(unsure_s / self.library_seconds(problem)) if unsure_s else 0.0

    def _analyse(self, footprint: Footprint) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """What overlaps in a step [full waves or the last, schedule], what adds up [schedule], and the steps of each.

        The first two in seconds; `terms` says what each name means.
        """
        f, h, c, demand = footprint, self.hardware, self.in_force, footprint.mean_step
        blocks, steps, at_once = block_count(f), column(f.steps), concurrent(f, h)
        full, parts = np.floor(blocks / at_once), column(f.tail_parts)
        running = np.stack([np.where(full > 0, at_once, 0), (blocks - full * at_once) * parts])
        waves = np.stack([full, (np.ceil(blocks / at_once) - full) / parts])
        count, per_core = waves.sum(axis=0), np.ceil(running / h.cores)
        # Cores that take one tile after another do a mean number of steps in each; what the longest has more is last.
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

        surrounded = h.sequential_grid | column(f.persistent).astype(bool) | (resident(f, h) > 1)
        alone = np.where(surrounded, 1.0, count)
        # The first step loads all that it needs, whatever later ones find there.
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
            "dsmem": c.dsmem_s * (column(f.dsmem_bytes) > 0) + f.dsmem_bytes / c.dsmem_bytes_per_s + zero,
            "tail_reduction": np.where(parts > 1, c.tail_reduction_s + parts * f.tail_bytes / core_rate, 0.0) + zero,
            "launch": c.launch_share * h.launch_s * launches + h.memory_latency_s * (launches - 1) + zero,
        }
        return overlapped, serial, paced


def arithmetic_intensity(footprint: Footprint) -> Array:
    """FLOP of one step over the bytes it loads, FLOP/B; for a matmul tile independent of tile_k.

    ``2 tile_m tile_n / (itemsize (tile_m + tile_n))``: 0.5 for a naive bfloat16 dot product, 64 for tiles of 128 x 128.
    """
    demand = footprint.mean_step
    loads = sum(column(o.bytes) for o in demand.loads)
    return demand.flops / np.maximum(loads, 1)


def _tile_flops(footprint: Footprint, steps: npt.ArrayLike) -> Array:
    """Floating-point operations of MMA of a tile of so many steps."""
    return column(steps) * footprint.step.flops + footprint.tile.flops


def _filled(operand: Operand) -> Array:
    """On-chip bytes that a block fills with this operand in one step."""
    return np.where(np.asarray(operand.filled_bytes) > 0, operand.filled_bytes, operand.bytes)


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """What FP32 lanes and MUFU of a core do, in seconds.

    Attributes:
      busy_s: in which they work, a step.
      shown: those that show in a step: beside MMA by unit, and as the bubbles in which MMA waits for them.
      last_s: of the whole launch, after MMA that nothing follows.
    """

    busy_s: Array
    shown: Mapping[str, Array]
    last_s: Array


def _lanes(footprint: Footprint, hardware: Hardware, constants: Constants, per_core: Array, count: Array) -> _Lanes:
    """Lanes and MUFU as they show, of `count` tiles that follow each other on a core.

    Where there is MMA, it waits for them unless another block of the core has MMA to issue, or they take turns with it:
    consumers with each other, or in a step one consumer that has issued the next. Of those that take turns the last
    shows: of the launch, or of each tile where no other consumer has the next one.
    """
    f = footprint
    steps, shared = column(f.steps), resident(f, hardware) > 1
    # FP32 lanes compute float32 themselves.
    multiplies = (column(f.mean_step.flops) > 0) & (f.arithmetic != "float32")
    ping_pong = column(f.ping_pong).astype(bool)
    runs = np.where(ping_pong & column(f.persistent).astype(bool), 1.0, count)
    # Of each phase: its lanes in one step, whether they take turns with MMA, and how many of it a launch has.
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
    """Seconds of a core's MUFU and of its FP32 lanes for so many of this phase."""
    h = hardware
    return {
        "mufu": per_core * phase.mufu_ops / (h.special_per_clock * h.clock_hz),
        "fp32": per_core * phase.fp32_ops / (h.lanes_per_core * h.clock_hz)
        + per_core * phase.iterations * constants.iteration_s,
    }


def _wgmma_bubble(footprint: Footprint, per_core: Array, units: Array, bubble_s: float) -> Array:
    """Seconds that a core's tensor cores wait in a step beyond the seconds in which they and their reads are busy.

    A consumer warpgroup multiplies its part, waits `bubble_s`, and goes on; one that issues a step ahead does so for
    two steps at a time. The units are busy as long as the others' parts last.
    """
    groups = per_core * footprint.consumers
    cycle = (units / np.maximum(groups, 1) + bubble_s) / (1 + column(footprint.delay_release))
    return np.where(groups > 0, np.maximum(cycle - units, 0.0), 0.0)


def _kept_s(loads: Sequence[Operand], fetched: Sequence[Array], core_rate: float) -> Any:
    """Seconds of loads that a mean step of a core is spared: blocks that are on chip from the step before."""
    return sum((1 - share) * _filled(o) for share, o in zip(fetched, loads, strict=True)) / core_rate


def _latency(latency_s: Any, load: Array, compute: Array, per_core: Array, stages: Any, *, in_order: bool) -> Array:
    """Seconds of a step below which no pipeline of so many stages comes; in order where it starts its own loads."""
    each = np.maximum(per_core, 1)
    if in_order:
        ahead = np.maximum(column(stages) - 1, 1)
        return (latency_s + load / each + np.where(column(stages) > 1, 0.0, compute / each)) / ahead
    return (latency_s + (load + compute) / each) / stages


def _tma_s(operand: Operand, hardware: Hardware, constants: Constants) -> Array:
    """Seconds in which a core's TMA issues what a block fills with this operand in one step."""
    width, start = column(operand.tma_row_bytes), column(operand.start_bytes)
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
    mma = parts["mma"] + parts["step_bubble"] + parts["tile_bubble"]
    units = np.maximum(np.maximum(mma, parts["power"]), parts["smem"]) + parts["wgmma_bubble"] + parts["tile_end"]
    loads = np.maximum(parts["l2"], parts["tma_rows"]) + parts["oob_fill"]
    core = _norm(np.stack([units, parts["mufu"], parts["fp32"], loads]), p)
    return _norm(np.stack([core, parts["latency"], parts["hbm"] + parts["oob_fill"]]), 3 * p)


def _norm(parts: Array, p: float) -> Array:
    """The p-norm over the first axis; scaled, so that no power of seconds underflows."""
    largest = parts.max(axis=0)
    return largest * ((parts / np.maximum(largest, 1e-30)) ** p).sum(axis=0) ** (1 / p)
