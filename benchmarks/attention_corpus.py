"""Attention as libraries and models write it: which forms does `scheduler.optimize` find?

    python benchmarks/attention_corpus.py      # prints a table: form, found or the reason

flax.linen, flax.nnx, equinox and optax are called. The other forms repeat the arithmetic of the named project, from its
documentation: Haiku's `MultiHeadAttention`, Keras 3's, penzai's, the Flax models of Hugging Face, and MaxText's
`dot_product` attention. None has a dropout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from scheduler.dispatch.primitive import library
from scheduler.rewriting.passes import Found, Rewriter

Array = jax.Array
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 2, 128, 4, 2, 32, 2
FEATURES = HEADS * HEAD_DIM
# Of [batch, length, heads, head_dim].
Core = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Form:
    """A function with attention, and its arguments.

    Attributes:
      attention: how many calls of attention it has.
      why_not: why none is found; "" if all are.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    attention: int = 1
    why_not: str = ""


def jax_nn(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def jax_nn_window(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(16, 0))


def einsum(q: Array, k: Array, v: Array) -> Array:
    """As in nanoGPT's ports: a lower triangle, and minus infinity elsewhere."""
    logits = jnp.einsum("bthd,bshd->bhts", q, _repeated(k)) / math.sqrt(q.shape[-1])
    length = q.shape[1]
    logits = jnp.where(jnp.tril(jnp.ones((length, length))) == 0, -jnp.inf, logits)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), _repeated(v))


def transposed(q: Array, k: Array, v: Array) -> Array:
    """As in ViT and minGPT: heads in front, two matmuls, the softmax written out."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, _repeated(k), _repeated(v)))
    logits = (q @ k.swapaxes(-2, -1)) * q.shape[-1] ** -0.5
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(0, 2, 1, 3)


def haiku(q: Array, k: Array, v: Array) -> Array:
    logits = jnp.einsum("...thd,...Thd->...htT", q, _repeated(k)) * (1.0 / math.sqrt(q.shape[-1]))
    mask = jnp.tril(jnp.ones((1, 1, q.shape[1], q.shape[1])))
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    return jnp.einsum("...htT,...Thd->...thd", weights, _repeated(v))


def keras(q: Array, k: Array, v: Array) -> Array:
    """Keras adds a large negative number where the mask is false."""
    rows, columns = (jnp.cumsum(jnp.ones((1, *shape), jnp.int32), axis) for axis, shape in _triangle(q.shape[1]))
    mask = jnp.greater_equal(rows, columns)[:, None]
    scores = jnp.einsum("aecd,abcd->acbe", _repeated(k), q * (1.0 / math.sqrt(q.shape[-1])))
    scores = scores + (1.0 - mask.astype(scores.dtype)) * -3e4
    return jnp.einsum("acbe,aecd->abcd", jax.nn.softmax(scores), _repeated(v))


def _triangle(length: int) -> tuple[tuple[int, tuple[int, int]], tuple[int, tuple[int, int]]]:
    return (-2, (length, 1)), (-1, (1, length))


def penzai(q: Array, k: Array, v: Array) -> Array:
    """penzai maps named axes: the arithmetic is of one head of one sequence."""

    def one(q: Array, k: Array, v: Array) -> Array:
        logits = jnp.tensordot(q, k, (1, 1)) * q.shape[-1] ** -0.5
        visible = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[None, :]
        weights = jax.nn.softmax(jnp.where(visible, logits, jnp.array(-1e10, logits.dtype)), axis=1)
        return jnp.tensordot(weights, v, (1, 0))

    by_head = jax.vmap(one, in_axes=(1, 1, 1), out_axes=1)
    return jax.vmap(by_head)(q, _repeated(k), _repeated(v))


def _linen_weights(q: Array, k: Array, v: Array, bias: Array | None) -> Array:
    weights = nn.dot_product_attention_weights(q, _repeated(k), bias=bias, dtype=q.dtype, deterministic=True)
    return jnp.einsum("...hqk,...khd->...qhd", weights, _repeated(v))


def hf_gpt2(q: Array, k: Array, v: Array) -> Array:
    """Hugging Face's FlaxGPT2 and FlaxLlama: the mask, of ones unless it is given, becomes a bias."""
    given = jnp.ones((q.shape[0], q.shape[1]), jnp.int32)
    causal = nn.make_causal_mask(jnp.ones((1, q.shape[1]), bool), dtype=bool)
    causal = jnp.broadcast_to(causal, (q.shape[0], *causal.shape[1:]))
    mask = nn.combine_masks(jnp.broadcast_to(given[:, None, None, :], causal.shape), causal)
    zeros = jnp.zeros(mask.shape, q.dtype)
    bias = jax.lax.select(mask > 0, zeros, jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype))
    return _linen_weights(q, k, v, bias)


def hf_bert(q: Array, k: Array, v: Array, given: Array | None = None) -> Array:
    """Hugging Face's FlaxBert: without a mask of paddings, or with one."""
    given = jnp.ones((q.shape[0], q.shape[1]), jnp.int32) if given is None else given
    mask = given[:, None, None, :]
    bias = jax.lax.select(
        mask > 0,
        jnp.full(mask.shape, 0.0).astype(q.dtype),
        jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype),
    )
    return _linen_weights(q, k, v, bias)


def hf_llama(q: Array, k: Array, v: Array) -> Array:
    """Hugging Face's FlaxLlama: repeated keys, a float32 softmax."""
    length = q.shape[1]
    causal = nn.make_causal_mask(jnp.ones((1, length), bool), dtype=bool)
    bias = jnp.where(causal, 0.0, jnp.finfo(q.dtype).min).astype(q.dtype)
    weights = nn.dot_product_attention_weights(
        q, _repeated(k), bias=bias, dtype=jnp.float32, deterministic=True
    ).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, _repeated(v))


def maxtext(q: Array, k: Array, v: Array) -> Array:
    """MaxText's `dot_product`: grouped heads, a mask that is added, exponentials divided after the second product."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim) * head_dim**-0.5
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k)
    rows = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, (length, length), 1)
    mask = jnp.where((columns <= rows)[None, None, None], 0.0, -0.7 * float(jnp.finfo(jnp.float32).max))
    logits = logits.astype(jnp.float32) + mask
    exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    total = jnp.moveaxis(total, -2, 1).reshape(batch, length, heads, 1)
    out = jnp.einsum("bkgts,bskd->btkgd", exponentials.astype(v.dtype), v)
    return (out.reshape(batch, length, heads, head_dim) / total).astype(q.dtype)


def gemma(q: Array, k: Array, v: Array) -> Array:
    """Gemma 2: capped logits and a window."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim) * head_dim**-0.5
    logits = jnp.einsum("btkgh,bskh->btkgs", grouped, k)
    logits = jnp.tanh(logits / 50.0) * 50.0
    positions = jnp.arange(length)
    mask = positions[None, :] <= positions[:, None]
    window = (positions[None, :] > positions[:, None] - 32) & (positions[None, :] < positions[:, None] + 32)
    logits = jnp.where((mask & window)[None, :, None, None, :], logits, -2.3819763e38)
    weights = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
    return jnp.einsum("btkgs,bskh->btkgh", weights, v).reshape(batch, length, heads, head_dim)


def alibi(q: Array, k: Array, v: Array) -> Array:
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    distance = jnp.arange(q.shape[1])[None, :] - jnp.arange(q.shape[1])[:, None]
    bias = (slopes[:, None, None] * distance).astype(q.dtype)
    logits = jnp.einsum("bthd,bshd->bhts", q, _repeated(k)) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), _repeated(v))


def _repeated(x: Array) -> Array:
    return jnp.repeat(x, HEADS // x.shape[2], axis=2)


# ------------------------------------------------------------------------------
# Forms: each way to write attention, in a layer, under JAX's transformations.


def _qkv(kv_heads: int = KV_HEADS) -> tuple[Array, ...]:
    return tuple(
        _normal(seed, (BATCH, LENGTH, heads, HEAD_DIM)) for seed, heads in enumerate((HEADS, kv_heads, kv_heads))
    )


def _normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Random numbers by NumPy, which compiles nothing."""
    drawn = scale * np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(drawn.astype(jnp.bfloat16))


def _gradients(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    def loss(*args: Any) -> Array:
        return (fn(*args).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=tuple(range(count)))


def _weights(layers: int = LAYERS) -> dict[str, Array]:
    widths = {"q": FEATURES, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": FEATURES}
    return {
        name: _normal(seed, (layers, FEATURES, width), FEATURES**-0.5)
        for seed, (name, width) in enumerate(widths.items())
    }


def _layer(core: Core, x: Array, w: dict[str, Array]) -> Array:
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, HEAD_DIM) for name in "qkv")
    return x + core(q, k, v).reshape(x.shape) @ w["o"]


def _unrolled(x: Array, weights: dict[str, Array], layer: Callable[..., Array]) -> Array:
    for i in range(LAYERS):
        x = layer(x, {name: w[i] for name, w in weights.items()})
    return x


def _scanned(x: Array, weights: dict[str, Array], layer: Callable[..., Array]) -> Array:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def _stream() -> Array:
    return _normal(2, (BATCH, LENGTH, FEATURES))


def _in_layers(core: Core, stack: Callable[..., Array], wrap: Callable[[Any], Any]) -> Callable[..., Array]:
    layer = wrap(functools.partial(_layer, core))
    return lambda weights, x: stack(x, weights, layer)


def _training(model: Callable[..., Array]) -> Callable[..., Any]:
    optimizer = optax.sgd(0.1)

    def step(weights: Any, x: Array) -> Any:
        gradients = jax.grad(lambda weights: (model(weights, x).astype(jnp.float32) ** 2).mean())(weights)
        updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
        return optax.apply_updates(weights, updates)

    return step


def _linen(dtype: Any = jnp.bfloat16) -> tuple[Callable[..., Array], Any]:
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=dtype, deterministic=True)
    x = _stream()
    mask = nn.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    shapes = jax.eval_shape(functools.partial(module.init, mask=mask), jax.random.key(3), x)
    weights = jax.tree.map(lambda w: _normal(3, w.shape, FEATURES**-0.5).astype(w.dtype), shapes)
    return lambda weights, x: module.apply(weights, x, mask=nn.make_causal_mask(x[..., 0])), weights


def _nnx() -> tuple[Callable[..., Array], Any]:
    module = nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), dtype=jnp.bfloat16
    )
    graph, state = nnx.split(module)
    return lambda state, x: nnx.merge(graph, state)(x, mask=nnx.make_causal_mask(x[..., 0])), state


def _equinox() -> tuple[Callable[..., Array], Any]:
    module = eqx.nn.MultiheadAttention(HEADS, FEATURES, key=jax.random.key(4), dtype=jnp.bfloat16)
    weights, static = eqx.partition(module, eqx.is_array)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def apply(weights: Any, x: Array) -> Array:
        return jax.vmap(lambda y: eqx.combine(weights, static)(y, y, y, mask=mask))(x)

    return apply, weights


def forms() -> tuple[Form, ...]:
    """Returns all forms."""
    found = list[Form]()
    cores: tuple[Core, ...] = (
        *(jax_nn, jax_nn_window, einsum, transposed, haiku, keras, penzai),
        *(hf_gpt2, hf_bert, hf_llama, maxtext, gemma),
    )
    for core in cores:
        found.append(Form(core.__name__, core, _qkv()))
        found.append(Form(f"{core.__name__}, gradient", _gradients(core, 3), _qkv()))
    for name, make in (("flax.linen", _linen), ("flax.nnx", _nnx), ("equinox", _equinox)):
        apply, weights = make()
        found.append(Form(name, apply, (weights, _stream())))
        found.append(Form(f"{name}, gradient", _gradients(apply, 2), (weights, _stream())))
    for core in (jax_nn, einsum, hf_gpt2):
        for stack, scanned in ((_unrolled, False), (_scanned, True)):
            for wrap, wrapped in ((lambda layer: layer, ""), (jax.jit, "jit "), (jax.checkpoint, "remat ")):
                model = _in_layers(core, stack, wrap)
                name = f"{core.__name__} in {wrapped}{'scan' if scanned else 'layers'}"
                calls = 1 if scanned else LAYERS
                found.append(Form(name, model, (_weights(), _stream()), calls))
                calls *= 1 + wrapped.startswith("remat")
                found.append(Form(f"{name}, training step", _training(model), (_weights(), _stream()), calls))
    mask = jnp.ones((BATCH, LENGTH), jnp.int32)
    found.append(Form("hf_bert with a mask", hf_bert, (*_qkv(), mask), why_not="depends on an argument"))
    found.append(Form("ALiBi", alibi, _qkv(), why_not="a bias"))
    return tuple(found)


def rewritten(form: Form) -> tuple[Found, ...]:
    """Returns what the rewriting finds in a form, without a comparison of numbers."""
    rewriter = Rewriter(lambda operation, problem: None, _called, lambda region, calls: None)
    return rewriter.rewrite(jax.jit(form.function).trace(*form.arguments).jaxpr).found


def _called(operation: Any, problem: Any, params: Any, *operands: Any) -> Any:
    """Calls XLA's program, so that no schedule is selected."""
    return problem.pack(library(operation, problem, params, *operands))


def is_found(form: Form) -> bool:
    """Returns whether all attention of a form is replaced."""
    found = rewritten(form)
    return len(found) == form.attention and not any(each.reason for each in found)


FORMS = forms()


def main() -> None:
    table = Table("form", "found", "why not")
    share = 0
    for form in FORMS:
        found, ok = rewritten(form), is_found(form)
        share += ok
        reasons = "; ".join(dict.fromkeys(each.reason for each in found if each.reason))
        table.add_row(form.name, str(sum(not each.reason for each in found)), "" if ok else reasons or "not found")
    Console(width=160).print(table)
    print(f"{share} of {len(FORMS)} forms: {share / len(FORMS):.2f}")


if __name__ == "__main__":
    main()
