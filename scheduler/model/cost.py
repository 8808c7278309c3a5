"""Predict how long a launch takes, from what it demands (`Footprint`) and what a chip supplies (`Hardware`).

The model is analytic: the blocks of a launch run in waves over the cores; in each step of a wave the arithmetic units
and the copies into the cores work at once, and the slowest of them sets the pace (a p-norm lets the others show), or
device memory does where it is slower still. It need not be exact: it ranks schedules, and measuring chooses among the
best ranked. Its few constants are fitted to recorded trials (`calibration.py`).

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
from search_spaces.kernel import Footprint, Operand, Problem

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What no data sheet tells: the shares of the peaks that kernels reach, and overheads.

    The defaults are round numbers from which `calibration.py` starts; they rank, but their times are rough. Those of
    the library were fitted to XLA's times of 21 matmuls on one H200; e_hbm is what matmuls of few rows reach there.

    Attributes:
      e_mma: reachable share of the peak rate of arithmetic, of one core at the highest clock.
      e_power: share of the chip's peak rate that all cores sustain together, at the clock that its power allows.
      e_sram, e_l2, e_hbm: the same for on-chip memory, for what the last-level cache delivers to a core, and for device
        memory.
      row_s: seconds in which a core's copy unit delivers one row, however narrow.
      quiet: time that a core's loads take where no other core loads, over that where all cores do.
      outside_s: seconds for which a core gets nothing else while one row beyond an array's edge is filled in.
      gap_bytes: bytes that device memory could deliver in the time lost between two rows, and between two copies.
      loaded, launched: latency of a load among many, and an empty launch, over those in `Hardware`.
      cluster_s: seconds for which blocks of a cluster wait for each other at their start and at their end.
      exchange_s: seconds of an exchange between blocks of a cluster, beyond its bytes.
      exchange_bytes_per_s: at which one core writes into the on-chip memory of another.
      askew: time by which a row that starts within a sector of the cache takes longer, over what the cache takes to
        deliver its bytes.
      alpha: share of the last-level cache that holds operands until they are used again.
      exposed: share of a block's set-up and end that its core's units wait for although other blocks surround it.
      p: order of the norm that joins what overlaps in a step: 1 is no overlap at all, infinity the roofline.
      step_s: one step's barriers and loop, in seconds.
      gap_s: seconds from the end of a step's product until the next one runs, where it is started only then.
      slot_s: seconds to set up one slot of a ring of buffers.
      tile_s: one output block's set-up and drain, in seconds.
      library_e_mma, library_e_hbm, library_p: the same for the library's kernels.
      library_grain: results that each core must have for the library to reach half of that rate of arithmetic.
      library_s: seconds of a library kernel beyond its launch and its work.
    """

    e_mma: float = 0.95
    e_power: float = 0.9
    e_sram: float = 0.95
    e_l2: float = 0.95
    e_hbm: float = 0.94
    row_s: float = 1e-9
    quiet: float = 0.5
    outside_s: float = 9e-10
    gap_bytes: float = 2.0
    loaded: float = 1.0
    launched: float = 0.75
    cluster_s: float = 2e-7
    exchange_s: float = 5e-7
    exchange_bytes_per_s: float = 2.5e10
    askew: float = 1.0
    alpha: float = 0.56
    exposed: float = 0.5
    p: float = 4.0
    step_s: float = 1e-8
    gap_s: float = 1e-7
    slot_s: float = 4e-8
    tile_s: float = 5e-7
    library_e_mma: float = 0.845
    library_e_hbm: float = 0.88
    library_p: float = 5.0
    library_grain: float = 3500.0
    library_s: float = 2e-6

    def __post_init__(self) -> None:
        for name in SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share of a peak: it lies in (0, 1]")
        for name in ORDERS:
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} is the order of a norm: at least 1")
        if not self.exchange_bytes_per_s > 0:
            raise ValueError(f"exchange_bytes_per_s={self.exchange_bytes_per_s} is a rate: above 0")
        for field in dataclasses.fields(self):
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name}={getattr(self, field.name)} is no time or size: finite, and at least 0")


SHARES = ("e_mma", "e_power", "e_sram", "e_l2", "e_hbm", "quiet", "alpha", "exposed", "library_e_mma", "library_e_hbm")
ORDERS = ("p", "library_p")

# Operands of at most this share of the last-level cache, together, are met in it: whoever made them has just written
# them, and a bench does not rotate through so many copies that it would lose them.
MET_IN_CACHE = 1 / 32

# By architecture; others take the defaults. In the interpreter on a CPU, nothing overlaps and a grid step costs about a
# millisecond whatever it computes.
FITTED: Mapping[str, Constants] = MappingProxyType(
    {"cpu": Constants(p=1, step_s=1e-3, slot_s=0, tile_s=0, launched=1, library_grain=0, library_s=0)}
)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Predicts times on one chip.

    Attributes:
      hardware: the chip.
      constants: fitted efficiencies and overheads; None takes those known for the architecture.
    """

    hardware: Hardware
    constants: Constants | None = None

    @functools.cached_property
    def fitted(self) -> Constants:
        """The constants in force."""
        return self.constants or FITTED.get(self.hardware.architecture, Constants())

    def seconds(self, footprint: Footprint) -> Array:
        """Predicted time of the whole launch, copies included, in seconds: one entry per schedule."""
        overlapped, serial, steps = self._analyse(footprint)
        return (steps * _pace(overlapped, self.fitted.p)).sum(axis=0) + sum(serial.values())

    def terms(self, footprint: Footprint) -> dict[str, Array]:
        """Seconds of the whole launch by cause, one entry per schedule.

        Those of the first group overlap within a step, as `_pace` says. Those of the second add up.

        mma: arithmetic of the busiest core, padding and a last wave included, at e_mma of a core's peak rate.
        gap: what the same units wait between a step's products and the next one's, as far as neither another group of
          threads nor a step that was started before keeps them busy (H200: 0.1 us, a step of 64 x 64 x 64 takes 0.07).
        turns: what the same units wait for between two blocks, set-up, drain and storing, where loads go on meanwhile:
          blocks are persistent or share a core; and what lanes and exponentials take to finish sums. Nothing where
          groups of threads take blocks in turns, one finishing its own while another multiplies.
        power: arithmetic of all cores that run, at e_power of the chip's peak rate: with all of them busy, an H200
          multiplied at 1.78 GHz, with a quarter of them at its highest clock.
        sram: what the arithmetic units read from on-chip memory, at e_sram of its bandwidth.
        l2: what loads fill in a core, edges included, at e_l2 of what the last-level cache delivers to it. A load that
          a multicast shares still fills each core that it serves.
        rows: what the core's copy unit issues, a row at a time: rows of 64 bytes take as long as rows of 128 (H200: one
          in 1.9 clocks where all cores load, in 1.6 where 96 of 132 do, and so for l2: `quiet`); `askew` longer where
          they start within a sector. A shared load is issued in parts.
        outside: rows beyond an array's edge, which are filled with zeros and stop all other loads of the core
          meanwhile (H200: tiles of 64 rows over an array of one take 1.4 times as long as tiles of 8). One that is
          shared stops every core that it serves.
        hbm: loads that miss that cache, and results, at e_hbm of the device memory's bandwidth, and gap_bytes for each
          row and each copy.
        special, vector: exponentials and plain lane operations, at the rates of their units.
        latency: what a ring of `stages` buffers cannot hide: each is loaded after the latency, computed on, and only
          then loaded again, so a step takes at least (latency + load + compute) / stages (Little's law). The first load
          of each buffer waits for no other.

        step: the loop of each step.
        ring: setting up its buffers.
        prologue: latency until a block's first operands are there, and the shorter of a step's load and computing, as
          the first load and the last computing overlap with nothing; of the first block alone where `turns` says how
          the others follow each other.
        epilogue: storing a block's result through the last-level cache; of the last block alone likewise, with what
          lanes do to its sums where they hide the others'.
        tile: set-up and drain of a block; likewise.
        copies: before or after the launch (padding, layouts), at e_hbm of the memory's bandwidth.
        cluster: blocks of a cluster that wait for each other, at their start and at their end.
        exchange: what such blocks write into each other's on-chip memory, and wait for (H200: half a
          microsecond, and 25 bytes a nanosecond).
        launch: empty launches.
        """
        overlapped, serial, steps = self._analyse(footprint)
        return {name: (steps * seconds).sum(axis=0) for name, seconds in overlapped.items()} | serial

    def floor(self, footprint: Footprint) -> Array:
        """Seconds below which these schedules cannot come, whatever the constants; 0 where figures are borrowed.

        The largest of three: the padded arithmetic of the busiest core at the highest clock; what all cores load, at
        the bandwidth of the last-level cache (one that loads beside few others gets more than its share of that);
        every byte moved once (bytes that fit into that cache may be there already, and count at its bandwidth).
        """
        f, h = footprint, self.hardware
        arithmetic = np.ceil(_blocks(f) / h.cores) * f.steps * f.flops * h.cores / (h.boost * h.peak(f.arithmetic))
        moves = traffic(f, h, alpha=1.0)
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
        h, c = self.hardware, self.fitted
        results = float(sum(np.prod(s.shape, dtype=np.float64) for s in problem.results()))
        busy = results / (results + c.library_grain * h.cores) if results else 1.0
        arithmetic = problem.flops / (busy * c.library_e_mma * h.peak(problem.arithmetic))
        memory = problem.bytes_moved / (c.library_e_hbm * h.hbm_bytes_per_s)
        overlapped = float(_norm(np.array([arithmetic, memory]), c.library_p))
        return overlapped + h.launch_s + c.library_s

    def _analyse(self, footprint: Footprint) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """What overlaps in a step [kind of step, schedule], what adds up [schedule], and steps of each kind.

        Kinds: those of full waves and of the last one, the first loads of all slots, and then the later ones. The first
        two in seconds; `terms` says what each name means.
        """
        f, h, c = footprint, self.hardware, self.fitted
        blocks, steps, slots = _blocks(f), _array(f.steps), concurrent(f, h)
        full = np.floor(blocks / slots)
        running = np.stack([slots, blocks - full * slots])
        waves = np.stack([full, np.ceil(blocks / slots) - full])
        per_core = np.ceil(running / h.cores)

        moved = traffic(f, h, alpha=c.alpha)
        slowed_bytes = moved.memory_bytes + c.gap_bytes * moved.memory_rows + blocks * f.bytes_written
        latency_s = moved.hit_rate * h.l2_latency_s + (1 - moved.hit_rate) * h.memory_latency_s
        peak, core_rate = h.peak(f.arithmetic), c.e_l2 * h.l2_bytes_per_s / h.cores
        crowd = c.quiet + (1 - c.quiet) * np.minimum(running / h.cores, 1)
        askew = [_askew(o, h.sector_bytes) * c.askew / core_rate for o in f.operands]
        rows = [_rows(_filled(o), o.copy_bytes) * c.row_s for o in f.operands]
        overlapped = {
            "mma": per_core * f.flops * h.cores / (c.e_mma * h.boost * peak),
            "power": running * f.flops / (c.e_power * peak),
            "sram": per_core * _array(f.onchip_bytes_read) / (c.e_sram * h.onchip_bytes_per_clock * h.clock_hz),
            "l2": crowd * per_core * sum(_filled(o) for o in f.operands) / core_rate,
            "rows": crowd
            * per_core
            * sum((r + a) / o.multicast for r, a, o in zip(rows, askew, f.operands, strict=True)),
            "outside": per_core * sum(_array(o.outside_rows) * o.multicast for o in f.operands) * c.outside_s,
            "hbm": running * slowed_bytes / (blocks * steps) / (c.e_hbm * h.hbm_bytes_per_s),
            "special": per_core * f.special_ops / (h.special_per_clock * h.clock_hz),
            "vector": per_core * f.vector_ops / (h.lanes_per_core * h.clock_hz),
        }
        units = np.stack([overlapped[name] for name in ("mma", "power", "sram")]).max(axis=0)
        overlapped["gap"] = _gap(f, per_core, units, c.gap_s)
        load = np.stack([overlapped[name] for name in ("l2", "rows", "hbm")]).max(axis=0) + overlapped["outside"]
        compute = units + overlapped["gap"] + overlapped["special"] + overlapped["vector"]
        count, busiest = waves.sum(axis=0), per_core.max(axis=0)
        surrounded = _array(f.persistent).astype(bool) | (resident(f, h) > 1)
        each = (load + compute) / np.maximum(per_core, 1)
        overlapped["latency"] = (c.loaded * latency_s + each) / f.stages
        epilogue = busiest * f.bytes_written / core_rate
        alternating = _array(f.alternating).astype(bool)
        turns = np.where(surrounded & ~alternating, c.exposed * (count - 1) * (c.tile_s + epilogue), 0.0)
        overlapped["turns"] = turns / (count * steps) * np.ones_like(running)
        overlapped, finishing = _finishing(f, overlapped, count)
        alone = np.where(surrounded, 1.0, count)
        shorter = (np.minimum(load, compute) / np.maximum(per_core, 1)).max(axis=0)
        first_s = np.where(moved.in_cache, h.l2_latency_s, h.memory_latency_s)
        exchanged = _array(f.exchanged_bytes) * np.ones_like(count)
        serial = {
            "step": c.step_s * steps * count,
            "ring": c.slot_s * f.stages * np.ones_like(count),
            "prologue": (first_s + shorter) * alone,
            "epilogue": epilogue * alone + finishing,
            "tile": c.tile_s * alone,
            "copies": f.copied_bytes / (c.e_hbm * h.hbm_bytes_per_s) * np.ones_like(count),
            "cluster": c.cluster_s * (_array(f.cluster) > 1) * np.ones_like(count),
            "exchange": c.exchange_s * (exchanged > 0) + exchanged / c.exchange_bytes_per_s,
            "launch": c.launched * h.launch_s * _array(f.launches) * np.ones_like(count),
        }
        # A slot's first load waits for nobody: the prologue has its latency.
        fresh = np.minimum(f.stages / (steps * np.where(surrounded, count, 1.0)), 1.0)
        twice = {name: np.concatenate([seconds, seconds]) for name, seconds in overlapped.items()}
        twice["latency"][: len(waves)] = 0.0
        return twice, serial, np.concatenate([waves * steps * fresh, waves * steps * (1 - fresh)])


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one launch of each schedule loads.

    Attributes:
      cache_bytes: from the last-level cache into the cores.
      memory_bytes: from device memory into that cache.
      memory_rows: the rows of device memory that these lie in, and the narrower copies that fetch them.
      window_bytes: what each window of blocks that run at the same time loads, counted once in a window.
      compulsory_bytes: every operand loaded once and every result written once, what no schedule can avoid.
      in_cache: the operands are so small that they are met there.
    """

    cache_bytes: Array
    memory_bytes: Array
    memory_rows: Array
    window_bytes: Array
    compulsory_bytes: Array
    in_cache: npt.NDArray[np.bool_]

    @property
    def hit_rate(self) -> Array:
        """Share of the loads that do not wait for device memory.

        Of the blocks of a window that load the same, the first waits for memory, and the others for what it asked for.
        """
        return np.clip(1 - self.memory_bytes / np.maximum(self.window_bytes, 1), 0, 1)


def traffic(footprint: Footprint, hardware: Hardware, alpha: float) -> Traffic:
    """Loads of the whole launch, from the windows of blocks that run at the same time.

    Blocks of one window load a common operand block at about the same time, so device memory delivers it once for each
    window; between windows it stays in the cache as far as the operands fit into the share `alpha` of it.
    """
    f = footprint
    blocks, steps = _blocks(f), _array(f.steps)
    at_once = np.minimum(concurrent(f, hardware), blocks)
    windows = blocks / at_once
    once = [all_blocks * steps * o.bytes for all_blocks, o in zip(block_loads(f, blocks), f.operands, strict=True)]
    again = [
        distinct * steps * o.bytes * windows for distinct, o in zip(block_loads(f, at_once), f.operands, strict=True)
    ]
    operands: Array = _array(sum(once))
    kept = np.minimum(1.0, alpha * hardware.l2_bytes / np.maximum(operands, 1.0))
    in_cache = operands <= MET_IN_CACHE * hardware.l2_bytes
    loaded = [
        np.where(in_cache, 0.0, kept * a + (1 - kept) * np.maximum(a, b)) for a, b in zip(once, again, strict=True)
    ]
    return Traffic(
        cache_bytes=_array(sum(blocks * steps * o.bytes / o.multicast for o in f.operands)),
        memory_bytes=_array(sum(loaded)),
        memory_rows=_array(
            sum(_rows(b, o.row_bytes) + _rows(b, o.copy_bytes) for b, o in zip(loaded, f.operands, strict=True))
        ),
        window_bytes=_array(sum(again)),
        compulsory_bytes=operands + blocks * f.bytes_written,
        in_cache=in_cache,
    )


def concurrent(footprint: Footprint, hardware: Hardware) -> Array:
    """Blocks that run at the same time on the whole chip; the cores that whole clusters leave over stay idle."""
    clusters = np.maximum(hardware.cores // _array(footprint.cluster), 1)
    return resident(footprint, hardware) * clusters * footprint.cluster


def resident(footprint: Footprint, hardware: Hardware) -> Array:
    """Blocks that share one core, by on-chip memory, registers, threads and the limit of blocks; at least 1.

    A persistent kernel starts one block for each core.
    """
    f, h = footprint, hardware
    threads = np.maximum(_array(f.threads), 1)
    registers = np.maximum(np.where(_array(f.registers_per_block) > 0, f.registers_per_block, f.registers * threads), 1)
    onchip = np.maximum(_array(f.onchip_bytes) + h.onchip_reserved_bytes, 1)
    fit = np.minimum(h.onchip_bytes_per_core // onchip, h.registers_per_core // registers)
    fit = np.minimum(np.minimum(fit, h.threads_per_core // threads), h.blocks_per_core)
    return np.where(f.persistent, 1.0, np.maximum(fit, 1.0)) * np.ones_like(_blocks(f))


def block_loads(footprint: Footprint, blocks: npt.ArrayLike) -> list[Array]:
    """Distinct blocks of each operand that the first `blocks` output blocks load in one step: one array per operand.

    Walking 9 of 9 x 9 output blocks of a matmul row by row takes 1 + 9 (90 in 9 steps), in groups of three 3 + 3 (54):
    the teaching example of grouped ordering (Triton's tutorial on matrix multiplication).
    """
    box = window(footprint, blocks)
    ones = np.ones(box.shape[1])
    return [np.minimum(np.prod([ones, *(box[axis] for axis in o.axes)], axis=0), blocks) for o in footprint.operands]


def window(footprint: Footprint, blocks: npt.ArrayLike) -> Array:
    """Extents ``[axis of the grid, schedule]`` of the box of output blocks that `blocks` consecutive ones span.

    They advance along the minor axis for `group` blocks, then along the last of the other axes through its whole
    extent, then to the next group of the minor axis; when that plane is full, along the other axes, the last first.
    """
    f = footprint
    # A scalar serves all schedules, also where no extent is anything else.
    *extents_of, left = np.broadcast_arrays(*(np.atleast_1d(_array(x)) for x in (*f.grid, blocks)))
    grid = np.stack(extents_of)
    axes, count = grid.shape
    orders = np.array([[axis, *(other for other in reversed(range(axes)) if other != axis)] for axis in range(axes)])
    order = orders[np.broadcast_to(np.asarray(f.minor), count)].T
    extents = np.take_along_axis(grid, order, axis=0)
    box = np.empty_like(extents)
    group = np.minimum(_array(f.group), extents[0])
    if axes > 1:
        box[1] = np.minimum(np.ceil(left / group), extents[1])
        group = group * np.ceil(left / (group * extents[1]))
    else:
        group = left
    box[0] = np.minimum(np.minimum(group, extents[0]), left)
    left = left / box[:2].prod(axis=0)
    for axis in range(2, axes):
        box[axis] = np.clip(np.ceil(left), 1, extents[axis])
        left = left / box[axis]
    out = np.empty_like(box)
    np.put_along_axis(out, order, box, axis=0)
    return out


def arithmetic_intensity(footprint: Footprint) -> Array:
    """FLOP of one step over the bytes it loads, FLOP/B; for a matmul tile independent of tile_k.

    ``2 tile_m tile_n / (itemsize (tile_m + tile_n))``: 0.5 for a naive bfloat16 dot product, 64 for tiles of 128 x 128.
    """
    loads = sum(_array(o.bytes) for o in footprint.operands)
    return footprint.flops / np.maximum(loads, 1)


def roofline(peak_flops_per_s: float, bytes_per_s: float, intensity: float) -> float:
    """Attainable FLOP/s at an arithmetic intensity in FLOP/B (Williams, Waterman, Patterson, CACM 2009)."""
    return min(peak_flops_per_s, intensity * bytes_per_s)


def matmul_onchip_bytes(tile_m: int, tile_n: int, tile_k: int, itemsize: int, stages: int = 1) -> int:
    """On-chip memory of a matmul tile in bytes: `stages` operand blocks, and an accumulator of the operands' type.

    The teaching estimate, 96 KiB for float32 tiles of 128 x 128 x 32; a real kernel's is in its footprint, to the byte.
    """
    return (stages * (tile_m * tile_k + tile_k * tile_n) + tile_m * tile_n) * itemsize


def attention_onchip_bytes(rows: int, columns: int, head_dim: int, itemsize: int) -> int:
    """On-chip bytes of a flash-attention tile: Q, K and V, scores, output, and each row's maximum and sum."""
    return (rows * head_dim + 2 * columns * head_dim + rows * columns + rows * head_dim + 2 * rows) * itemsize


def attention_memory_bytes(length: int, head_dim: int, itemsize: int, rows: int | None = None) -> int:
    """Memory traffic of attention on one head, bytes: scores stored and read twice each, or (`rows`) flash attention.

    Flash attention reads Q and writes the output once, and reads K and V once for each block of `rows` queries
    (Dao et al., FlashAttention, 2022).
    """
    if rows is None:
        return (4 * length * head_dim + 4 * length * length) * itemsize
    return (2 * length * head_dim + 2 * length * head_dim * -(-length // rows)) * itemsize


def _filled(operand: Operand) -> Array:
    """On-chip bytes that a block fills with this operand in one step."""
    return np.where(np.asarray(operand.filled_bytes) > 0, operand.filled_bytes, operand.bytes)


def _finishing(footprint: Footprint, overlapped: Mapping[str, Array], count: Array) -> tuple[dict[str, Array], Array]:
    """`overlapped`, with what lanes do to finished sums where it belongs, and how long they work on the last block's.

    Where matrix units multiply, these wait meanwhile, as they do in other turns between two blocks; or they go on with
    the next of `count` blocks, and only the last one's shows.
    """
    sums, alternating = _array(footprint.multipliers) > 0, _array(footprint.alternating).astype(bool)
    lanes = np.where(sums, overlapped["special"] + overlapped["vector"], 0.0)
    beside = np.where(sums, np.where(alternating, 1 - 1 / count, 0.0), 1.0)
    placed = {name: beside * overlapped[name] for name in ("special", "vector")}
    placed["turns"] = overlapped["turns"] + np.where(alternating, 0.0, lanes)
    return dict(overlapped) | placed, np.where(alternating, lanes.max(axis=0) * footprint.steps, 0.0)


def _gap(footprint: Footprint, per_core: Array, units: Array, gap_s: float) -> Array:
    """Seconds that a core's matrix units wait in a step beyond the seconds in which they and their reads are busy.

    A group of threads multiplies its part, waits `gap_s`, and goes on; one that starts a step ahead does so for two
    steps at a time. The units are busy as long as the others' parts last.
    """
    groups = per_core * footprint.multipliers
    cycle = (units / np.maximum(groups, 1) + gap_s) / (1 + _array(footprint.ahead))
    return np.where(groups > 0, np.maximum(cycle - units, 0.0), 0.0)


def _askew(operand: Operand, sector_bytes: int) -> Array:
    """On-chip bytes that a block fills with rows of this operand that start within a sector of the cache."""
    start = np.asarray(operand.start_bytes)
    return np.where((start > 0) & (start < sector_bytes), _filled(operand), 0.0)


def _rows(size_bytes: npt.ArrayLike, width_bytes: npt.ArrayLike) -> Array:
    """How many rows of this width so many bytes are; none where they are no rows (0)."""
    width = _array(width_bytes)
    return np.where(width > 0, _array(size_bytes) / np.maximum(width, 1), 0.0)


def _blocks(footprint: Footprint) -> Array:
    return np.prod(np.broadcast_arrays(*(_array(extent) for extent in footprint.grid)), axis=0)


def _array(value: npt.ArrayLike) -> Array:
    return np.asarray(value, dtype=np.float64)


def _pace(parts: Mapping[str, Array], p: float) -> Array:
    """Seconds of a step whose parts overlap.

    A core's units and its loads show beside each other: the norm of order `p`. Beside what waits for device memory, its
    bandwidth or its latency, they hardly show, as the norm of twice that order has it: products of few rows come to
    95 % of an H200's bandwidth with most tiles, and one stage more than the ring needs gains nothing.
    """
    units = np.maximum(np.maximum(parts["mma"] + parts["turns"], parts["power"]), parts["sram"]) + parts["gap"]
    loads = np.maximum(parts["l2"], parts["rows"]) + parts["outside"]
    core = _norm(np.stack([units, parts["special"], parts["vector"], loads]), p)
    return _norm(np.stack([core, parts["latency"], parts["hbm"] + parts["outside"]]), 2 * p)


def _norm(parts: Array, p: float) -> Array:
    """The p-norm over the first axis; scaled, so that no power of seconds underflows."""
    largest = parts.max(axis=0)
    return largest * ((parts / np.maximum(largest, 1e-30)) ** p).sum(axis=0) ** (1 / p)
