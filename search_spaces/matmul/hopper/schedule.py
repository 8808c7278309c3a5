"""The schedule of a matmul on Hopper: its fields, and the mirrored problem and schedule."""

from __future__ import annotations

import dataclasses

from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """Maps a matmul to CTAs, warpgroups and pipeline steps.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes at a time.
      tile_k: extent of k that one pipeline stage holds.
      stages: number of pipeline stages. Loads run this many steps ahead, and continue into the next tile.
      consumers: the consumer warpgroups: "one"; two that are "cooperative_m" or "cooperative_n" and halve each tile
        along that axis; or two that take whole tiles in turn, so that the epilogue of one overlaps the main loop of the
        other. With "ordered_ping_pong" one consumer issues all wgmmas of its tile before the other begins (CUTLASS's
        ping-pong, by its OrderedSequenceBarrier). With "ping_pong" both issue wgmmas as stages arrive.
      cluster: how two CTAs pair up, or "none". Along "m" or "n" they compute adjacent tiles, and each multicasts half
        of the operand that both need. With "split_k" they share a tile, and each accumulates half of k. After the
        reduction through DSMEM, each finishes half of wgmma's columns.
      grid_minor_dim: the axis, "m" or "n", along which consecutive tiles are adjacent (grouped, planar-snake
        rasterization).
      grid_tile_width: width of a group of the rasterization, in tiles (in clusters, if clusters lie along that axis).
      epi_tile_n: columns of an epilogue subtile. A subtile has 64 rows, or, with `swap_ab`, all rows of the warpgroup.
      swap_ab: the tile is computed as ``c^T = b^T a^T``: n takes the 64 rows that wgmma multiplies at a time, and m its
        columns, which come in multiples of 8. A small m is then not padded to 64, and most of the pipeline holds `b`. A
        large m can use tile sizes that give whole waves, or that fit one ordered consumer.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them,
        always in the same order.
      delay_release: number of steps (0 or 1) whose wgmmas may still run when the next step's start: their stages are
        released one step later.
      tail_split_k: parts of k of the tiles of the last wave, which different CTAs accumulate to shorten the wave
        (tile_scheduler.py). They leave their accumulators in device memory for the CTA that has the last part.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    consumers: str
    cluster: str
    grid_minor_dim: str
    grid_tile_width: int
    epi_tile_n: int
    swap_ab: bool = False
    split_k: int = 1
    delay_release: int = 0
    tail_split_k: int = 1


# Consumers that take whole tiles in turn.
PING_PONG = ("ordered_ping_pong", "ping_pong")

_OTHER = {"m": "n", "n": "m", "cooperative_m": "cooperative_n", "cooperative_n": "cooperative_m"}


def mirrored(p: MatmulProblem, s: HopperSchedule) -> tuple[MatmulProblem, HopperSchedule]:
    """Mirrors a matmul and its schedule as ``c^T = b^T a^T``: m and n, and `a` and `b`, are swapped.

    Several results become one.
    """
    return (
        dataclasses.replace(p.joined, m=p.n, n=p.m, transpose_a=not p.transpose_b, transpose_b=not p.transpose_a),
        dataclasses.replace(
            s,
            tile_m=s.tile_n,
            tile_n=s.tile_m,
            consumers=_OTHER.get(s.consumers, s.consumers),
            cluster=_OTHER.get(s.cluster, s.cluster),
            grid_minor_dim=_OTHER[s.grid_minor_dim],
        ),
    )
