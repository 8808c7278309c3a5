"""Steps of the tiles of a launch, counted for columns of schedules: of each tile, and of each CTA."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from search_spaces.flash_attention.hopper.tiling import Tiling
from search_spaces.flash_attention.problem import FlashAttentionProblem

Array = npt.NDArray[np.float64]


def of_tiles(p: FlashAttentionProblem, rows: int, block_kv: int) -> Array:
    """Blocks of keys that each tile of a head takes, from its first query on; see `TileOrder`."""
    row = np.arange(0, p.q_len, rows)
    keys = np.full_like(row, p.kv_len) if p.right is None else np.minimum(row + rows + p.right, p.kv_len)
    last = np.maximum(-(-keys // block_kv) - 1, 0)
    first = np.zeros_like(row) if p.left is None else np.clip(np.maximum(row - p.left, 0) // block_kv, 0, last)
    return np.asarray(last - first + 1, np.float64)


def mean(p: FlashAttentionProblem, s: Any) -> Any:
    """Steps of a tile on average."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).mean()), Tiling(p, s).rows, s.block_kv)


def shortest(p: FlashAttentionProblem, s: Any) -> Any:
    """Steps of the shortest tile."""
    return _each(lambda rows, block: float(of_tiles(p, rows, block).min()), Tiling(p, s).rows, s.block_kv)


def longest_of_last(p: FlashAttentionProblem, s: Any, cores: int) -> Any:
    """Steps of the longest tile among those that start last, one on each core; not fewer than the mean.

    Sections end with the shortest tiles of all of their heads. One of few heads has its longest tiles among the last.
    """
    heads = p.batch * p.heads

    def count(rows: int, block: int, section: int, in_order: bool) -> float:
        steps = of_tiles(p, rows, block)
        last = steps.size if in_order else min(-(-cores // (heads % section or section)), steps.size)
        return max(float(np.sort(steps)[:last].max()), float(steps.mean()))

    return _each(count, Tiling(p, s).rows, s.block_kv, s.section, s.order == "plain")


def imbalance(p: FlashAttentionProblem, s: Any, cores: int, section: Any = None) -> Any:
    """Steps of the busiest of so many persistent CTAs, over the mean, where tiles are dealt back and forth.

    In sections of the schedule's heads, or of `section`.
    """
    heads = p.batch * p.heads

    def ratio(rows: int, block: int, section: int) -> float:
        # A section: a head's tiles from its last on, each as often as it has heads.
        longest_first = of_tiles(p, rows, block)[::-1]
        whole, left = np.tile(np.repeat(longest_first, section), heads // section), heads % section
        steps = np.concatenate([whole, np.repeat(longest_first, left)])
        rounds = -(-steps.size // cores)
        dealt = np.pad(steps, (0, rounds * cores - steps.size)).reshape(rounds, cores)
        dealt[1::2] = dealt[1::2, ::-1]
        return float(dealt.sum(axis=0).max() / dealt.sum(axis=0).mean())

    return _each(ratio, Tiling(p, s).rows, s.block_kv, s.section if section is None else section)


def _each(function: Any, *columns: Any) -> Any:
    """A function of one schedule's fields, over columns or single values; computed once for equal ones."""
    arrays = np.broadcast_arrays(*columns)
    keys = list(zip(*(array.ravel().tolist() for array in arrays), strict=True))
    known = {key: function(*key) for key in dict.fromkeys(keys)}
    return np.array([known[key] for key in keys]).reshape(arrays[0].shape)
