"""Problems that nobody has tuned, drawn by a seed, none of them shipped.

`KINDS` are what public language models ask for. `ANY_SHAPE` are shapes as users have them: extents of models and odd
ones, from one row to 65536, in all dtypes and layouts, of all operations.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from problems import GEMMA_2_27B, LLAMA_3_8B, LLAMA_3_70B, MISTRAL_7B, QWEN_2_5_3B, QWEN_2_5_7B

from scheduler.search.jobs import SearchOptions, Task
from scheduler.store.store import shipped
from search_spaces import load

Fields = tuple[str, dict[str, int | str | bool]]  # of an operation by name
Kind = Callable[[random.Random], Fields]
MODELS = (LLAMA_3_8B, LLAMA_3_70B, MISTRAL_7B, QWEN_2_5_3B, QWEN_2_5_7B, GEMMA_2_27B)
TOKENS = (8, 32, 96, 192, 384, 768, 1536, 3072, 6144)
DEVICES = (1, 2, 4)  # that a model is divided over
# Until a problem is new.
MOST_DRAWS = 1000
LENGTHS = (768, 1536, 3072, 6144)


def drawn(
    count: int, seed: int, kinds: Sequence[Kind], budget: int, accepts: Callable[[Task], bool] = lambda task: True
) -> list[Task]:
    """So many distinct problems, of the kinds in turn; more of the same seed begin with them.

    Args:
      kinds: `KINDS` or `ANY_SHAPE`, or `SMALL` where kernels are interpreted.
      budget: trials of each.
      accepts: whether a problem counts; another one is drawn in place of those that do not.

    Raises:
      ValueError: there are not so many.
    """
    rng, tuned = random.Random(seed), set(_shipped())
    found: dict[tuple[str, str], Task] = {}
    for kind in itertools.islice(itertools.cycle(kinds), count):
        draws = (kind(rng) for _ in range(MOST_DRAWS))
        tasks = (Task(load(name), load(name).problem(**fields), SearchOptions(budget)) for name, fields in draws)
        new = (task for task in tasks if _named(task) not in tuned and _named(task) not in found and accepts(task))
        if (task := next(new, None)) is None:
            raise ValueError(f"no {count} problems can be drawn, only {len(found)}: ask for fewer")
        found[_named(task)] = task
    return list(found.values())


def _named(task: Task) -> tuple[str, str]:
    return task.operation.name, task.problem.canonical()


def _shipped() -> Iterator[tuple[str, str]]:
    """Operations and problems that have records of any chip."""
    if (store := shipped()) is not None:
        with contextlib.closing(store):
            yield from ((record.key.operation, record.key.problem) for record in store.records())


def _product(rng: random.Random) -> Fields:
    model, tokens, parts = rng.choice(MODELS), rng.choice(TOKENS), rng.choice(DEVICES)
    columns, depth = rng.choice(
        [
            ((model.heads + 2 * model.kv_heads) * model.head // parts, model.hidden),
            (model.hidden, model.heads * model.head // parts),
            (model.mlp // parts, model.hidden),
            (model.hidden, model.mlp // parts),
        ]
    )
    return "matmul", {"m": tokens, "n": columns, "k": depth}


def _gated(rng: random.Random) -> Fields:
    model, parts = rng.choice(MODELS), rng.choice(DEVICES)
    return "gated_matmul", {"m": rng.choice(TOKENS), "n": model.mlp // parts, "k": model.hidden, "pair": True}


def _rows(rng: random.Random) -> Fields:
    model, tokens = rng.choice(MODELS), rng.choice(TOKENS)
    name, columns = rng.choice(
        [
            ("rms_norm", model.hidden),
            ("add_rms_norm", model.hidden),
            ("softmax", model.vocabulary),
            ("silu_and_mul", model.mlp // rng.choice(DEVICES)),
        ]
    )
    return name, {"rows": tokens, "columns": columns}


def _attention(rng: random.Random) -> Fields:
    model, length = rng.choice(MODELS), rng.choice(LENGTHS)
    parts = rng.choice([parts for parts in DEVICES if model.kv_heads % parts == 0])
    heads = {"heads": model.heads // parts, "kv_heads": model.kv_heads // parts, "head_dim": model.head}
    if rng.random() < 0.5:  # a step of decoding
        return "flash_attention", {"batch": rng.choice((4, 16, 64)), "q_len": 1, "kv_len": length, **heads}
    batch = rng.choice((1, 2))
    return "flash_attention", {"batch": batch, "q_len": length, "kv_len": length, "causal": True, **heads}


def _small_product(rng: random.Random) -> Fields:
    m, n, k = (rng.choice((8, 16, 24, 32)) for _ in range(3))
    return "matmul", {"m": m, "n": n, "k": k, "dtype": "float32"}


def _small_rows(rng: random.Random) -> Fields:
    return "rms_norm", {"rows": rng.choice((8, 16, 32)), "columns": rng.choice((16, 32, 48)), "dtype": "float32"}


KINDS: tuple[Kind, ...] = (_product, _rows, _product, _attention, _gated, _rows, _product, _attention)
SMALL: tuple[Kind, ...] = (_small_product, _small_rows)

# ------------------------------------------------------------------------------
# Shapes as users have them.

# Rows: powers of two, patches of images (ViT: 196 and a class token, DINOv2: 256 and one, SigLIP: 27 x 27), CLIP's
# text, classes, batches of such images, ends of batches, and primes.
ROWS = (1, 2, 8, 17, 64, 77, 128, 197, 256, 257, 512, 729, 1000, 1024, 1001, 1576, 2048, 2049, 3001, 4096, 4095, 6304)
ROWS += (8192, 8191, 12608, 16384, 32768, 65536)
# Columns and depths: hidden and MLP widths of models, and odd ones. Vocabularies: GPT-2, OPT, BERT, T5, Llama 2 with
# a token, Whisper, Qwen2.5.
WIDTHS = (64, 128, 256, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 11008)
ODD_WIDTHS = (
    63,
    77,
    100,
    129,
    197,
    300,
    513,
    769,
    900,
    1001,
    1023,
    1025,
    1370,
    1531,
    2047,
    2730,
    3001,
    4095,
    4097,
    4100,
)
VOCABULARIES = (50257, 50272, 30522, 32128, 32001, 51865, 151936, 128256)
GROUPS = (4, 8, 16, 64)


def _width(rng: random.Random, odd: float = 0.4) -> int:
    return rng.choice(ODD_WIDTHS if rng.random() < odd else WIDTHS)


def _float(rng: random.Random) -> str:
    return rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32"))


def _layout(rng: random.Random) -> Fields:
    m, n, k = (
        rng.choice(ROWS),
        rng.choice((_width(rng), _width(rng), _width(rng), rng.choice(VOCABULARIES))),
        _width(rng),
    )
    transposed = rng.choice(({}, {}, {"transpose_b": True}, {"transpose_b": True}, {"transpose_a": True}))
    return "matmul", {"m": m, "n": n, "k": k, **transposed}


def _any_product(rng: random.Random) -> Fields:
    name, fields = _layout(rng)
    dtype = rng.choice((*("bfloat16",) * 4, "float16", "int8", "float8_e4m3fn"))
    given = {"int8": {"out_dtype": "int32"}, "float8_e4m3fn": {"out_dtype": "bfloat16"}}.get(dtype, {})
    return name, {**fields, "dtype": dtype, **given}


def _float32_product(rng: random.Random) -> Fields:
    name, fields = _layout(rng)
    return name, {**fields, "dtype": "float32", "precision": rng.choice(("default", "high", "highest"))}


def _batched_product(rng: random.Random) -> Fields:
    extents = [rng.choice((64, 128, 197, 256, 257, 512, 1000, 1024, 77)) for _ in range(3)]
    transposed = {"transpose_b": rng.random() < 0.5}
    return "matmul", {**dict(zip("mnk", extents, strict=True)), "batch": rng.choice((2, 12, 64, 192)), **transposed}


def _fused_product(rng: random.Random) -> Fields:
    name, fields = _layout(rng)
    after = ({"bias": "bfloat16"}, {"bias": "bfloat16", "activation": "gelu"}, {"activation": "silu"})
    return name, fields | rng.choice((*after, {"residual": "bfloat16"}))


def _unaligned(rng: random.Random, rows: Sequence[int]) -> Fields:
    m, n, k = rng.choice(rows), _width(rng, odd=0.7), _width(rng, odd=0.7)
    n = rng.choice((n, n, n, 50257))
    if not (n % 8 or k % 8):
        n += rng.choice((1, 2, 4, 7))
    return "matmul", {"m": m, "n": n, "k": k, "transpose_b": rng.random() < 0.3}


def _unaligned_product(rng: random.Random) -> Fields:
    return _unaligned(rng, [m for m in ROWS if m >= 256])


def _unaligned_few_rows(rng: random.Random) -> Fields:
    return _unaligned(rng, [m for m in ROWS if m < 256])


def _any_gated(rng: random.Random) -> Fields:
    fields: dict[str, int | str | bool] = {"m": rng.choice(ROWS), "n": _width(rng), "k": _width(rng)}
    layout = {"pair": rng.random() < 0.5, "transpose_w": rng.random() < 0.3}
    return "gated_matmul", {**fields, **layout, "activation": rng.choice(("silu", "gelu"))}


def _any_scaled(rng: random.Random) -> Fields:
    scales = rng.choice(("blocks", "rows"))
    extents = {"m": rng.choice(ROWS), "n": _width(rng, 0.2), "k": _width(rng, 0.2)}
    return "scaled_matmul", {**extents, "transpose_b": rng.random() < 0.6, "a_scales": scales, "b_scales": scales}


FORMULAS = ("softmax", "softmax_with_lse", "log_softmax", "cross_entropy", "rms_norm", "add_rms_norm", "layer_norm")
FORMULAS += ("silu_and_mul", "quantize_rows")


def _any_rows(rng: random.Random) -> Fields:
    name = rng.choice(FORMULAS)
    wide = name in ("softmax", "softmax_with_lse", "log_softmax", "cross_entropy") and rng.random() < 0.4
    columns = rng.choice(VOCABULARIES) if wide else _width(rng)
    dtype = "bfloat16" if name == "quantize_rows" else _float(rng)
    return name, {"rows": rng.choice(ROWS), "columns": columns, "dtype": dtype}


def _any_rows_backward(rng: random.Random) -> Fields:
    name, fields = _any_rows(rng)
    return f"{name}_backward", fields


def _any_group_norm(rng: random.Random) -> Fields:
    positions, channels = rng.choice((49, 196, 784, 1024, 4096)), rng.choice((64, 128, 320, 640, 1280))
    return "group_norm", {
        "samples": rng.choice((1, 8, 16, 64)), "positions": positions, "channels": channels, "group": channels // 32
    }  # fmt: skip


def _any_attention(rng: random.Random) -> Fields:
    length = rng.choice((77, 197, 257, 512, 577, 1000, 1024, 1500, 2048, 2049, 4096))
    kv_heads = rng.choice((1, 2, 4, 8, 16))
    fields: dict[str, int | str | bool] = {"batch": rng.choice((1, 2, 8, 32)), "q_len": length, "kv_len": length}
    fields |= {"heads": kv_heads * rng.choice((1, 1, 2, 4)), "kv_heads": kv_heads}
    fields |= {"head_dim": rng.choice((32, 64, 72, 80, 96, 128, 128, 256)), "causal": rng.random() < 0.5}
    return "flash_attention", fields | {"dtype": rng.choice(("bfloat16", "bfloat16", "float16", "float32"))}


def _decoding(rng: random.Random) -> Fields:
    _, fields = _any_attention(rng)
    lengths: dict[str, int | str | bool] = {"q_len": 1, "kv_len": rng.choice((1000, 2048, 4097, 8192)), "causal": False}
    return "flash_attention", fields | lengths | {"kv_lengths": rng.random() < 0.5}


def _any_attention_backward(rng: random.Random) -> Fields:
    _, fields = _any_attention(rng)
    return "flash_attention_backward", fields


def _any_grouped(rng: random.Random) -> Fields:
    name = rng.choice(("ragged_dot", "ragged_dot_weights", "gated_ragged_dot"))
    rows = rng.choice([m for m in ROWS if 64 <= m <= 16384])
    return name, {"rows": rows, "groups": rng.choice(GROUPS), "k": _width(rng, 0.2), "n": _width(rng, 0.2)}


ANY_SHAPE: tuple[Kind, ...] = (
    _any_product, _any_rows, _unaligned_product, _any_attention, _any_product, _any_rows_backward, _any_gated,
    _any_product, _any_rows, _fused_product, _any_attention_backward, _unaligned_few_rows, _any_grouped, _any_product,
    _decoding, _any_rows, _any_scaled, _batched_product, _float32_product, _any_group_norm,
)  # fmt: skip
