"""What tuned calls on divided arrays do on eight devices; `test_sharded.py` runs it in a process that has so many."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import scheduler
from scheduler import (
    tuned_flash_attention,
    tuned_gated_matmul,
    tuned_gated_ragged_dot,
    tuned_matmul,
    tuned_ragged_dot,
    tuned_rms_norm,
    tuned_silu_and_mul,
    tuned_softmax,
)
from scheduler.store import misses
from scheduler.store.store import default_url

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Axes "x" of 4 devices and "y" of 2; or "data" of 2 and "model" of 4.
AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
MODEL = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

A, B = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 32), (32, 48)]))
pallas = functools.partial(tuned_matmul, backends="pallas")


@pytest.fixture(autouse=True)
def _no_answers():
    scheduler.reload()


def put(x, *spec, on=AUTO):
    return jax.device_put(x, NamedSharding(on, P(*spec)))


def close(actual, expected, rtol=1e-4, atol=1e-4):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@contextlib.contextmanager
def compiler_output(found):
    """What XLA writes to this process's standard error."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        found.append(file.read().decode(errors="replace"))


def compiled(f, *args):
    """The compiled function, its collectives, and whether XLA complained about how it had to move arrays."""
    said = []
    with compiler_output(said):
        program = jax.jit(f).lower(*args).compile()
    text = program.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return program, {name: n for name, n in counts.items() if n}, "Involuntary full rematerialization" in said[0]


def same_movement(ours, theirs, *args, **tolerance):
    """Numbers, shardings and collectives of `ours` are those of `theirs`; returns the collectives."""
    (mine, moved, complained), (other, expected, excused) = compiled(ours, *args), compiled(theirs, *args)
    close(mine(*args), other(*args), **tolerance)
    for x, y in zip(jax.tree.leaves(mine(*args)), jax.tree.leaves(other(*args)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert moved == expected
    assert excused or not complained
    return moved


@contextlib.contextmanager
def asked(caplog):
    """The problems that devices ask for."""
    found = []
    with caplog.at_level(logging.DEBUG, "scheduler"):
        caplog.clear()
        yield found
    found += [
        m[1] for r in caplog.records if (m := re.search(r"each device runs ([^;,]*)", r.getMessage())) is not None
    ]


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (("x",), (), "m=16 n=48 k=32 dtype=float32"),
        ((), (None, "y"), "m=64 n=24 k=32 dtype=float32"),
        (("x",), (None, "y"), "m=16 n=24 k=32 dtype=float32"),
        ((None, "x"), ("x",), "m=64 n=48 k=8 dtype=float32"),
        (("x", "y"), ("y",), "m=16 n=48 k=16 dtype=float32"),
        ((None, "y"), (), "m=64 n=48 k=32 dtype=float32"),  # gathered: b is whole along k
        (("x",), ("x",), "m=16 n=48 k=32 dtype=float32"),  # b is gathered
        ((("x", "y"),), (), "m=8 n=48 k=32 dtype=float32"),
        (("x",), (None, "x"), None),  # one of the two is gathered, as Shardy has it
        ((), (), None),
    ],
)
def test_a_product_is_divided_as_jnp_matmul_is(a, b, problem, caplog):
    args = put(A, *a), put(B, *b)
    same_movement(pallas, jnp.matmul, *args)
    scheduler.reload()
    with asked(caplog) as problems:
        jax.jit(lambda *args: pallas(*args)).lower(*args).compile()
    assert problem is None or problems == [problem]


@pytest.mark.parametrize("out", [("x",), (None, "x"), ("x", "y"), (("x", "y"),)])
@pytest.mark.parametrize(("a", "b"), [(("x",), ()), ((None, "x"), ("x",))])
def test_a_result_that_is_wanted_otherwise_takes_no_more_than_jnp_matmul(a, b, out):
    def wanted(product):
        return lambda x, w: lax.with_sharding_constraint(product(x, w), NamedSharding(AUTO, P(*out)))

    args = put(A, *a), put(B, *b)
    if b == ():
        same_movement(wanted(pallas), wanted(jnp.matmul), *args)
        return
    (mine, moved, complained), (other, expected, _) = (
        compiled(wanted(pallas), *args),
        compiled(wanted(jnp.matmul), *args),
    )
    assert expected == {"all-reduce": 1}
    assert (moved, complained) == ({"reduce-scatter": 1}, False)
    close(mine(*args), other(*args))


def test_62_rows_over_4_devices_are_computed_whole():
    def odd(product):
        return lambda a, b: product(lax.with_sharding_constraint(a[:62], NamedSharding(AUTO, P("x"))), b)

    close(jax.jit(odd(pallas))(A, B), A[:62] @ B)


def test_batched_and_transposed_operands_and_leading_axes():
    x, y = jax.random.normal(jax.random.key(2), (8, 16, 32)), jax.random.normal(jax.random.key(3), (8, 48, 32))
    transposed = functools.partial(pallas, transpose_b=True)
    same_movement(transposed, lambda x, y: jnp.matmul(x, y.swapaxes(1, 2)), put(x, "x"), put(y, "x", "y"))
    same_movement(pallas, jnp.matmul, put(x, "x"), put(B, None, "y"))


def test_an_epilogue_follows_the_sum_over_devices():
    bias, residual = jnp.linspace(-1, 1, 48), jnp.flip(A @ B)

    def ours(a, b, bias, residual):
        return pallas(a, b, bias=bias, activation="gelu", residual=residual)

    def plain(a, b, bias, residual):
        return jax.nn.gelu(a @ b + bias) + residual

    args = put(A, "y", "x"), put(B, "x"), put(bias), put(residual, "y")
    close(jax.jit(ours)(*args), plain(A, B, bias, residual))
    grads = [jax.jit(jax.grad(lambda *xs, f=f: (f(*xs) ** 2).sum(), (0, 1, 2, 3)))(*args) for f in (ours, plain)]
    close(*grads, rtol=1e-3, atol=1e-2)


def test_a_sum_over_devices_is_one_of_rounded_products():
    a, b = (x.astype(jnp.bfloat16) for x in (A, B))
    result = jax.jit(pallas)(put(a, None, "x"), put(b, "x"))
    parts = jnp.einsum("mdk,dkn->dmn", a.reshape(64, 4, 8), b.reshape(4, 8, 48), preferred_element_type=jnp.float32)
    assert result.dtype == jnp.bfloat16
    rounding = 2.0**-8 * (jnp.abs(parts).sum(0) + jnp.abs(parts.sum(0)))
    assert (jnp.abs(result - parts.sum(0)) <= rounding).all()


def test_columns_in_several_arrays_stay_whole_and_rows_are_divided(caplog):
    def ours(a, b):
        return tuned_matmul(a, b, split_sizes=(32, 16), backends="pallas")

    def plain(a, b):
        c = a @ b
        return c[:, :32], c[:, 32:]

    same_movement(ours, plain, put(A, "x"), put(B))
    close(jax.jit(ours)(put(A, None, "x"), put(B, "x")), plain(A, B))


def test_a_mlp_divided_by_columns_then_rows_takes_one_all_reduce():
    def mlp(product):
        def run(x, up, down):
            return product(jax.nn.silu(product(x, up)), down)

        return run

    up, down = B / 8, B.T / 8
    args = put(A, "data", on=MODEL), put(up, None, "model", on=MODEL), put(down, "model", on=MODEL)
    assert same_movement(mlp(pallas), mlp(jnp.matmul), *args) == {"all-reduce": 1}

    def gradient(product):
        return jax.grad(lambda *args: (mlp(product)(*args) ** 2).sum(), (0, 1, 2))

    moved = same_movement(gradient(pallas), gradient(jnp.matmul), *args, rtol=1e-3, atol=1e-3)
    assert "all-gather" not in moved


def test_a_gated_product_of_a_pair_is_divided_by_columns_and_rows():
    x, gate, up = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16), jnp.flip(B).astype(jnp.bfloat16)

    def ours(x, gate, up):
        return tuned_gated_matmul(x / 6, (gate, up), backends="pallas")

    def plain(x, gate, up):
        return (jax.nn.silu((x / 6) @ gate) * ((x / 6) @ up)).astype(x.dtype)

    args = put(x, "data", on=MODEL), put(gate, None, "model", on=MODEL), put(up, None, "model", on=MODEL)
    assert same_movement(ours, plain, *args, rtol=0.05, atol=0.05) == {}
    joined = jnp.concatenate([gate, up], axis=1)
    close(jax.jit(tuned_gated_matmul)(put(x / 6, "x"), put(joined)), plain(x, gate, up), rtol=0.05, atol=0.05)


def grouped(*, gated):
    """Operands of a grouped product: 8 experts, sizes of groups that leave rows of no group, and XLA's own result."""
    w, up = (jax.random.normal(jax.random.key(i), (8, 32, 48)) for i in (5, 6))
    sizes = jnp.array([9, 0, 20, 1, 5, 0, 13, 8], jnp.int32)
    gate = lax.ragged_dot(A, w, sizes)
    return w, up, sizes, jax.nn.silu(gate) * lax.ragged_dot(A, up, sizes) if gated else gate


@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_divided_by_their_offset(gated):
    w, up, sizes, expected = grouped(gated=gated)

    def part(x, w, up, sizes):
        first = lax.axis_index("x")[None] * w.shape[0]
        how = {"group_offset": first, "backends": "pallas"}
        own = tuned_gated_ragged_dot(x, w, up, sizes, **how) if gated else tuned_ragged_dot(x, w, sizes, **how)
        return lax.psum(own, "x")

    specs = P(), P("x"), P("x"), P()
    mapped = jax.shard_map(part, mesh=AUTO, in_specs=specs, out_specs=P())
    close(jax.jit(mapped)(A, w, up, sizes), expected, rtol=1e-3, atol=1e-3)

    def gradients(function):
        return jax.jit(jax.grad(lambda x, w, up: (function(x, w, up) ** 2).sum(), (0, 1, 2)))(A, w, up)

    def plain(x, w, up):
        gate = lax.ragged_dot(x, w, sizes)
        return jax.nn.silu(gate) * lax.ragged_dot(x, up, sizes) if gated else gate

    ours = gradients(lambda x, w, up: mapped(x, w, up, sizes))
    for mine, theirs in zip(ours, gradients(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-2)


def test_a_grouped_product_on_explicit_axes_raises_the_error_of_jax():
    w, _, sizes, _ = grouped(gated=False)
    args = (jax.device_put(x, NamedSharding(EXPLICIT, P())) for x in (A, w, sizes))
    with pytest.raises(NotImplementedError, match="specify out_sharding"):
        tuned_ragged_dot(*args)


def test_a_grouped_product_is_divided_by_columns_and_summed_over_a_divided_k():
    w, up, sizes, expected = grouped(gated=False)
    call = jax.jit(functools.partial(tuned_ragged_dot, backends="pallas"))
    for specs in (((), (None, None, "x")), ((None, "x"), (None, "x"))):
        args = put(A, *specs[0]), put(w, *specs[1]), put(sizes)
        close(call(*args), expected, rtol=1e-3, atol=1e-3)
        assert "while" in call.lower(*args).compile().as_text()
    gate = jax.jit(functools.partial(tuned_gated_ragged_dot, backends="pallas"))
    args = put(A), put(w, None, None, "x"), put(up, None, None, "x"), put(sizes)
    close(gate(*args), grouped(gated=True)[3], rtol=1e-3, atol=1e-3)

    def gradients(product):
        return jax.grad(lambda x, w: (product(x, w, sizes) ** 2).sum(), (0, 1))

    args = put(A), put(w, None, None, "x")
    for mine, theirs in zip(jax.jit(gradients(call))(*args), gradients(lax.ragged_dot)(A, w), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-2)


WEIGHT = jnp.linspace(0.5, 2, 32)
ROWS = {
    "softmax": (functools.partial(tuned_softmax, backends="pallas"), jax.nn.softmax),
    "rms_norm": (
        lambda x: tuned_rms_norm(x, WEIGHT, backends="pallas"),
        lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * WEIGHT,
    ),
    "silu_and_mul": (
        functools.partial(tuned_silu_and_mul, backends="pallas"),
        lambda x: jax.nn.silu(x[..., :16]) * x[..., 16:],
    ),
    "add_rms_norm": (
        lambda x: tuned_rms_norm(x, WEIGHT, residual=jnp.cos(x), backends="pallas"),
        lambda x: (lambda t: (t * lax.rsqrt((t * t).mean(-1, keepdims=True) + 1e-6) * WEIGHT, t))(x + jnp.cos(x)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_divided_by_data_need_no_collective(name):
    ours, plain = ROWS[name]
    x = put(A.reshape(8, 8, 32), ("x", "y"))
    assert same_movement(ours, plain, x) == {}

    def gradient(f):
        return jax.grad(lambda x: sum((y**2).sum() for y in jax.tree.leaves(f(x))))

    if name != "add_rms_norm":
        assert same_movement(gradient(ours), gradient(plain), x, rtol=1e-3) == {}


def test_rows_divided_along_their_columns_are_gathered():
    close(jax.jit(ROWS["softmax"][0])(put(A, "y", "x")), jax.nn.softmax(A))


def test_axes_around_the_columns_of_rows_may_be_divided():
    def gradient(f):
        return jax.grad(lambda x: (f(x) ** 2).sum())

    x = put(A.reshape(8, 8, 32), "x", None, "y")
    ours, plain = (functools.partial(f, axis=1) for f in (tuned_softmax, jax.nn.softmax))
    assert same_movement(ours, plain, x) == {}
    assert same_movement(gradient(ours), gradient(plain), x, rtol=1e-3) == {}
    close(jax.jit(ours)(put(A.reshape(8, 8, 32), "x", None, "y", on=EXPLICIT)), plain(A.reshape(8, 8, 32)))


QKV = [jax.random.normal(jax.random.key(i), (4, 16, heads, 16)) for i, heads in enumerate((8, 4, 4))]


def attention(q, k, v, **options):
    return tuned_flash_attention(q, k, v, causal=True, backends="pallas", **options)


def plain_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def test_attention_divided_by_sequences_and_heads_needs_no_collective_either_way(caplog):
    args = [put(x, "data", None, "model", on=MODEL) for x in QKV]
    with asked(caplog) as problems:
        program, moved, complained = compiled(attention, *args)
    assert problems == ["batch=2 q_len=16 kv_len=16 heads=2 kv_heads=1 head_dim=16 causal=True dtype=float32"]
    assert (moved, complained) == ({}, False)
    close(program(*args), plain_attention(*QKV))

    def gradient(f):
        return jax.grad(lambda *qkv: jnp.sin(f(*qkv)).sum(), (0, 1, 2))

    program, moved, complained = compiled(gradient(attention), *args)
    assert (moved, complained) == ({}, False)
    close(program(*args), gradient(plain_attention)(*QKV), rtol=1e-3, atol=1e-3)


def test_more_devices_than_key_heads_each_have_some_queries_of_a_group(caplog):
    q, k, v = QKV[0], QKV[1][:, :, :2], QKV[2][:, :, :2]
    args = put(q, None, None, "model", on=MODEL), put(k, on=MODEL), put(v, on=MODEL)
    with asked(caplog) as problems:
        program, moved, _ = compiled(attention, *args)
    assert problems == ["batch=4 q_len=16 kv_len=16 heads=2 kv_heads=1 head_dim=16 causal=True dtype=float32"]
    assert moved == {}
    close(program(*args), plain_attention(q, k, v))

    def gradient(f):
        return jax.jit(jax.grad(lambda *qkv: jnp.sin(f(*qkv)).sum(), (0, 1, 2)))

    close(gradient(attention)(*args), gradient(plain_attention)(q, k, v), rtol=1e-3, atol=1e-3)


def test_lengths_and_the_log_sum_exp_are_divided_with_the_sequences():
    lengths = jnp.array([16, 5, 7, 1], "int32")
    args = [put(x, "x") for x in (*QKV, lengths)]

    def ours(q, k, v, n, **how):
        return tuned_flash_attention(q, k, v, kv_lengths=n, return_lse=True, **how)

    program, moved, _ = compiled(functools.partial(ours, backends="pallas"), *args)
    assert moved == {}
    close(program(*args), ours(*QKV, lengths, backends="xla"))


# Leading axes of which each is divided, with several elements of each on a device: those of one device are no rows.
LEADING = jax.random.normal(jax.random.key(20), (8, 64, 32))
COLUMNS_BIAS, LEADING_RESIDUAL = jnp.linspace(-1, 1, 48), jnp.cos(LEADING @ B)


def gated(x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return tuned_gated_matmul(x, w, backends="pallas")


def plainly_gated(x, w):
    h = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return (jax.nn.silu(h[..., :24].astype(jnp.float32)) * h[..., 24:]).astype(jnp.bfloat16)


def split(x, w):
    return tuned_matmul(x, w, split_sizes=(32, 16), backends="pallas")


FOLDED = {
    "a product": (pallas, jnp.matmul, ()),
    "with an epilogue": (
        lambda x, w, c, r: tuned_matmul(x, w, bias=c, activation="gelu", residual=r, backends="pallas"),
        lambda x, w, c, r: jax.nn.gelu(x @ w + c) + r,
        (COLUMNS_BIAS, LEADING_RESIDUAL),
    ),
    "in several arrays": (split, lambda x, w: ((x @ w)[..., :32], (x @ w)[..., 32:]), ()),
    "transposed": (lambda x, w: tuned_matmul(x.mT, w, transpose_a=True, backends="pallas"), jnp.matmul, ()),
    "vmapped": (jax.vmap(pallas, (0, None)), jnp.matmul, ()),
    "vmapped along its rows": (jax.vmap(pallas, (1, None), 1), jnp.matmul, ()),
    "gated": (gated, plainly_gated, ()),
}


@pytest.mark.parametrize("name", FOLDED)
def test_each_leading_axis_may_be_divided(name):
    ours, plain, added = FOLDED[name]
    spec = ("data", "model")
    args = put(LEADING, *spec, on=MODEL), put(B, on=MODEL), *(put(x, *spec[: x.ndim - 1], on=MODEL) for x in added)
    tolerance = {"rtol": 0.05, "atol": 0.05} if name == "gated" else {}
    assert same_movement(ours, plain, *args, **tolerance) == {}
    scheduler.reload()

    def gradient(f):
        return jax.grad(lambda *xs: sum((y**2).sum() for y in jax.tree.leaves(f(*xs))), tuple(range(len(args))))

    (mine, moved, complained), (other, expected, _) = compiled(gradient(ours), *args), compiled(gradient(plain), *args)
    assert set(moved) == {"all-reduce"} == set(expected)  # of the weights' gradients; XLA takes one for each mesh axis
    assert not complained
    if name != "gated":  # sums of bfloat16 over devices, in another order
        close(mine(*args), other(*args), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_each_leading_axis_of_rows_may_be_divided(name, mapped):
    ours, plain = ROWS[name]
    ours = jax.vmap(ours) if mapped else ours
    x = put(LEADING, "data", "model", on=MODEL)
    assert same_movement(ours, plain, x) == {}

    def gradient(f):
        return jax.grad(lambda x: sum((y**2).sum() for y in jax.tree.leaves(f(x))))

    assert same_movement(gradient(ours), gradient(plain), x, rtol=1e-3, atol=1e-3) == {}


def test_each_leading_axis_of_batches_and_of_mapped_attention_may_be_divided():
    a, b = (jax.random.normal(jax.random.key(i), (4, 8, *shape)) for i, shape in enumerate([(6, 32), (32, 16)]))
    assert same_movement(pallas, jnp.matmul, *(put(x, "data", "model", on=MODEL) for x in (a, b))) == {}
    qkv = [jax.random.normal(jax.random.key(i), (4, 8, 16, heads, 16)) for i, heads in enumerate((4, 2, 2))]
    args = [put(x, "data", "model", on=MODEL) for x in qkv]

    def gradient(f):
        return jax.grad(lambda *qkv: jnp.sin(f(*qkv)).sum(), (0, 1, 2))

    ours, plain = jax.vmap(attention), jax.vmap(plain_attention)
    assert same_movement(ours, plain, *args, rtol=1e-3, atol=1e-3) == {}
    assert same_movement(gradient(ours), gradient(plain), *args, rtol=1e-3, atol=1e-3) == {}


def test_a_scan_over_layers_keeps_leading_axes_apart():
    ws = put(jax.random.normal(jax.random.key(21), (3, 32, 32)) / 6, on=MODEL)
    x = put(LEADING, "data", "model", on=MODEL)

    def loss(product):
        def run(x, ws):
            return (lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, ws)[0] ** 2).sum()

        return jax.grad(run, (0, 1))

    (mine, moved, _), (other, expected, _) = compiled(loss(pallas), x, ws), compiled(loss(jnp.matmul), x, ws)
    assert set(moved) == {"all-reduce"} == set(expected)
    close(mine(x, ws), other(x, ws), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "added"), [(("data", "model"), "residual"), (("data", None, "model"), "residual"), ((), "bias"), ((), "")]
)
def test_a_sum_over_devices_is_scattered_where_the_result_is_wanted_divided(spec, added):
    x, residual = jax.random.normal(jax.random.key(22), (4, 16, 32)), jax.random.normal(jax.random.key(23), (4, 16, 48))
    args = [put(x, "data", None, "model", on=MODEL), put(B, "model", on=MODEL)]
    more = {"residual": put(residual, *spec, on=MODEL), "bias": put(COLUMNS_BIAS, "model", on=MODEL)}
    args += [more[added]] if added else []
    out = NamedSharding(MODEL, P(*(spec or ("data", None, "model"))))

    def ours(x, w, *rest):
        return lax.with_sharding_constraint(pallas(x, w, **dict(zip([added], rest, strict=False))), out)

    def plain(x, w, *rest):
        return lax.with_sharding_constraint(sum(rest, x @ w), out)

    program, moved, complained = compiled(ours, *args)
    assert (moved, complained) == ({"reduce-scatter": 1}, False)  # half of what an all-reduce moves
    assert program(*args).sharding.is_equivalent_to(out, 3)
    close(program(*args), jax.jit(plain)(*args), rtol=1e-3, atol=1e-3)


def test_a_megatron_block_takes_one_all_reduce_and_no_gather():
    keys = jax.random.split(jax.random.key(7), 4)
    wq, wk, wv, wo = (jax.random.normal(key, (128, 128)) / 12 for key in keys)
    x = jax.random.normal(jax.random.key(8), (4, 16, 128))

    def block(product, attend):
        def run(x, wq, wk, wv, wo):
            q, k, v = (product(x, w).reshape(4, 16, 8, 16) for w in (wq, wk, wv))
            return product(attend(q, k, v).reshape(4, 16, 128), wo)

        return run

    columns = [put(w, None, "model", on=MODEL) for w in (wq, wk, wv)]
    args = put(x, "data", on=MODEL), *columns, put(wo, "model", on=MODEL)
    program, moved, complained = compiled(block(pallas, attention), *args)
    assert (moved, complained) == ({"all-reduce": 1}, False)
    close(program(*args), block(jnp.matmul, plain_attention)(x, wq, wk, wv, wo), rtol=1e-3, atol=1e-3)


def layers(product):
    def run(x, ws):
        def layer(x, w):
            return jnp.tanh(product(x, w)), None

        return lax.scan(jax.checkpoint(layer), x, ws)[0]

    return run


def test_scans_remat_and_their_gradients_move_what_jnp_matmul_moves():
    ws = jnp.stack([B @ B.T / 50] * 3)
    args = put(A, "x"), put(ws, None, None, "y")
    same_movement(layers(pallas), layers(jnp.matmul), *args)

    def gradient(product):
        return jax.grad(lambda *args: layers(product)(*args).sum(), (0, 1))

    close(jax.jit(gradient(pallas))(*args), gradient(jnp.matmul)(A, ws), rtol=1e-3, atol=1e-3)


def test_vmap_and_jvp_of_divided_arrays():
    x = put(A.reshape(4, 16, 32), "x")
    same_movement(jax.vmap(pallas, (0, None)), jax.vmap(jnp.matmul, (0, None)), x, put(B, None, "y"))

    def moved(product):
        return lambda a, b: jax.jvp(product, (a, b), (b.T[:32].sum() + a, 2 * b))

    close(jax.jit(moved(pallas))(put(A, "x"), put(B)), moved(jnp.matmul)(A, B), rtol=1e-3, atol=1e-3)


def test_eager_calls_under_a_mesh_and_two_meshes_in_one_program():
    other = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    close(pallas(put(A, "x"), put(B, None, "y")), A @ B)
    close(jax.jit(pallas)(put(A, "x"), put(B, None, ("c", "a"), on=other)), A @ B)
    with jax.set_mesh(AUTO):
        close(jax.jit(pallas)(put(A, "x"), put(B, None, "y")), A @ B)


def test_meshes_of_any_size_are_understood():
    for sizes in ((2, 3), (3, 2), (6,)):
        axes = ("x", "y")[: len(sizes)]
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(sizes), axes)
        close(
            jax.jit(pallas)(put(A[:60], "x", on=mesh), put(B, None, axes[-1] if axes[1:] else None, on=mesh)),
            A[:60] @ B,
        )


def test_policies_are_those_of_the_part(caplog):
    args = put(A, "x"), put(B)
    with pytest.raises(scheduler.CacheMiss, match="m=16 n=48 k=32 dtype=float32"):
        tuned_matmul(*args, on_miss="error")
    with pytest.raises(RuntimeError, match="CacheMiss: no schedule for matmul m=16 n=48 k=32 dtype=float32"):
        jax.jit(lambda *args: tuned_matmul(*args, on_miss="error"))(*args)
    with pytest.warns(RuntimeWarning, match="m=16 n=48 k=32 .*one device's shard of a call.*tile-scheduler tune"):
        close(tuned_matmul(*args, on_miss="tune"), A @ B)
    close(tuned_matmul(*args, on_miss="xla"), A @ B)
    schedule = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "minor": "m"}
    with pytest.raises(scheduler.IllegalSchedule, match="m=16 n=48"):
        tuned_matmul(*args, schedule={"tile_m": 12345}, backends="interpret")
    close(tuned_matmul(*args, schedule=schedule), A @ B)


def test_a_part_that_nobody_answered_is_noted_with_the_line_of_the_call(monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    scheduler.reload()

    def step(a, b):
        return tuned_matmul(a, b)  # this line asks

    jax.jit(step)(put(A, "x"), put(B))
    assert misses.flush_misses(600)
    with contextlib.closing(scheduler.Store(default_url())) as store:
        (miss,) = store.misses.all()
    assert miss.key.problem == '{"dtype":"float32","k":32,"m":16,"n":48}'
    assert miss.line == f"{__file__}:{step.__code__.co_firstlineno + 1}"


def test_an_export_is_left_to_the_library_in_words(caplog):
    args = put(A, "x"), put(B)
    with pytest.raises(scheduler.NoCandidate, match=r"`jax.export` keeps no call"):
        jax.export.export(jax.jit(pallas))(*args)
    exported = jax.export.export(jax.jit(tuned_matmul))(*args)
    close(exported.call(*args), A @ B)


def typed(f, *args):
    return str(jax.typeof(jax.jit(f)(*args)))


@pytest.mark.parametrize(
    ("a", "b"), [(("x",), ()), ((), (None, "y")), (("x",), (None, "y")), ((("x", "y"),), ()), ((), ())]
)
def test_on_explicit_axes_a_kernel_answers_with_the_type_of_jnp_matmul(a, b):
    a, b = put(A, *a, on=EXPLICIT), put(B, *b, on=EXPLICIT)
    close(pallas(a, b), A @ B)
    assert typed(pallas, a, b) == typed(jnp.matmul, a, b)
    gradients = [jax.jit(jax.grad(lambda *xs, f=f: (f(*xs) ** 2).sum(), (0, 1)))(a, b) for f in (pallas, jnp.matmul)]
    close(*gradients, rtol=1e-3, atol=1e-3)
    assert [str(jax.typeof(x)) for x in gradients[0]] == [str(jax.typeof(x)) for x in gradients[1]]


@pytest.mark.parametrize(("a", "b"), [(("x", "y"), ("y",)), (("x",), (None, "x"))])
def test_on_explicit_axes_what_jnp_matmul_refuses_is_refused_in_its_words(a, b):
    a, b = put(A, *a, on=EXPLICIT), put(B, *b, on=EXPLICIT)
    found = []
    for product in (tuned_matmul, jnp.matmul):
        with pytest.raises(Exception, match=r"[Ss]hard") as caught:
            jax.jit(product)(a, b)
        found.append((type(caught.value), str(caught.value)))
    assert found[0] == found[1]


def test_on_explicit_axes_what_would_be_gathered_is_the_librarys_and_each_leading_axis_may_be_divided():
    x = A.reshape(8, 8, 32)
    for spec in (("x", "y"), (None, "x")):
        args = put(x, *spec, on=EXPLICIT), put(B, on=EXPLICIT)
        close(pallas(*args), x @ B)
        assert typed(pallas, *args) == typed(jnp.matmul, *args)
        gradients = [
            jax.jit(jax.grad(lambda *xs, f=f: (f(*xs) ** 2).sum(), (0, 1)))(*args) for f in (pallas, jnp.matmul)
        ]
        close(*gradients, rtol=1e-3, atol=1e-3)
        assert [str(jax.typeof(x)) for x in gradients[0]] == [str(jax.typeof(x)) for x in gradients[1]]
    for spec in (("x", None, "y"), (None, None, ("x", "y"))):
        args = put(x, *spec, on=EXPLICIT), put(B, on=EXPLICIT)
        close(jax.jit(tuned_matmul)(*args), x @ B)
        assert typed(tuned_matmul, *args) == typed(jnp.matmul, *args)
        with pytest.raises(scheduler.NoCandidate, match="on a mesh with explicit axes"):
            pallas(*args)
    args = put(x, "x", on=EXPLICIT), put(B, None, "y", on=EXPLICIT)
    assert typed(pallas, *args) == "float32[8@x,8,48@y]"


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axes", [("x",), ("x", None, "y")], ids=str)
def test_a_vmap_over_an_axis_that_an_explicit_mesh_divides_is_the_librarys(axes, how):
    one_axis = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    for mesh in (EXPLICIT, one_axis) if len(axes) == 1 else (EXPLICIT,):
        x, b = put(A.reshape(8, 8, 32), *axes, on=mesh), put(B, on=mesh)
        if len(axes) == 1:
            close(how(jax.vmap(tuned_matmul, (0, None)))(x, b), A.reshape(8, 8, 32) @ B)
            plain = jax.grad(lambda a: jnp.sin(jax.vmap(jnp.matmul, (0, None))(a, B)).sum())(A.reshape(8, 8, 32))
            ours = jax.grad(lambda a, b: jnp.sin(jax.vmap(tuned_matmul, (0, None))(a, b)).sum())
            close(jax.jit(ours)(x, b), plain, 1e-3, 1e-3)
            assert typed(jax.vmap(tuned_matmul, (0, None)), x, b) == typed(jax.vmap(jnp.matmul, (0, None)), x, b)
        rows = how(jax.vmap(scheduler.tuned_rms_norm, (0, None)))
        close(rows(x, put(A[0], on=mesh)), jax.vmap(scheduler.tuned_rms_norm, (0, None))(A.reshape(8, 8, 32), A[0]))


def test_on_explicit_axes_attention_rows_vmap_and_export_ask_kernels():
    q, k, v = (put(x, "x", None, "y", on=EXPLICIT) for x in QKV)
    close(attention(q, k, v), plain_attention(*QKV))
    assert typed(attention, q, k, v) == "float32[4@x,16,8@y,16]"
    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sin(attention(*qkv)).sum(), (0, 1, 2)))(q, k, v)
    close(gradients, jax.grad(lambda *qkv: jnp.sin(plain_attention(*qkv)).sum(), (0, 1, 2))(*QKV), 1e-3, 1e-3)
    x, b = put(A.reshape(8, 8, 32), None, "x", on=EXPLICIT), put(B, None, "y", on=EXPLICIT)
    for name, (ours, plain) in ROWS.items():
        if name != "add_rms_norm":
            close(jax.jit(ours)(put(A, "x", on=EXPLICIT)), plain(A))
    close(jax.jit(jax.vmap(pallas, (0, None)))(x, b), A.reshape(8, 8, 32) @ B)
    a = put(A, "x", on=EXPLICIT)
    close(jax.export.export(jax.jit(pallas))(a, b).call(a, b), A @ B)


@pytest.mark.parametrize("spec", [(), ("x",), (None, "x"), (None, "y"), ("x", "y")])
@pytest.mark.parametrize("over", [EXPLICIT, AUTO], ids=["explicit", "automatic"])
def test_a_vmap_that_names_a_mesh_axis_has_the_result_and_the_type_of_jax(spec, over):
    x = put(jax.random.normal(jax.random.key(0), (8, 16, 32)), *spec, on=over)
    for transform in (lambda f: f, jax.jit):
        ours, theirs = (
            transform(jax.vmap(f, spmd_axis_name="x"))(x) for f in (tuned_softmax, lambda x: jax.nn.softmax(x))
        )
        assert str(jax.typeof(ours)) == str(jax.typeof(theirs))
        close(ours, theirs)
