"""Problems by which the kernels for TPUs are judged without one: small, so that their grids are soon estimated.

The compiler's estimate goes through a grid step by step, so problems have a few hundred steps with most tiles. Ragged
extents, short and long rows, and every dtype that a kernel takes are among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]
_ROWS: Sequence[Fields] = (
    {"rows": 1024, "columns": 4096},
    {"rows": 256, "columns": 16384},
    {"rows": 4096, "columns": 512},
    {"rows": 1000, "columns": 3000},
    {"rows": 1024, "columns": 2048, "dtype": "float32"},
    {"rows": 64, "columns": 65536},
)
_HEADS = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 128}

# By the name of the operation: those whose kernel is there are judged.
PROBLEMS: Mapping[str, Sequence[Fields]] = {
    "matmul": (
        {"m": 1024, "n": 2048, "k": 2048},
        {"m": 1024, "n": 1024, "k": 1024},
        {"m": 16, "n": 4096, "k": 4096},
        {"m": 512, "n": 4096, "k": 1024},
        {"m": 1000, "n": 1500, "k": 1100},
        {"m": 512, "n": 512, "k": 1024, "dtype": "float32", "precision": "highest"},
        {"m": 512, "n": 2048, "k": 1024, "dtype": "int8", "out_dtype": "int32"},
        {"m": 1024, "n": 3072, "k": 768, "bias": "bfloat16", "activation": "gelu", "residual": "bfloat16"},
    ),
    "gated_matmul": (
        {"m": 1024, "n": 2048, "k": 1024, "pair": True},
        {"m": 256, "n": 2816, "k": 2048, "pair": True},
        {"m": 16, "n": 4096, "k": 2048, "pair": True},
        {"m": 500, "n": 1300, "k": 1100, "pair": True},
    ),
    "softmax": _ROWS,
    "rms_norm": _ROWS,
    "add_rms_norm": _ROWS,
    "layer_norm": _ROWS,
    "layer_norm_backward": _ROWS,
    "cross_entropy": _ROWS,
    "quantize_rows": _ROWS,
    "silu_and_mul": _ROWS,
    "silu_and_mul_backward": _ROWS,
    "flash_attention": (
        {**_HEADS, "q_len": 2048, "kv_len": 2048, "causal": True},
        {**_HEADS, "q_len": 1024, "kv_len": 2048},
        {**_HEADS, "q_len": 512, "kv_len": 4096, "head_dim": 64},
        {**_HEADS, "q_len": 1000, "kv_len": 1500},
        {**_HEADS, "q_len": 1024, "kv_len": 1024, "dtype": "float32"},
    ),
}
