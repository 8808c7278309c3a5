"""Numbers of steps per tile and per CTA of a launch, for columns of schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.flash_attention.hopper.tiling import Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem

Array = npt.NDArray[np.float64]


def of_tiles(p: FlashAttentionProblem, rows: int, block_kv: int) -> Array:
    """Returns the number of blocks of keys of each tile of a head, in the order of its queries; see `TileOrder`."""
    row = np.arange(0, p.q_len, rows)
    keys = np.full_like(row, p.kv_len) if p.right is None else np.minimum(row + rows + p.right, p.kv_len)
    last = np.maximum(-(-keys // block_kv) - 1, 0)
    first = np.zeros_like(row) if p.left is None else np.clip(np.maximum(row - p.left, 0) // block_kv, 0, last)
    return np.asarray(last - first + 1, np.float64)


def mean(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the mean number of steps of a tile."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).mean()), Tiling(p, s).rows, s.block_kv)


def shortest(p: FlashAttentionProblem, s: Any) -> Any:
    """Returns the number of steps of the shortest tile."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).min()), Tiling(p, s).rows, s.block_kv)


def longest_of_last(p: FlashAttentionProblem, s: Any, cores: int) -> Any:
    """Returns the number of steps of the longest tile among the last tiles, one per core; at least the mean.

    A section ends with the shortest tiles of all of its heads. With few heads per section, long tiles are among the
    last.
    """
    heads = p.batch * p.heads

    def count(rows: int, block: int, section: int, in_order: bool) -> float:
        steps = of_tiles(p, rows, block)
        last = steps.size if in_order else min(-(-cores // (heads % section or section)), steps.size)
        return max(float(np.sort(steps)[:last].max()), float(steps.mean()))

    return _each(count, Tiling(p, s).rows, s.block_kv, s.section, s.order == "plain")


def imbalance(p: FlashAttentionProblem, s: Any, cores: int, section: Any = None) -> Any:
    """Returns the steps of the busiest persistent CTA over the mean, if tiles are assigned in "snake" order.

    Args:
      cores: number of CTAs.
      section: heads per section; None means that of the schedule.
    """
    heads = p.batch * p.heads

    def ratio(rows: int, block: int, section: int) -> float:
        # A section has the tiles of a head, last tile first, each repeated once per head.
        longest_first = of_tiles(p, rows, block)[::-1]
        whole, left = np.tile(np.repeat(longest_first, section), heads // section), heads % section
        steps = np.concatenate([whole, np.repeat(longest_first, left)])
        rounds = -(-steps.size // cores)
        dealt = np.pad(steps, (0, rounds * cores - steps.size)).reshape(rounds, cores)
        dealt[1::2] = dealt[1::2, ::-1]
        return float(dealt.sum(axis=0).max() / dealt.sum(axis=0).mean())

    return _each(ratio, Tiling(p, s).rows, s.block_kv, s.section if section is None else section)


def _each(function: Any, *columns: Any) -> Any:
    """Maps a function of scalar fields over broadcast columns, with one call per distinct combination."""
    arrays = np.broadcast_arrays(*columns)
    keys = list(zip(*(array.ravel().tolist() for array in arrays), strict=True))
    known = {key: function(*key) for key in dict.fromkeys(keys)}
    return np.array([known[key] for key in keys]).reshape(arrays[0].shape)
