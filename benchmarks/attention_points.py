"""The attention that benchmarks/attention.py times: forward, decoding and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from search_spaces.attention.problem import AttentionProblem
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem

# As FlashAttention-3's figures have it (arXiv:2407.08608, section 4.1): 16k tokens, and 2048 columns of all heads.
TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Sequences and their keys, of which each sequence's one query sees all.
DECODED = (
    *((1, 1024 * n) for n in (1, 8, 32, 128)),
    *((4, 1024 * n) for n in (8, 128)),
    *((16, 1024 * n) for n in (4, 32)),
    (32, 4096),
    *((64, 1024 * n) for n in (1, 16)),
)


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


def _trained() -> Iterator[tuple[str, dict[str, Any]]]:
    """What has a forward and a backward pass."""
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for length in LENGTHS:
                yield "square", _fields(length, head_dim, causal)
    for causal in (False, True):
        for length in (1024, 4096, 16384):
            yield "grouped", _fields(length, 128, causal, kv_heads=2)
        for length in (4000, 3001):
            yield "ragged", _fields(length, 128, causal)
    for length in (4096, 16384):
        yield "window", _fields(length, 128, True, window_left=1024)


def points() -> tuple[Point, ...]:
    """The suite."""
    both = [(kind, fields) for kind, fields in _trained()]
    shape = {"q_len": 1, "heads": 32, "kv_heads": 4, "head_dim": 128}
    decoded = [FlashAttentionProblem(batch=batch, kv_len=kv_len, **shape) for batch, kv_len in DECODED]
    narrow = [
        _fields(4096, head_dim, causal, dtype="float16") for head_dim in (64, 128, 256) for causal in (False, True)
    ]
    return (
        *(Point(kind, FlashAttentionProblem(**fields)) for kind, fields in both),
        *(Point("float16", FlashAttentionProblem(**fields)) for fields in narrow),
        *(Point("decode", problem) for problem in decoded),
        Point("decode", dataclasses.replace(decoded[-1], kv_lengths=True)),
        *(Point(kind, FlashAttentionBackwardProblem(**fields)) for kind, fields in both),
    )


# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
REHEARSED = (
    Point("square", FlashAttentionProblem(1, 64, 64, 2, 2, 16, causal=True, dtype="float32")),
    Point("decode", FlashAttentionProblem(2, 1, 96, 4, 1, 16, dtype="float32")),
    Point("square", FlashAttentionBackwardProblem(1, 48, 48, 2, 1, 16, dtype="float32")),
)
