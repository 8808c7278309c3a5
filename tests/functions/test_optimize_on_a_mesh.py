"""Functions that XLA partitions over devices: `optimize` selects kernels for the part of one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import scheduler
from scheduler.dispatch import dispatch
from scheduler.rewriting import stored_decisions
from scheduler.rewriting.decided import collectives
from scheduler.rewriting.lowering import NOT_PARTITIONED
from scheduler.rewriting.stored_decisions import find

pytestmark = pytest.mark.slow

ON_CPU = {"backends": "interpret", "keep": "tuned"}
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def placed(tree, *spec, mesh=MESH):
    """The arrays of a tree, divided where their first axis can be."""

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, P(*spec) if x.ndim and x.shape[0] % mesh.size == 0 else P()))

    return jax.tree.map(place, tree)


def close(actual, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol, atol), actual, expected)


def used(decided):
    return {f"{each.operation} {each.problem}" for each in decided.replaced}


def exchanged(compiled):
    return {kind: each["count"] for kind, each in collectives(compiled.as_text()).items()}


def transformer_loss(params, tokens, labels):
    mesh = jax.typeof(tokens).sharding.mesh
    explicit = mesh.axis_types == (AxisType.Explicit,)
    how = {"out_sharding": NamedSharding(mesh, P("data"))} if explicit else {}  # JAX does not infer it for a gather
    x = params["embedding"].at[tokens].get(**how).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]
    w = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    q, k, v = jnp.split((normed.astype(jnp.bfloat16) @ w["qkv"]).reshape(*tokens.shape, 2, -1), 3, -1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    logits = (jax.nn.gelu(x @ w["up"]) @ w["down"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def adamw(state, tokens, labels):
    params, mean, square, count = state
    loss, grads = jax.value_and_grad(transformer_loss)(params, tokens, labels)
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, square, grads)

    def update(p, m, v):
        return p - 1e-3 * (m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8) + 0.01 * p)

    return (jax.tree.map(update, params, mean, square), mean, square, count), loss


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_data_parallel_step_gets_the_kernels_of_one_device_and_the_all_reduces_of_xla(axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    shapes = {"embedding": (32, 32), "qkv": (32, 96), "out": (32, 32), "up": (32, 64), "down": (64, 32)}
    params = {name: normal(*shape, seed=i) / 6 for i, (name, shape) in enumerate(shapes.items())}
    params["scale"] = jnp.ones(32)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = placed((params, zeros, zeros, jnp.zeros(())), mesh=mesh)
    tokens, labels = (placed(jax.random.randint(jax.random.key(i), (4, 16), 0, 32), "data", mesh=mesh) for i in (0, 1))
    fast = scheduler.optimize(adamw, **ON_CPU)
    actual, expected = fast(state, tokens, labels), jax.jit(adamw)(state, tokens, labels)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    close(actual[1], expected[1], rtol=2e-3)
    (decided,) = fast.decisions
    heads = "batch=2 q_len=16 kv_len=16 heads=2 kv_heads=2 head_dim=16 causal=True dtype=bfloat16"
    assert used(decided) >= {
        f"flash_attention {heads} return_lse=True",
        f"flash_attention_backward {heads}",
        "matmul m=32 n=96 k=32 dtype=bfloat16",  # 2 sequences of 16 tokens
        "matmul m=32 n=96 k=32 dtype=bfloat16 transpose_a=True",  # the gradient of a weight, before the sum
        "matmul m=32 n=32 k=96 dtype=bfloat16 transpose_b=True",
    }
    assert "m=64 " not in str([each for each in used(decided) if "transpose_a" not in each]), (
        "a product of both devices"
    )
    plain = jax.jit(adamw).lower(state, tokens, labels).compile()
    assert exchanged(decided.compiled) == exchanged(plain)
    assert exchanged(plain)["all-reduce"] == 1 or axis_type is AxisType.Explicit
    assert decided.tuned_exchanged == decided.plain_exchanged


def sgd(params, x):
    def loss(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return ((hidden @ params["down"] - x) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


WEIGHTS = {"up": normal(16, 32) / 4, "down": normal(32, 16, seed=1) / 4}
X = normal(8, 16, seed=2)


def test_with_divided_parameters_gradients_are_scattered_and_a_second_process_decides_nothing(monkeypatch):
    monkeypatch.setattr(stored_decisions, "find", find)  # as outside of tests
    dispatch.reload()  # the store of this test
    args = placed(WEIGHTS, "data"), placed(X, "data")
    fast = scheduler.optimize(sgd, **ON_CPU, donate_argnums=0)
    given = jax.tree.map(jnp.copy, args)
    params, loss = fast(*given)
    close((params, loss), sgd(WEIGHTS, X))
    assert {x.sharding.spec for x in params.values()} == {P("data")}
    assert given[0]["up"].is_deleted()
    (decided,) = fast.decisions
    assert "matmul m=4 n=32 k=16 dtype=float32" in used(decided)
    assert decided.tuned_exchanged <= decided.plain_exchanged
    dispatch.reload()
    again = scheduler.optimize(sgd, **ON_CPU, donate_argnums=0)
    close(again(*args)[1], loss)
    assert "decided on" in again.report()


@pytest.mark.parametrize("specs", [((), (None, "data")), (("data",), ())])
def test_a_record_of_one_devices_part_answers_and_a_missing_one_is_an_error(specs):
    args = [placed(x, *spec) for x, spec in zip((X, WEIGHTS["up"]), specs, strict=True)]
    local = {"m": 8, "n": 16, "k": 16} if specs[1] else {"m": 4, "n": 32, "k": 16}
    fast = scheduler.optimize(lambda x, w: x @ w, **ON_CPU, on_miss="error")
    with pytest.raises(scheduler.CacheMiss, match=" ".join(f"{name}={n}" for name, n in local.items())):
        fast(*args)
    scheduler.tune("matmul", {**local, "dtype": "float32"}, budget=3, backends="interpret")
    close(fast(*args), X @ WEIGHTS["up"])
    (decided,) = fast.decisions
    assert [dict(vars(each.problem)).items() >= local.items() for each in decided.replaced] == [True]


def test_where_the_library_is_selected_for_the_part_the_equations_stay():
    fast = scheduler.optimize(sgd, on_miss="xla", keep="tuned", backends=("interpret", "xla"))
    fast(placed(WEIGHTS), placed(X, "data"))
    (decided,) = fast.decisions
    assert (decided.replaced, decided.kept) == ((), "plain")
    assert "nothing stored, and on_miss='xla'" in str(decided)


def test_a_scan_of_recomputed_layers_and_a_shard_map_inside():
    def step(ws, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).mean()

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    def manual(w, x):
        return lax.psum(jax.nn.softmax(x @ w).sum(), "data")

    def both(ws, x):
        return jax.grad(step)(ws, x), manual(ws[0], x)

    ws, x = normal(3, 16, 16) / 4, normal(8, 16)
    fast = scheduler.optimize(both, **ON_CPU)
    close(fast(placed(ws), placed(x, "data")), jax.jit(both)(ws, x))
    counted = {f"{each.problem}": each.times for each in fast.decisions[0].replaced}
    assert counted == {
        "m=4 n=16 k=16 dtype=float32": 7,  # forward, again, and inside of the shard_map
        "m=4 n=16 k=16 dtype=float32 transpose_b=True": 3,
        "m=16 n=16 k=4 dtype=float32 transpose_a=True": 3,
    }


@pytest.mark.parametrize(
    ("axis_type", "is_set"), [(AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Explicit, False)]
)
def test_explicit_axes_and_a_mesh_that_is_set_change_no_kernel_and_no_type(axis_type, is_set, capfd):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    args = placed(WEIGHTS, "data", mesh=mesh), placed(X, "data", mesh=mesh)
    fast = scheduler.optimize(sgd, **ON_CPU)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        actual, expected = fast(*args), jax.jit(sgd)(*args)
        fast(actual[0], args[1])  # decides nothing, although `P("data", None)` is another spec than `P("data")`
    close(actual, expected)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    (decided,) = fast.decisions
    assert "matmul m=4 n=32 k=16 dtype=float32" in used(decided)
    assert sum(each.times for each in decided.replaced) == 5
    assert "rematerialization" not in capfd.readouterr().err


def test_attention_on_explicit_axes_of_a_mesh_that_is_set():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    q, k, v = (placed(normal(2, 16, 2, 8, seed=i), None, None, "model", mesh=mesh) for i in range(3))
    fast = scheduler.optimize(jax.nn.dot_product_attention, **ON_CPU)
    with jax.set_mesh(mesh):
        close(fast(q, k, v), jax.nn.dot_product_attention(q, k, v))
    assert "flash_attention batch=2 q_len=16 kv_len=16 heads=1 " in str(used(fast.decisions[0]))


def test_shardings_inside_of_a_function_on_explicit_axes_stay_constraints():
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=types, devices=jax.devices()[:2])
    inner = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data")))

    def step(x, w):
        return lax.with_sharding_constraint(inner(x, w), P(P.UNCONSTRAINED, "model")) @ w.T

    args = placed(X, "data", mesh=mesh), placed(WEIGHTS["up"], mesh=mesh)
    fast = scheduler.optimize(step, **ON_CPU)
    with jax.set_mesh(mesh):
        actual, expected = fast(*args), jax.jit(step)(*args)
    close(actual, expected)
    assert jax.typeof(actual) == jax.typeof(expected)
    assert sum(each.times for each in fast.decisions[0].replaced) == 2


def test_explicit_axes_inside_of_automatic_ones_become_automatic():
    fast = scheduler.optimize(
        lambda x, w: jax.sharding.explicit_axes(jnp.matmul, in_sharding=(P("data"), P()))(x, w), **ON_CPU
    )
    with jax.set_mesh(MESH):
        close(fast(placed(X, "data"), placed(WEIGHTS["up"])), X @ WEIGHTS["up"])
    assert used(fast.decisions[0]) == {"matmul m=4 n=32 k=16 dtype=float32"}


def test_a_shard_map_inside_of_explicit_axes_stays_with_xla_and_that_is_said():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    w, x = placed(WEIGHTS["up"], mesh=mesh), placed(X, "data", mesh=mesh)
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    fast = scheduler.optimize(lambda x, w: jax.shard_map(jnp.matmul, mesh=mesh, **specs)(x, w) @ w.T, **ON_CPU)
    close(fast(x, w), X @ WEIGHTS["up"] @ WEIGHTS["up"].T)
    assert NOT_PARTITIONED in fast.report()
    assert used(fast.decisions[0]) == {"matmul m=4 n=32 k=16 dtype=float32"}, "the product of one device alone"
    assert [f"matmul {row.problem}" for row in scheduler.problems(fast, x, w)] == [*used(fast.decisions[0])]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_problems_to_tune_are_those_of_one_device(axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    found = scheduler.problems(scheduler.optimize(sgd), placed(WEIGHTS, mesh=mesh), placed(X, "data", mesh=mesh))
    assert found.mesh == "data=2"
    assert {str(row.problem): row.count for row in found} == {
        "m=4 n=32 k=16 dtype=float32": 1,
        "m=4 n=16 k=32 dtype=float32": 1,
        "m=4 n=32 k=16 dtype=float32 transpose_b=True": 1,
        "m=32 n=16 k=4 dtype=float32 transpose_a=True": 1,
        "m=16 n=32 k=4 dtype=float32 transpose_a=True": 1,
    }
