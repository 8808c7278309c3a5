"""Training steps, inference and other functions in plain JAX, as their authors write them: what models.py measures.

Attention is `jax.nn.dot_product_attention` without an implementation, or two einsums and a softmax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Weights = dict[str, Any]
# Only "training" counts in the geometric mean. "masked" steps have a mask that depends on an argument.
Kind = Literal["training", "masked", "inference", "no pattern"]
EPS, ROPE_BASE = 1e-5, 500_000.0
BF16, F32 = jnp.bfloat16, jnp.float32


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


@dataclasses.dataclass(frozen=True)
class Built:
    """A function as its author jits it, and the arguments of its first call.

    Attributes:
      function: of `jax.jit`, `nnx.jit` or `filter_jit`.
      arguments: makes them. Each version has its own, since a call may update or donate them.
      carried: number of first results that are the first arguments of the next call.
      bind: fixes the first arguments, and returns the function of the others with these: `nnx.cached_partial`.
    """

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    carried: int = 0
    bind: Callable[..., tuple[Callable[..., Any], Sequence[Any]]] = lambda version, *args: (version, args)

    def caller(self, version: Callable[..., Any]) -> Callable[[], Any]:
        """Returns a call of `version` in a loop; it returns the results that are not carried."""
        version, rest = self.bind(version, *self.arguments())
        args = list(rest)

        def call() -> Any:
            results = version(*args)
            if not self.carried:
                return results
            args[: self.carried] = results[: self.carried]
            return results[self.carried :]

        return call


@dataclasses.dataclass(frozen=True)
class Step:
    """A named function. `build(small)` makes it; small ones rehearse the benchmark on a CPU.

    Raises:
      ModuleNotFoundError: `build` does, where the step's framework is not installed.
    """

    name: str
    kind: Kind
    build: Callable[[bool], Built]


LANGUAGE = Shape(4, 8, 1024, 1024, 4096, 16, 16, 32000)
LLAMA = dataclasses.replace(LANGUAGE, kv_heads=4, hidden=2816)
LLAMA_3 = Shape(2, 1, 4096, 4096, 14336, 32, 8)
VIT_LARGE = Shape(4, 64, 197, 1024, 4096, 16, 16)
GPT_2 = Shape(6, 8, 1024, 768, 3072, 12, 12, 50257)


def sized(s: Shape, small: bool) -> Shape:
    """Returns the shape, or a small one of the same kind of model."""
    if not small:
        return s
    grouped = s.kv_heads < s.heads
    tokens = 48 if s.tokens % 64 else 64
    return Shape(1, 2, tokens, 64, 128, 2, 1 if grouped else 2, 128 if s.vocabulary else 0)


def words(s: Shape) -> tuple[Array, Array]:
    """Returns a batch of tokens, and the tokens that follow them: int32[batch, tokens]."""
    x = jax.random.randint(jax.random.key(1), (s.batch, s.tokens), 0, s.vocabulary)
    return x, jnp.roll(x, -1, 1)


def vectors(s: Shape) -> tuple[Array, Array]:
    """Returns inputs and labels: bfloat16[batch, tokens, features]."""
    x = jax.random.normal(jax.random.key(1), (s.batch, s.tokens, s.features), BF16)
    return x, x[::-1]


def cross_entropy(logits: Array, labels: Array, where: Array | None = None) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels)
    return losses.mean(where=where)


def _norm(x: Array, weight: Array) -> Array:
    wide = x.astype(F32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (normed * weight).astype(x.dtype)


def _layer_norm(x: Array, weight: Array) -> Array:
    wide = x.astype(F32)
    less = wide - wide.mean(-1, keepdims=True)
    return (less * jax.lax.rsqrt((less**2).mean(-1, keepdims=True) + EPS) * weight).astype(x.dtype)


def _rope(x: Array, start: Array | int) -> Array:
    half = x.shape[-1] // 2
    angles = (start + jnp.arange(x.shape[1]))[:, None] * ROPE_BASE ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x.astype(F32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


Attend = Callable[[Array, Array, Array], Array]
CAUSAL = functools.partial(jax.nn.dot_product_attention, is_causal=True)


def llama_layer(s: Shape, w: Weights, x: Array, attend: Attend = CAUSAL, start: Array | int = 0) -> Array:
    """A layer of Llama 3 (arXiv:2407.21783): RMS norm, rotary positions, grouped heads, gated SiLU."""
    y = _norm(x, w["norm"])
    q, k, v = ((y @ w[name]).reshape(*x.shape[:2], -1, s.head_dim) for name in "qkv")
    x = x + attend(_rope(q, start), _rope(k, start), v).reshape(x.shape) @ w["o"]
    y = _norm(x, w["norm_ff"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def llama(s: Shape, weights: Weights, x: Array, attend: Attend = CAUSAL) -> Array:
    for w in weights["layers"]:
        x = llama_layer(s, w, x, attend)
    return x


def transformer(s: Shape, weights: Weights, x: Array, *, causal: bool) -> Array:
    """Layers of GPT-2 or, without the mask, of ViT (arXiv:2010.11929): layer norm, einsum attention, GELU."""
    for w in weights["layers"]:
        y = _layer_norm(x, w["norm"])
        heads = (s.batch, s.tokens, s.heads, s.head_dim)
        q, k, v = ((y @ w[name]).reshape(heads) for name in "qkv")
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.array(s.head_dim, x.dtype))
        if causal:
            logits = jnp.where(jnp.tril(jnp.ones((s.tokens, s.tokens), bool)), logits, jnp.finfo(x.dtype).min)
        weights_of = jax.nn.softmax(logits.astype(F32), axis=-1).astype(x.dtype)
        x = x + jnp.einsum("bhts,bshd->bthd", weights_of, v).reshape(x.shape) @ w["o"]
        y = _layer_norm(x, w["norm_ff"])
        x = x + jax.nn.gelu(y @ w["up"]) @ w["down"]
    return x


VIT, GPT = functools.partial(transformer, causal=False), functools.partial(transformer, causal=True)


def weights_of(s: Shape, gated: bool) -> Weights:
    """Draws the weights of a model in bfloat16; the scales of norms are float32."""
    wide = s.kv_heads * s.head_dim
    extents = {"q": (s.features, s.features), "k": (s.features, wide), "v": (s.features, wide)}
    extents |= {"o": (s.features, s.features), "up": (s.features, s.hidden), "down": (s.hidden, s.features)}
    extents |= {"gate": (s.features, s.hidden)} if gated else {}
    keys = iter(jax.random.split(jax.random.key(0), s.layers * len(extents) + 1))

    def drawn(shape: tuple[int, ...]) -> Array:
        return (jax.random.normal(next(keys), shape, F32) * shape[0] ** -0.5).astype(BF16)

    layers = [
        {name: drawn(shape) for name, shape in extents.items()}
        | {name: jnp.ones(s.features, F32) for name in ("norm", "norm_ff")}
        for _ in range(s.layers)
    ]
    return {"layers": layers, "embedding": drawn((s.vocabulary, s.features))} if s.vocabulary else {"layers": layers}


Loss = Callable[..., Array]  # of the shape, the weights and a batch


def language(apply: Callable[..., Array]) -> Loss:
    def loss(s: Shape, weights: Weights, x: Array, labels: Array, where: Array | None = None) -> Array:
        logits = apply(s, weights, weights["embedding"][x]) @ weights["embedding"].T
        return cross_entropy(logits, labels, where)

    return loss


def difference(apply: Callable[..., Array]) -> Loss:
    def loss(s: Shape, weights: Weights, x: Array, labels: Array) -> Array:
        return ((apply(s, weights, x) - labels).astype(F32) ** 2).mean()

    return loss


def _attending(mask: Array) -> Loss:
    return language(functools.partial(llama, attend=functools.partial(CAUSAL, mask=mask)))


def packed(s: Shape, weights: Weights, x: Array, labels: Array, segments: Array) -> Array:
    """A Llama whose rows are several documents: `segments` numbers them."""
    return _attending(segments[:, None, :, None] == segments[:, None, None, :])(s, weights, x, labels)


def padded(s: Shape, weights: Weights, x: Array, labels: Array, lengths: Array) -> Array:
    """A Llama whose rows are documents of these lengths."""
    there = jnp.arange(s.tokens) < lengths[:, None]
    return _attending(there[:, None, None, :])(s, weights, x, labels, there)


def scanned(s: Shape, weights: Weights, x: Array, labels: Array) -> Array:
    """A Llama of float32 weights, stacked by layer, that computes in bfloat16 and keeps only what layers hand on."""

    def layers(s: Shape, weights: Weights, x: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, w: Weights) -> tuple[Array, None]:
            return llama_layer(s, w, x), None

        return jax.lax.scan(layer, x, weights["layers"])[0]

    return language(layers)(s, jax.tree.map(lambda w: w.astype(BF16), weights), x, labels)


def _stacked(weights: Weights) -> Weights:
    layers = jax.tree.map(lambda *each: jnp.stack(each), *weights["layers"])
    return jax.tree.map(lambda w: w.astype(F32), weights | {"layers": layers})


def training(
    loss: Loss,
    shape: Shape,
    small: bool,
    *,
    gated: bool = True,
    optimizer: optax.GradientTransformation | None = None,
    prepared: Callable[[Weights], Weights] = lambda weights: weights,
    batch: Callable[[Shape], tuple[Array, ...]] = words,
    **jit_options: Any,
) -> Built:
    """A step of AdamW, or of another optimizer, on a batch.

    Args:
      prepared: makes the parameters of weights.
    """
    s = sized(shape, small)
    tx = optimizer or optax.adamw(1e-4)

    def step(weights: Weights, state: Any, *batch: Array) -> tuple[Weights, Any, Array]:
        value, gradients = jax.value_and_grad(functools.partial(loss, s))(weights, *batch)
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    def arguments() -> tuple[Any, ...]:
        weights = prepared(weights_of(s, gated))
        return weights, tx.init(weights), *batch(s)

    return Built(jax.jit(step, **jit_options), arguments, carried=2)


def _segmented(s: Shape) -> tuple[Array, ...]:
    ends = jnp.sort(jax.random.randint(jax.random.key(2), (s.batch, 3), 1, s.tokens))
    return *words(s), (jnp.arange(s.tokens) >= ends[..., None]).sum(1)


def _of_lengths(s: Shape) -> tuple[Array, ...]:
    return *words(s), jax.random.randint(jax.random.key(2), (s.batch,), s.tokens // 2, s.tokens + 1)


def _forward(apply: Callable[..., Array], shape: Shape, gated: bool, small: bool) -> Built:
    s = dataclasses.replace(sized(shape, small), vocabulary=0)
    function = jax.jit(functools.partial(apply, s))
    return Built(function, lambda: (weights_of(s, gated), vectors(s)[0]))


Cache = list[tuple[Array, Array]]  # keys and values of each layer: [batch, length, kv_heads, head_dim]


def _cached(s: Shape, cache: Cache, weights: Weights, tokens: Array, start: Array) -> tuple[Cache, Array]:
    """A Llama that adds the keys and values of these tokens to its cache; returns it, and the most likely tokens."""
    x, filled = weights["embedding"][tokens], []
    lengths = jnp.full(s.batch, start + tokens.shape[1])

    def attend(kept: tuple[Array, Array], q: Array, k: Array, v: Array) -> Array:
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(before, new, start, 1) for before, new in zip(kept, (k, v), strict=True)
        )
        filled.append((keys, values))
        if q.shape[1] > 1:  # a prompt, which sees itself
            return CAUSAL(q, k, v)
        return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths)

    for w, kept in zip(weights["layers"], cache, strict=True):
        x = llama_layer(s, w, x, functools.partial(attend, kept), start)
    return filled, (x[:, -1] @ weights["embedding"].T).argmax(-1)


def _inference(batch: int, tokens: int, length: int, small: bool) -> Built:
    """A Llama that has a donated cache of `length` tokens: reads a prompt, or decodes one token in the cache's half."""
    s = dataclasses.replace(sized(dataclasses.replace(LLAMA_3, vocabulary=32000), small), batch=batch)
    tokens, length = (min(tokens, 64), 128) if small else (tokens, length)

    def arguments() -> tuple[Any, ...]:
        shape = (s.batch, length, s.kv_heads, s.head_dim)
        cache = [(jnp.zeros(shape, BF16), jnp.zeros(shape, BF16)) for _ in range(s.layers)]
        x = jax.random.randint(jax.random.key(1), (s.batch, tokens), 0, s.vocabulary)
        return cache, weights_of(s, True), x, jnp.array(0 if tokens > 1 else length // 2)

    return Built(jax.jit(functools.partial(_cached, s), donate_argnums=0), arguments, carried=1)


def _resnet_block(small: bool) -> Built:
    """Two convolutions with normalization at inference, of ResNet-50's first stage (arXiv:1512.03385)."""
    batch, width, channels = (2, 8, 16) if small else (64, 56, 64)

    def block(x: Array, kernels: Array, scales: Array, shifts: Array) -> Array:
        y = x
        for kernel, scale, shift in zip(kernels, scales, shifts, strict=True):
            y = jax.lax.conv_general_dilated(jax.nn.relu(y), kernel, (1, 1), "SAME", dimension_numbers=IMAGES)
            y = y * scale + shift
        return jax.nn.relu(x + y)

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((batch, width, width, channels), (2, 3, 3, channels, channels), (2, channels), (2, channels))
    drawn = tuple(jax.random.normal(key, shape, BF16) for key, shape in zip(keys, shapes, strict=True))
    return Built(jax.jit(block), lambda: drawn)


IMAGES = ("NHWC", "HWIO", "NHWC")


def _fft_filter(small: bool) -> Built:
    rows, length = (2, 128) if small else (256, 16384)

    def filtered(x: Array, response: Array) -> Array:
        return jnp.fft.irfft(jnp.fft.rfft(x) * response, length)

    x = jax.random.normal(jax.random.key(0), (rows, length))
    return Built(jax.jit(filtered), lambda: (x, jnp.exp(-jnp.linspace(0, 4, length // 2 + 1))))


def _nucleus(small: bool) -> Built:
    """Keeps the most likely tokens whose probabilities sum to 0.9 (arXiv:1904.09751)."""
    rows, vocabulary = (2, 64) if small else (64, 32000)

    def nucleus(probabilities: Array) -> Array:
        order = jnp.argsort(-probabilities, axis=-1)
        ordered = jnp.take_along_axis(probabilities, order, -1)
        within = jnp.cumsum(ordered, axis=-1) - ordered < 0.9
        return jnp.where(jnp.take_along_axis(within, jnp.argsort(order, axis=-1), -1), probabilities, 0)

    drawn = jax.random.exponential(jax.random.key(0), (rows, vocabulary))
    return Built(jax.jit(nucleus), lambda: (drawn / drawn.sum(-1, keepdims=True),))


def _step(name: str, kind: Kind, build: Callable[..., Built], *args: Any, **kwargs: Any) -> Step:
    return Step(name, kind, lambda small: build(*args, small=small, **kwargs))


STEPS = (
    _step("llama", "inference", _forward, llama, LLAMA_3, True),
    _step("llama_training", "training", training, difference(llama), LLAMA_3, batch=vectors),
    _step("vit", "inference", _forward, VIT, VIT_LARGE, False),
    _step("vit_training", "training", training, difference(VIT), VIT_LARGE, gated=False, batch=vectors),
    _step("gpt2", "inference", _forward, GPT, GPT_2, False),
    _step("gpt2_training", "training", training, language(GPT), GPT_2, gated=False),
    _step("scan_remat_adamw", "training", training, scanned, LLAMA, prepared=_stacked, donate_argnums=(0, 1)),
    _step(
        "multisteps",
        "training",
        training,
        language(GPT),
        LANGUAGE,
        gated=False,
        optimizer=optax.MultiSteps(optax.adamw(1e-4), 4),
    ),
    _step("llama_packed", "masked", training, packed, LLAMA, batch=_segmented),
    _step("llama_padded", "masked", training, padded, LLAMA, batch=_of_lengths),
    _step("prefill", "inference", _inference, 4, 2048, 4096),
    *(_step(f"decode_{batch}", "inference", _inference, batch, 1, 4096) for batch in (1, 8, 64)),
    _step("resnet_block", "no pattern", _resnet_block),
    _step("fft_filter", "no pattern", _fft_filter),
    _step("nucleus", "no pattern", _nucleus),
)
