"""One way to compute a matrix product on Hopper: the fields of a schedule, and the same product the other way round."""

from __future__ import annotations

import dataclasses

from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """How a product is laid over CTAs and warpgroups, and over time.

    Attributes:
      tile_m, tile_n: extents of the output tile that one CTA computes at a time.
      tile_k: extent of k that one pipeline stage holds.
      stages: of the pipeline: loads run so many steps ahead, into the next tile where this one ends.
      consumers: the consumer warpgroups: "one"; two that are "cooperative_m" or "cooperative_n" and halve each tile
        along that axis; or two that take whole tiles in turn, so that the epilogue of one overlaps the main loop of the
        other. Of those in "ordered_ping_pong" one issues all products of its tile before the other begins (CUTLASS's
        ping-pong, by its OrderedSequenceBarrier); those in "ping_pong" issue theirs as stages arrive.
      cluster: how two CTAs pair up, or "none". Along "m" or "n" they have neighbouring tiles, and multicast to each
        other the operand that both need, half of it each. In "split_k" they share a tile, of which each accumulates
        half of k; when they have reduced that through DSMEM, each finishes half of the columns that wgmma has.
      grid_minor_dim: the axis along which consecutive tiles are neighbours, "m" or "n" (grouped, planar-snake
        rasterization), in groups of...
      grid_tile_width: ...so many tiles (clusters, where these lie along that axis).
      epi_tile_n: columns of an epilogue subtile; it has 64 rows, or, with `swap_ab`, all of the warpgroup's.
      swap_ab: the tile is computed as ``c^T = b^T a^T``: n takes the 64 rows that wgmma multiplies at a time, m its
        columns, which come in eights. Few rows of `a` are then not padded to 64, and most of the pipeline holds `b`;
        many fall into tiles that quantize into whole waves, or that one consumer in order holds.
      split_k: parts of k that different CTAs accumulate and leave in device memory; a reduction kernel adds them up,
        always in the same order.
      delay_release: steps whose wgmmas may still run while those of the next one start, 0 or 1: their stages are
        released one step later.
      tail_split_k: parts of k of the tiles of the last wave, which different CTAs accumulate, so that it is over sooner
        (tile_scheduler.py). They leave their accumulators in device memory for the one that has the last part.
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
    """The same product as ``c^T = b^T a^T``, and the same schedule for it: m and n, `a` and `b` change places.

    What were several results side by side is one.
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
