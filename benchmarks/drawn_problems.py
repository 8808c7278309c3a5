"""Problems of a job that nobody has tuned: drawn from what public language models ask for, none of them shipped."""

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


def drawn(count: int, seed: int, kinds: Sequence[Kind], budget: int) -> list[Task]:
    """So many distinct problems, of the kinds in turn; more of the same seed begin with them.

    Args:
      kinds: `KINDS`, or `SMALL` where kernels are interpreted.
      budget: trials of each.

    Raises:
      ValueError: there are not so many.
    """
    rng, tuned = random.Random(seed), set(_shipped())
    found: dict[tuple[str, str], Task] = {}
    for kind in itertools.islice(itertools.cycle(kinds), count):
        draws = (kind(rng) for _ in range(MOST_DRAWS))
        tasks = (Task(load(name), load(name).problem(**fields), SearchOptions(budget)) for name, fields in draws)
        new = (task for task in tasks if _named(task) not in tuned and _named(task) not in found)
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
