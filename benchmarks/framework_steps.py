"""Training steps of a language model by layers of Flax, Equinox, Haiku and Keras, as their guides write them.

Each has a causal mask, learned positions and computation in bfloat16; parameters are float32 unless named. A framework
is imported when a step of it is built. The layers of attention are the frameworks' own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from plain_steps import BF16, F32, LANGUAGE, Array, Built, Shape, Step, cross_entropy, sized, words

DROPOUT = 0.1


def _nnx(
    s: Shape,
    optimizer: optax.GradientTransformation,
    param_dtype: Any = F32,
    use_bias: bool = True,
    dropout: float = 0,
    cached: bool = False,
) -> Built:
    """The miniGPT of JAX's tutorials, which drops results of attention and of the feed-forward layer.

    Args:
      cached: with `nnx.cached_partial`, as Flax's guide to performance advises.
    """
    from flax import nnx

    common = {"dtype": BF16, "param_dtype": param_dtype}

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            linear = functools.partial(nnx.Linear, use_bias=use_bias, rngs=rngs, **common)
            norm = functools.partial(nnx.LayerNorm, s.features, use_bias=use_bias, rngs=rngs, **common)
            self.norm, self.norm_ff = norm(), norm()
            self.attention = nnx.MultiHeadAttention(
                s.heads, s.features, use_bias=use_bias, decode=False, rngs=rngs, **common
            )
            self.up, self.down = linear(s.features, s.hidden), linear(s.hidden, s.features)
            self.dropout, self.dropout_ff = nnx.Dropout(dropout, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

        def __call__(self, x: Array, mask: Array) -> Array:
            x = x + self.dropout(self.attention(self.norm(x), mask=mask))
            return x + self.dropout_ff(self.down(nnx.gelu(self.up(self.norm_ff(x)))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.tokens = nnx.Embed(s.vocabulary, s.features, rngs=rngs, **common)
            self.positions = nnx.Embed(s.tokens, s.features, rngs=rngs, **common)
            self.blocks = nnx.List([Block(rngs) for _ in range(s.layers)])
            self.head = nnx.Linear(s.features, s.vocabulary, use_bias=use_bias, rngs=rngs, **common)

        def __call__(self, x: Array) -> Array:
            mask = nnx.make_causal_mask(x)
            y = self.tokens(x) + self.positions(jnp.arange(s.tokens))
            for block in self.blocks:
                y = block(y, mask)
            return self.head(y)

    def step(model: Model, optimizer: nnx.Optimizer, x: Array, labels: Array) -> Array:
        value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(x), labels))(model)
        optimizer.update(model, gradients)
        return value

    def arguments() -> tuple[Any, ...]:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param), *words(s)

    def bind(version: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
        return nnx.cached_partial(version, *args[:2]), args[2:]

    return Built(nnx.jit(step), arguments, **({"bind": bind} if cached else {}))


def _linen(s: Shape, optimizer: optax.GradientTransformation, dropout: float = 0) -> Built:
    """Flax's example lm1b, which drops attention's weights, too."""
    from flax import linen as nn
    from flax.training.train_state import TrainState

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Array, mask: Array, train: bool) -> Array:
            y = nn.LayerNorm(dtype=BF16)(x)
            y = nn.MultiHeadDotProductAttention(s.heads, dtype=BF16, dropout_rate=dropout, deterministic=not train)(
                y, mask=mask
            )
            x = x + nn.Dropout(dropout)(y, deterministic=not train)
            y = nn.gelu(nn.Dense(s.hidden, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x)))
            return x + nn.Dropout(dropout)(nn.Dense(s.features, dtype=BF16)(y), deterministic=not train)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Array, train: bool) -> Array:
            mask = nn.make_causal_mask(x)
            y = nn.Embed(s.vocabulary, s.features, dtype=BF16)(x)
            y = y + nn.Embed(s.tokens, s.features, dtype=BF16)(jnp.arange(s.tokens))
            for _ in range(s.layers):
                y = Block()(y, mask, train)
            return nn.Dense(s.vocabulary, dtype=BF16)(y)

    def step(state: TrainState, x: Array, labels: Array, key: Array) -> tuple[TrainState, Array]:
        def loss(params: Any) -> Array:
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            return cross_entropy(state.apply_fn({"params": params}, x, train=True, rngs=rngs), labels)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    model = Model()

    def arguments() -> tuple[Any, ...]:
        x, labels = words(s)
        params = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer), x, labels, jax.random.key(1)

    return Built(jax.jit(step), arguments, carried=1)


def _equinox(s: Shape, optimizer: optax.GradientTransformation) -> Built:
    """Equinox's example of a transformer: modules of one token or sequence under vmap, parameters cast in the loss."""
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        norm_ff: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Array) -> None:
            keys = jax.random.split(key, 3)
            self.norm, self.norm_ff = eqx.nn.LayerNorm(s.features), eqx.nn.LayerNorm(s.features)
            self.attention = eqx.nn.MultiheadAttention(s.heads, s.features, key=keys[0])
            self.up = eqx.nn.Linear(s.features, s.hidden, key=keys[1])
            self.down = eqx.nn.Linear(s.hidden, s.features, key=keys[2])

        def __call__(self, x: Array, mask: Array) -> Array:
            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y, mask)
            y = jax.vmap(self.up)(jax.vmap(self.norm_ff)(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(y))

    class Model(eqx.Module):
        tokens: eqx.nn.Embedding
        positions: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: Array) -> None:
            keys = jax.random.split(key, s.layers + 3)
            self.tokens = eqx.nn.Embedding(s.vocabulary, s.features, key=keys[0])
            self.positions = eqx.nn.Embedding(s.tokens, s.features, key=keys[1])
            self.head = eqx.nn.Linear(s.features, s.vocabulary, key=keys[2])
            self.blocks = [Block(key) for key in keys[3:]]

        def __call__(self, x: Array) -> Array:
            y = jax.vmap(self.tokens)(x) + jax.vmap(self.positions)(jnp.arange(s.tokens))
            mask = jnp.tril(jnp.ones((s.tokens, s.tokens), bool))
            for block in self.blocks:
                y = block(y, mask)
            return jax.vmap(self.head)(y)

    def loss(model: Model, x: Array, labels: Array) -> Array:
        narrow = jax.tree.map(lambda w: w.astype(BF16) if eqx.is_inexact_array(w) else w, model)
        return cross_entropy(jax.vmap(narrow)(x), labels)

    def step(model: Model, state: Any, x: Array, labels: Array) -> tuple[Model, Any, Array]:
        value, gradients = eqx.filter_value_and_grad(loss)(model, x, labels)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    def arguments() -> tuple[Any, ...]:
        model = Model(jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), *words(s)

    return Built(eqx.filter_jit(step), arguments, carried=2)


def _haiku(s: Shape, optimizer: optax.GradientTransformation) -> Built:
    """Haiku's example of a transformer, with a policy of jmp."""
    import haiku as hk
    import jmp

    class Model(hk.Module):
        def __call__(self, x: Array) -> Array:
            init = hk.initializers.VarianceScaling(2 / s.layers)
            mask = jnp.tril(jnp.ones((1, 1, s.tokens, s.tokens)))
            y = hk.Embed(s.vocabulary, s.features)(x) + hk.Embed(s.tokens, s.features)(jnp.arange(s.tokens))
            for _ in range(s.layers):
                z = hk.LayerNorm(-1, True, True)(y)
                attention = hk.MultiHeadAttention(s.heads, s.head_dim, model_size=s.features, w_init=init)
                y = y + attention(z, z, z, mask=mask)
                feed_forward = hk.Sequential(
                    [hk.Linear(s.hidden, w_init=init), jax.nn.gelu, hk.Linear(s.features, w_init=init)]
                )
                y = y + feed_forward(hk.LayerNorm(-1, True, True)(y))
            return hk.Linear(s.vocabulary)(y)

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=bfloat16")

    def forward(x: Array) -> Array:
        with hk.mixed_precision.push_policy(Model, policy):
            return Model()(x)

    model = hk.without_apply_rng(hk.transform(forward))

    def step(params: Any, state: Any, x: Array, labels: Array) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(lambda params: cross_entropy(model.apply(params, x), labels))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def arguments() -> tuple[Any, ...]:
        x, labels = words(s)
        params = jax.jit(model.init)(jax.random.key(0), x)
        return params, optimizer.init(params), x, labels

    return Built(jax.jit(step), arguments, carried=2)


def _keras(s: Shape) -> Built:
    """As the guide "Writing a training loop from scratch in JAX" of keras.io, with its optimizer AdamW."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers, dtype = keras.layers, "mixed_bfloat16"
    x = keras.Input((s.tokens,), dtype="int32")
    y = layers.Embedding(s.vocabulary, s.features, dtype=dtype)(x)
    y = y + layers.Embedding(s.tokens, s.features, dtype=dtype)(jnp.arange(s.tokens)[None])
    for _ in range(s.layers):
        z = layers.LayerNormalization(dtype=dtype)(y)
        y = y + layers.MultiHeadAttention(s.heads, s.head_dim, dtype=dtype)(z, z, use_causal_mask=True)
        z = layers.Dense(s.hidden, "gelu", dtype=dtype)(layers.LayerNormalization(dtype=dtype)(y))
        y = y + layers.Dense(s.features, dtype=dtype)(z)
    model = keras.Model(x, layers.Dense(s.vocabulary, dtype=dtype)(y))
    optimizer = keras.optimizers.AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trainable: Any, others: Any, x: Array, labels: Array) -> tuple[Array, Any]:
        logits, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of(labels, logits), others

    def step(state: Any, x: Array, labels: Array) -> tuple[Any, Array]:
        trainable, others, of_optimizer = state
        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, others, x, labels)
        trainable, of_optimizer = optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return (trainable, others, of_optimizer), value

    def arguments() -> tuple[Any, ...]:
        of = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        return tuple([variable.value for variable in each] for each in of), *words(s)

    return Built(jax.jit(step), arguments, carried=1)


def _step(name: str, build: Callable[..., Built], *args: Any, **kwargs: Any) -> Step:
    return Step(name, "training", lambda small: build(sized(LANGUAGE, small), *args, **kwargs))


ADAMW = optax.adamw(1e-4)
STEPS = (
    _step("nnx_sgd", _nnx, optax.sgd(1e-2), param_dtype=BF16),
    _step("nnx_adamw", _nnx, ADAMW),
    _step("nnx_adamw_dropout", _nnx, ADAMW, dropout=DROPOUT),
    _step("nnx_adamw_no_bias", _nnx, ADAMW, use_bias=False),
    _step("nnx_adamw_cached", _nnx, ADAMW, cached=True),
    _step("linen_adamw", _linen, ADAMW),
    _step("linen_lion_clipped", _linen, optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-5))),
    _step("linen_adafactor_dropout", _linen, optax.adafactor(1e-3), dropout=DROPOUT),
    _step("equinox_adamw", _equinox, ADAMW),
    _step("haiku_adamw", _haiku, ADAMW),
    _step("keras_adamw", _keras),
)
