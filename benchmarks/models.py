"""Unmodified models, forward and training step, in plain JAX and by `scheduler.optimize` without a search.

    python benchmarks/models.py                      # all models, and the result file
    python benchmarks/models.py --only llama         # the models whose names begin so
    python benchmarks/models.py --small              # small models, on a CPU: the times mean nothing

Each model is written as its authors write it: attention by `jax.nn.dot_product_attention` without an implementation, or
by two einsums and a softmax. One call of `optimize` decides on it. Then both versions are timed in interleaved rounds
of wall time. Ratios are the time of plain JAX over that of `optimize`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import RESULTS, environment, write_result
from rich.console import Console
from rich.table import Table
from whole_functions import wall_times

import scheduler
from scheduler.core import hardware
from scheduler.core.text import seconds_text
from scheduler.measure.gpu import Gpu
from scheduler.measure.runner import environment as measured
from search_spaces import load

Array = jax.Array
Weights = dict[str, Any]
EPS, ROPE_BASE = 1e-5, 500_000.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of a transformer.

    Attributes:
      features, hidden: of the stream, and of the feed-forward layer.
      heads, kv_heads: of attention.
      vocabulary: 0 for a model without one, which takes vectors.
    """

    layers: int
    batch: int
    tokens: int
    features: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 0

    @property
    def head_dim(self) -> int:
        return self.features // self.heads


def _norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (normed * weight).astype(x.dtype)


def _layer_norm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    less = wide - wide.mean(-1, keepdims=True)
    return (less * jax.lax.rsqrt((less**2).mean(-1, keepdims=True) + EPS) * weight).astype(x.dtype)


def _rope(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * ROPE_BASE ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def llama(s: Shape, weights: Weights, x: Array) -> Array:
    """Llama 3 (arXiv:2407.21783): RMS norm, rotary positions, grouped heads, gated SiLU."""
    for w in weights["layers"]:
        y = _norm(x, w["norm"])
        q = _rope((y @ w["q"]).reshape(s.batch, s.tokens, s.heads, s.head_dim))
        k = _rope((y @ w["k"]).reshape(s.batch, s.tokens, s.kv_heads, s.head_dim))
        v = (y @ w["v"]).reshape(s.batch, s.tokens, s.kv_heads, s.head_dim)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"]
        y = _norm(x, w["norm_ff"])
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
    return x


def transformer(s: Shape, weights: Weights, x: Array, *, causal: bool) -> Array:
    """A layer of GPT-2 or, without the mask, of ViT (arXiv:2010.11929): layer norm, einsum attention, GELU."""
    for w in weights["layers"]:
        y = _layer_norm(x, w["norm"])
        heads = (s.batch, s.tokens, s.heads, s.head_dim)
        q, k, v = ((y @ w[name]).reshape(heads) for name in "qkv")
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.array(s.head_dim, x.dtype))
        if causal:
            logits = jnp.where(jnp.tril(jnp.ones((s.tokens, s.tokens), bool)), logits, jnp.finfo(x.dtype).min)
        weights_of = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(x.dtype)
        x = x + jnp.einsum("bhts,bshd->bthd", weights_of, v).reshape(x.shape) @ w["o"]
        y = _layer_norm(x, w["norm_ff"])
        x = x + jax.nn.gelu(y @ w["up"]) @ w["down"]
    return x


def weights_of(s: Shape, gated: bool) -> Weights:
    """Draws the weights of a model in bfloat16; the scales of norms are float32."""
    wide = s.kv_heads * s.head_dim
    extents = {"q": (s.features, s.features), "k": (s.features, wide), "v": (s.features, wide)}
    extents |= {"o": (s.features, s.features), "up": (s.features, s.hidden), "down": (s.hidden, s.features)}
    extents |= {"gate": (s.features, s.hidden)} if gated else {}
    keys = iter(jax.random.split(jax.random.key(0), s.layers * len(extents) + 1))

    def drawn(shape: tuple[int, ...]) -> Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * shape[0] ** -0.5).astype(jnp.bfloat16)

    layers = [
        {name: drawn(shape) for name, shape in extents.items()}
        | {name: jnp.ones(s.features, jnp.float32) for name in ("norm", "norm_ff")}
        for _ in range(s.layers)
    ]
    return {"layers": layers, "embedding": drawn((s.vocabulary, s.features))} if s.vocabulary else {"layers": layers}


Apply = Callable[[Weights, Array], Array]


def training_step(apply: Apply, s: Shape) -> tuple[Callable[..., Any], Callable[[Weights], Any]]:
    """Returns a step of AdamW, and what makes its state of weights."""
    optimizer = optax.adamw(1e-4)

    def loss(weights: Weights, x: Array, labels: Array) -> Array:
        if not s.vocabulary:
            return ((apply(weights, x) - labels).astype(jnp.float32) ** 2).mean()
        logits = apply(weights, weights["embedding"][x]) @ weights["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    def step(weights: Weights, state: Any, x: Array, labels: Array) -> tuple[Weights, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x, labels)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step, optimizer.init


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of a model, and its arguments."""

    name: str
    layers: int
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def _forward(apply: Callable[..., Array], s: Shape, gated: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x = jax.random.normal(jax.random.key(1), (s.batch, s.tokens, s.features), jnp.bfloat16)
    return functools.partial(apply, s), (weights_of(dataclasses.replace(s, vocabulary=0), gated), x)


def _training(apply: Callable[..., Array], s: Shape, gated: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    step, init = training_step(functools.partial(apply, s), s)
    weights, key = weights_of(s, gated), jax.random.key(1)
    if s.vocabulary:
        x = jax.random.randint(key, (s.batch, s.tokens), 0, s.vocabulary)
        return step, (weights, init(weights), x, jnp.roll(x, -1, 1))
    x = jax.random.normal(key, (s.batch, s.tokens, s.features), jnp.bfloat16)
    return step, (weights, init(weights), x, x[::-1])


def models(small: bool) -> tuple[Model, ...]:
    """Returns the models. Small ones rehearse the benchmark on a CPU."""
    llama_3 = Shape(2, 1, 4096, 4096, 14336, 32, 8)
    vit_large = Shape(4, 64, 197, 1024, 4096, 16, 16)
    gpt_2 = Shape(6, 8, 1024, 768, 3072, 12, 12, 50257)
    if small:
        llama_3 = Shape(1, 1, 128, 256, 512, 4, 2)
        vit_large = Shape(1, 2, 97, 256, 512, 4, 4)
        gpt_2 = Shape(1, 2, 128, 256, 512, 4, 4, 1000)
    vit = functools.partial(transformer, causal=False)
    gpt = functools.partial(transformer, causal=True)
    made = (
        ("llama", llama, llama_3, True),
        ("vit", vit, vit_large, False),
        ("gpt2", gpt, gpt_2, False),
    )
    found = []
    for name, apply, shape, gated in made:
        for suffix, kind in (("", _forward), ("_training", _training)):
            make = functools.partial(kind, apply, shape, gated)
            found.append(Model(name + suffix, shape.layers, make))
    return tuple(found)


def row(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the result: wall times of a call, peak memory, and what was replaced."""
    fn, args = model.make()
    plain = jax.jit(fn)
    given: dict[str, Any] = {"backends": ("interpret", "xla")} if options.small else {}
    optimized = scheduler.optimize(fn, **given)
    started = time.perf_counter()
    jax.block_until_ready(optimized(*args))
    decided_s = time.perf_counter() - started
    (decision,) = optimized.decisions
    runs = {"jnp": lambda: plain(*args), "optimize": lambda: optimized(*args)}
    times = [wall_times(runs, 1, seconds=options.seconds) for _ in range(options.repeats)]
    ratios = [line["optimize_vs_jnp"] for line in times]
    return {
        "model": model.name,
        "layers": model.layers,
        "jnp_us": statistics.median(line["jnp_us"] for line in times),
        "optimize_us": statistics.median(line["optimize_us"] for line in times),
        "optimize_vs_jnp": statistics.median(ratios),
        "ratios": ratios,
        "kept": decision.kept,
        "reason": decision.reason,
        "jnp_bytes": decision.plain_bytes,
        "optimize_bytes": decision.tuned_bytes,
        "replaced": [str(each) for each in decision.replaced],
        "changes": list(decision.changes),
        "left": dict(decision.left),
        "decided_s": decided_s,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of the result's summary."""
    by_name = {line["model"]: line["optimize_vs_jnp"] for line in rows}
    return {
        "models": len(rows),
        "default_attention_llama": by_name.get("llama"),
        "llama_training": by_name.get("llama_training"),
        "vit": by_name.get("vit"),
        "vit_training": by_name.get("vit_training"),
        "gpt2_training": by_name.get("gpt2_training"),
        "optimize_worst": min((min(line["ratios"]) for line in rows), default=None),
        "attention_found": found_share(),
    }


def found_share() -> float | None:
    """Returns the share of the corpus that the rewriting finds; None where flax or equinox is not installed."""
    try:
        from attention_corpus import FORMS, is_found
    except ImportError:
        return None
    return sum(map(is_found, FORMS)) / len(FORMS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the models whose names begin so")
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds for each version")
    parser.add_argument("--repeats", type=int, default=3, help="how often each model is timed")
    parser.add_argument("--small", action="store_true", help="small models by the interpreter; the times mean nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)
    rows = []
    for model in models(options.small):
        if model.name.startswith(options.only):
            rows.append(row(model, options))
            _print(rows[-1])
    figures = summary(rows)
    Console().print(figures)
    chip = hardware.detect()
    gpu = None if chip.platform == "cpu" else Gpu.query(0)
    made = environment(measured(gpu.driver if gpu else ""), load("flash_attention"), load("flash_attention_backward"))
    write_result("models", chip, summary=figures, rows=rows, environment=made, directory=options.results)


def _print(line: Mapping[str, Any]) -> None:
    table = Table(show_header=False)
    memory = [line["jnp_bytes"], line["optimize_bytes"]]
    table.add_row(line["model"], f"{line['optimize_vs_jnp']:.3f}", line["kept"], line["reason"])
    table.add_row("time", seconds_text(line["jnp_us"] / 1e6), seconds_text(line["optimize_us"] / 1e6), "")
    table.add_row("peak memory", *("-" if n is None else f"{n / 2**20:.0f} MiB" for n in memory), "")
    Console().print(table)
    for each in (*line["replaced"], *line["changes"]):
        print("  ", each)
    for reason, count in line["left"].items():
        print("  left:", reason, count)


if __name__ == "__main__":
    main()
