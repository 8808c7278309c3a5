"""Products with unaligned rows are computed with padded extents, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from scheduler.core import hardware as chips
from scheduler.model.cost import CostModel
from scheduler.rewriting.passes import Rewriter
from search_spaces.matmul import MatmulProblem
from search_spaces.problem import nbytes


def _changed(fn, *args, platform="cuda"):
    closed = jax.make_jaxpr(fn)(*args)
    return closed, Rewriter(lambda *_: None, lambda *_: None, lambda *_: None, platform).rewrite(closed)


def _normal(*shape, dtype=jnp.bfloat16):
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(dtype)


def _head(x, vocabulary):
    return jnp.sin((x @ vocabulary.T).astype(jnp.float32)).sum()


PADDED = {
    "columns": (lambda x, w: x @ w, _normal(512, 640), _normal(640, 1021)),
    "a contracted axis": (lambda x, w: x @ w, _normal(512, 1021), _normal(1021, 640)),
    "rows of the transposed result": (
        lambda x, w: jnp.einsum("km,kn->nm", x, w),
        _normal(640, 1021),
        _normal(640, 512),
    ),
    "several axes": (lambda x, w: jnp.einsum("abk,kn->abn", x, w), _normal(2, 256, 1021), _normal(1021, 513 * 2 - 3)),
    "a float32 result": (
        lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
        _normal(512, 640),
        _normal(640, 1021),
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_product_with_unaligned_rows_is_padded(name):
    fn, *args = PADDED[name]
    before, after = _changed(fn, *args)
    assert len(after.changes) == 1
    assert "padded to aligned rows" in after.changes[0]
    assert "1024" in str(after.jaxpr)
    for expected, actual in zip(*(core.jaxpr_as_fun(x)(*args) for x in (before, after.jaxpr)), strict=True):
        expected, actual = np.float64(expected), np.float64(actual)
        assert expected.shape == actual.shape
        np.testing.assert_allclose(expected, actual, rtol=2**-7, atol=0.05)


def test_all_products_of_the_head_of_a_language_model_are_padded():
    x, vocabulary = _normal(512, 640), _normal(1021, 640)
    before, after = _changed(jax.grad(_head, argnums=(0, 1)), x, vocabulary)
    assert len(after.changes) == 3
    for expected, actual in zip(
        *(core.jaxpr_as_fun(each)(x, vocabulary) for each in (before, after.jaxpr)), strict=True
    ):
        expected, actual = np.float64(expected), np.float64(actual)
        assert np.linalg.norm(expected - actual) <= 0.02 * np.linalg.norm(expected)


KEPT = {
    "aligned rows": (lambda x, w: x @ w, _normal(512, 640), _normal(640, 1024)),
    "an unaligned number of rows": (lambda x, w: x @ w, _normal(1021, 640), _normal(640, 1024)),
    "few rows": (lambda x, w: x @ w, _normal(16, 640), _normal(640, 1021)),
    "few columns, to which padding adds much": (lambda x, w: x @ w, _normal(512, 640), _normal(640, 513)),
    "float32": (lambda x, w: x @ w, _normal(512, 640, dtype=jnp.float32), _normal(640, 1021, dtype=jnp.float32)),
    "a batch": (lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w), _normal(2, 512, 640), _normal(2, 640, 1021)),
}


@pytest.mark.parametrize("name", KEPT)
def test_any_other_product_is_kept(name):
    fn, *args = KEPT[name]
    closed, after = _changed(fn, *args)
    assert after.jaxpr is closed


def test_products_are_padded_only_for_platforms_that_need_it():
    fn, *args = PADDED["columns"]
    closed, after = _changed(fn, *args, platform="cpu")
    assert after.jaxpr is closed


def _padded_s(p, model):
    """The predicted time of XLA's product with padded extents, and of the copies that pad and slice."""
    m, n, k = p.m, -(-p.n // 128) * 128, -(-p.k // 128) * 128
    wide = MatmulProblem(m, n, k)
    arrays = zip((*p.operands(), p.result()), (*wide.operands(), wide.result()), strict=True)
    copied = sum(nbytes(narrow) + nbytes(padded) for narrow, padded in arrays if narrow.shape != padded.shape)
    return model.library_seconds(wide) + copied / (model.in_force.library_e_hbm * model.hardware.hbm_bytes_per_s)


@pytest.mark.parametrize(
    "extents",
    [
        (4096, 4097, 4096),
        (4096, 4096, 4095),
        (4095, 4095, 4095),
        (8192, 50257, 768),
        (512, 50257, 768),
        (2048, 3000, 1001),
        (16, 4097, 4096),
        (4096, 4096, 4096),
    ],
    ids=str,
)
def test_products_are_padded_where_the_model_of_xla_predicts_a_gain(extents):
    problem, model = MatmulProblem(*extents), CostModel(chips.find("NVIDIA H200"))
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in problem.operands()]
    _, after = _changed(jnp.matmul, *operands)
    assert bool(after.changes) is (_padded_s(problem, model) < model.library_seconds(problem))
