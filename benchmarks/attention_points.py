"""The attention that benchmarks/attention.py times: forward, decoding and backward."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from search_spaces.attention.problem import AttentionProblem
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem

# As FlashAttention-3's figures have it (arXiv:2407.08608, section 4.1): 16k tokens, and 2048 columns of all heads.
TOKENS, WIDTH = 16384, 2048
# A run that is cut off has long and short sequences.
LENGTHS = (8192, 512, 2048, 16384, 1024, 4096)
# Sequences and their keys, of which each sequence's one query sees all.
DECODED = ((1, 65536), (32, 4096), (1, 8192), (64, 16384), (4, 131072), (1, 1024), (16, 32768), (64, 1024))


@dataclasses.dataclass(frozen=True)
class Point:
    """A problem and what it stands for.

    Attributes:
      kind: "square", "grouped", "ragged", "window", "decode", or "float16", the dtype of JAX's own kernel.
    """

    kind: str
    problem: AttentionProblem

    @property
    def backward(self) -> bool:
        return isinstance(self.problem, FlashAttentionBackwardProblem)

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} {self.kind} {self.problem}"


def _fields(length: int, head_dim: int, causal: bool, **others: Any) -> dict[str, Any]:
    heads = WIDTH // head_dim
    shape = {"batch": TOKENS // length, "q_len": length, "kv_len": length, "heads": heads, "kv_heads": heads}
    return shape | {"head_dim": head_dim, "causal": causal} | others


def _forward() -> Iterator[Point]:
    def point(kind: str, length: int, head_dim: int, causal: bool, **others: Any) -> Point:
        return Point(kind, FlashAttentionProblem(**_fields(length, head_dim, causal, **others)))

    for head_dim, causal, length in itertools.product((64, 128, 256), (False, True), LENGTHS):
        yield point("square", length, head_dim, causal)
    for causal in (False, True):
        yield point("grouped", 4096, 128, causal, kv_heads=2)
        yield point("float16", 4096, 128, causal, dtype="float16")
    for length, causal in ((4000, False), (3001, True), (4000, True)):
        yield point("ragged", length, 128, causal)
    for length in (16384, 4096):
        yield point("window", length, 128, True, window_left=1024)
    shape = {"q_len": 1, "heads": 32, "kv_heads": 4, "head_dim": 128}
    decoded = [FlashAttentionProblem(batch=batch, kv_len=kv_len, **shape) for batch, kv_len in DECODED]
    for problem in (*decoded, dataclasses.replace(decoded[3], kv_lengths=True)):
        yield Point("decode", problem)


def _backward() -> Iterator[Point]:
    def point(kind: str, length: int, head_dim: int, causal: bool, **others: Any) -> Point:
        return Point(kind, FlashAttentionBackwardProblem(**_fields(length, head_dim, causal, **others)))

    for head_dim, causal, length in itertools.product((64, 128), (False, True), LENGTHS[:3]):
        yield point("square", length, head_dim, causal)
    for causal in (False, True):
        yield point("square", 16384, 128, causal)
        for length in (8192, 2048):
            yield point("square", length, 256, causal)
    yield point("grouped", 4096, 128, True, kv_heads=2)


def points() -> tuple[Point, ...]:
    """The suite, one point of each sort after the other, so that those of a run that is cut off are of all sorts."""
    sorts: dict[Any, list[Point]] = {}
    for point in (*_forward(), *_backward()):
        sort = point.backward, point.kind, point.kind == "square" and (point.problem.head_dim, point.problem.causal)
        sorts.setdefault(sort, []).append(point)
    turns = itertools.zip_longest(*sorts.values())
    # Each turn starts with another sort: those who share the points, every second for two, get all sorts.
    return tuple(point for n, turn in enumerate(turns) for point in (*turn[n:], *turn[:n]) if point is not None)


# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
REHEARSED = (
    Point("square", FlashAttentionProblem(1, 64, 64, 2, 2, 16, causal=True, dtype="float32")),
    Point("decode", FlashAttentionProblem(2, 1, 96, 4, 1, 16, dtype="float32")),
    Point("square", FlashAttentionBackwardProblem(1, 48, 48, 2, 1, 16, dtype="float32")),
)
