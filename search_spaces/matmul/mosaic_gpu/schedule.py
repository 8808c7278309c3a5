"""One way to compute a matrix product on Hopper: the fields of a schedule, and the same product the other way round."""

from __future__ import annotations

import dataclasses

from search_spaces.matmul.problem import MatmulProblem


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """How a product is laid over blocks, and over time.

    Attributes:
      tile_m, tile_n: extents of the output tile that one block computes at a time.
      tile_k: extent of k that one step loads and multiplies.
      stages: steps whose operands have room on chip; loads run so far ahead, into the next tile where this one ends.
      split: the axis along which two computing warpgroups halve the tile, "m" or "n"; "none": one computes it; "tiles":
        two take whole tiles in turns, so that one writes its results while the other multiplies.
      cluster: the axis along which two blocks pair up, or "none". Along "m" or "n" they have neighbouring tiles, and
        each loads half of the operand that both need; along "k" they share a tile, of which each sums half of k and,
        when they have added that up, finishes half of the columns that wgmma has.
      raster: the axis along which tiles that follow each other are neighbours, "m" or "n": bands of...
      raster_width: ...so many tiles (pairs of tiles along the axis of a cluster), walked to and fro.
      epilogue_n: columns of the pieces in which a warpgroup hands over its result; they have 64 rows, or, where
        operands are swapped, all of the warpgroup's.
      swap: the tile is computed as ``c^T = b^T a^T``: n takes the 64 rows that wgmma multiplies at a time, m its
        columns, which come in eights. Few rows of `a` then take no room for 64, and most of the ring holds `b`; many
        fall into tiles that fill the cores.
      split_k: parts of k that different blocks sum, and leave in device memory; a second launch adds the parts up,
        always in the same order.
      in_flight: steps whose products still run while those of the next one start: 0 or 1. Their slots are filled again
        one step later.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    split: str
    cluster: str
    raster: str
    raster_width: int
    epilogue_n: int
    swap: bool = False
    split_k: int = 1
    in_flight: int = 0


def mirrored(p: MatmulProblem, s: HopperSchedule) -> tuple[MatmulProblem, HopperSchedule]:
    """The same product as ``c^T = b^T a^T``, and the same schedule for it: m and n, `a` and `b` change places."""
    other = {"m": "n", "n": "m"}
    return (
        dataclasses.replace(p, m=p.n, n=p.m, transpose_a=not p.transpose_b, transpose_b=not p.transpose_a),
        dataclasses.replace(
            s,
            tile_m=s.tile_n,
            tile_n=s.tile_m,
            split=other.get(s.split, s.split),
            cluster=other.get(s.cluster, s.cluster),
            raster=other[s.raster],
        ),
    )
