"""A scatter of one number per row is computed as a selection, and no other scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from scheduler.rewriting.passes import Rewriter

LOGITS = np.random.default_rng(0).standard_normal((3, 5, 7), np.float32)
# Some are counted from the end, and some are out of bounds.
LABELS = np.array([[0, 6, 3, -1, -7], [2, 2, 2, 7, 9], [-8, 100, 5, 4, 0]])


def _rewritten(fn, *args):
    return Rewriter(lambda *_: None, lambda *_: None, lambda *_: None, "cpu").rewrite(jax.make_jaxpr(fn)(*args))


def _scatters(jaxpr) -> int:
    return str(jaxpr).count("scatter-add[")


def _picked(axis=-1, **how):
    def loss(x, i):
        logs = jax.nn.log_softmax(x, axis)
        return (jnp.take_along_axis(logs, jnp.expand_dims(i, axis), axis, **how) * jnp.cos(i + 1.0).mean()).sum()

    return jax.grad(loss)


SELECTED = {
    "labels": (_picked(), LOGITS, LABELS),
    "labels along the first axis": (_picked(0), LOGITS.transpose(2, 0, 1), LABELS),
    "labels along the middle axis": (_picked(1), LOGITS.transpose(1, 2, 0), LABELS.T),
    "labels that are clipped": (_picked(mode="clip"), LOGITS, LABELS),
    "labels of eight bits": (_picked(), np.tile(LOGITS, 40), LABELS.astype(np.int8)),
    "bfloat16": (_picked(), LOGITS.astype(jnp.bfloat16), LABELS),
    "one row": (_picked(), LOGITS[0, 0], LABELS[0, 0]),
    "a batch": (jax.vmap(_picked()), LOGITS, LABELS),
    "a scan": (lambda x, i: jax.lax.map(lambda each: _picked()(*each), (x, i)), LOGITS, LABELS),
    "checkpointed": (jax.checkpoint(_picked()), LOGITS, LABELS),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_scatter_of_one_number_per_row_becomes_a_selection(name):
    fn, *args = SELECTED[name]
    before, after = jax.make_jaxpr(fn)(*args), _rewritten(fn, *args)
    assert _scatters(before) > _scatters(after.jaxpr) == 0
    assert len(after.changes) == 1
    assert "scatter of one number per row" in after.changes[0]
    for expected, actual in zip(*(core.jaxpr_as_fun(x)(*args) for x in (before, after.jaxpr)), strict=True):
        np.testing.assert_allclose(np.float64(expected), np.float64(actual), rtol=1e-6, atol=1e-7)


KEPT = {
    "two numbers per row": (
        lambda x, i: jax.grad(lambda x: jnp.take_along_axis(x, i, -1).sum())(x),
        LOGITS,
        LABELS[:, :2, None].repeat(2, 2)[:, [0, 1, 0, 1, 0]],
    ),
    "an embedding": (lambda x, i: jax.grad(lambda x: x[i].sum())(x), LOGITS[0], LABELS),
    "numbers added to an array": (lambda x, i: x.at[jnp.arange(3), 0, i].add(1.0), LOGITS, LABELS[:, 0]),
}


@pytest.mark.parametrize("name", KEPT)
def test_any_other_scatter_is_kept(name):
    fn, *args = KEPT[name]
    before, after = jax.make_jaxpr(fn)(*args), _rewritten(fn, *args)
    assert _scatters(before) == _scatters(after.jaxpr) > 0
    assert after.changes == ()
