"""`scheduler.problems` of functions that XLA divides over eight devices: the problems of one of them, and how often."""

from __future__ import annotations

import contextlib
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import DOUBLE

import scheduler
from scheduler import tuned, tuned_flash_attention, tuned_gated_matmul, tuned_matmul, tuned_rms_norm, tuned_softmax
from scheduler.rewriting.problems import to_json
from scheduler.store import misses
from scheduler.store.store import Store, default_url

pytestmark = pytest.mark.slow

AUTO = (AxisType.Auto,) * 2
MESHES = {
    "devices": jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO),
    "abstract": AbstractMesh((2, 4), ("data", "model"), axis_types=AUTO),
}
MESH = MESHES["devices"]


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def array(*shape, over=None, dtype="float32", mesh=MESH):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if over is None else on(*over, mesh=mesh))


def counts(fn, *args, **kwargs):
    """``{"matmul m=32 ...": count}``, of one device."""
    return {f"{row.operation.name} {row.problem}": row.count for row in scheduler.problems(fn, *args, **kwargs)}


def product(m, n, k, dtype="float32", **told):
    fields = {"m": m, "n": n, "k": k, "dtype": dtype} | told
    return "matmul " + " ".join(f"{name}={value}" for name, value in fields.items())


X, W = array(32, 64, over=("data",)), array(64, 128, over=(None, "model"))
PLAIN_X, PLAIN_W = array(32, 64), array(64, 128)


def feed_forward(x, w, **how):
    up, down = w
    return tuned_matmul(tuned_matmul(x, up, activation="gelu", **how), down, **how), None


def layers(x, up, down, **how):
    return lax.scan(functools.partial(feed_forward, **how), x, (up, down))[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_in_a_scan_a_column_and_a_row_parallel_product_are_those_of_one_device(mesh):
    mesh = MESHES[mesh]
    stack = [
        array(3, 64, 256, over=(None, None, "model"), dtype="bfloat16", mesh=mesh),
        array(3, 256, 64, over=(None, "model"), dtype="bfloat16", mesh=mesh),
    ]
    found = scheduler.problems(layers, array(32, 64, over=("data",), dtype="bfloat16", mesh=mesh), *stack)
    assert {str(row.problem): row.count for row in found} == {
        "m=16 n=64 k=64 dtype=bfloat16 activation=gelu": 3,
        "m=16 n=64 k=64 dtype=bfloat16": 3,
    }
    assert found.mesh == "data=2, model=4"
    assert "Problems are those of one device; XLA partitions the function over data=2, model=4." in repr(found)
    assert {line.function for row in found for line in row.lines} == {"feed_forward"}
    assert "one device's of data=2, model=4" in found.job()


def test_a_gradient_is_divided_too():
    loss = jax.grad(lambda x, w: jnp.sum(jnp.sin(tuned_matmul(x, w))), (0, 1))
    assert counts(loss, X, W) == {
        product(16, 32, 64): 1,
        product(64, 32, 16, transpose_a=True): 1,
        product(16, 64, 32, transpose_b=True): 1,
    }


def test_heads_are_divided_with_the_keys_that_they_see():
    def block(x, q, k, v):
        q, k, v = (tuned_matmul(x, w).reshape(4, 16, -1, 16) for w in (q, k, v))
        return tuned_flash_attention(q, k, v, causal=True)

    args = [array(64, n * 16, over=(None, "model")) for n in (8, 4, 4)]
    assert counts(block, array(64, 64, over=("data",)), *args) == {
        product(32, 32, 64): 1,
        product(32, 16, 64): 2,
        "flash_attention batch=2 q_len=16 kv_len=16 heads=2 kv_heads=1 head_dim=16 causal=True dtype=float32": 1,
    }


def test_a_gated_product_and_rows_are_divided_too():
    def fn(x, gate, up):
        return tuned_softmax(tuned_gated_matmul(tuned_rms_norm(x, jnp.ones(64)), (gate, up)))

    w = array(64, 128, over=(None, "model"), dtype="bfloat16")
    assert counts(fn, array(32, 64, over=("data",), dtype="bfloat16"), w, w) == {
        "gated_matmul m=16 n=32 k=64 dtype=bfloat16 pair=True": 1,
        "rms_norm rows=16 columns=64 dtype=bfloat16 weight_dtype=float32": 1,
        "softmax rows=16 columns=128 dtype=bfloat16": 1,  # a row is whole on one device
    }


# Wherever a sharding is named


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("by", ["arguments", "in_shardings", "out_shardings", "constraint", "inner jit"])
def test_it_does_not_matter_where_shardings_are_named(by, mesh):
    named, columns = on("data", mesh=MESHES[mesh]), on(None, "model", mesh=MESHES[mesh])
    over = {"out_shardings": on("data", "model", mesh=MESHES[mesh])}
    jitted = jax.jit(tuned_matmul, in_shardings=(named, columns))

    def constrained(x, w):
        return tuned_matmul(lax.with_sharding_constraint(x, named), lax.with_sharding_constraint(w, columns))

    fn, args = {
        "arguments": (tuned_matmul, (array(32, 64, over=("data",), mesh=MESHES[mesh]), W)),
        "in_shardings": (jitted, (PLAIN_X, PLAIN_W)),
        "out_shardings": (jax.jit(tuned_matmul, **over), (PLAIN_X, PLAIN_W)),
        "constraint": (constrained, (PLAIN_X, PLAIN_W)),
        "inner jit": (lambda x, w: jnp.sin(jitted(x, w)), (PLAIN_X, PLAIN_W)),
    }[by]
    assert counts(fn, *args) == {product(16, 32, 64): 1}


def test_shardings_of_a_jitted_function_divide_what_optimize_replaces_in_it():
    def attention(x, w):
        q = (x @ w).reshape(4, 16, 4, 32)
        return jnp.sin(jax.nn.dot_product_attention(q, q, q))

    jitted = jax.jit(attention, in_shardings=(on("data"), on(None, "model")))
    found = scheduler.problems(jitted, array(4, 16, 64), array(64, 128))
    assert {f"{row.operation.name} {row.problem}" for row in found.untuned} == {
        product(32, 32, 64),
        "flash_attention batch=2 q_len=16 kv_len=16 heads=1 kv_heads=1 head_dim=32 dtype=float32",
    }


def test_a_mesh_that_is_set_is_one_to_divide_over():
    with jax.set_mesh(MESH):
        fn = lambda x, w: tuned_matmul(lax.with_sharding_constraint(x, P("data")), w)  # noqa: E731
        assert counts(fn, PLAIN_X, PLAIN_W) == {product(16, 128, 64): 1}
        found = scheduler.problems(tuned_matmul, PLAIN_X, PLAIN_W)
    assert [str(row.problem) for row in found] == ["m=32 n=128 k=64 dtype=float32"]
    assert found.mesh == "data=2, model=4"


def test_arrays_and_those_of_a_closure_lie_where_they_lie():
    x, w = jax.device_put(jnp.ones((32, 64)), on("data")), jax.device_put(jnp.ones((64, 128)), on(None, "model"))
    assert counts(tuned_matmul, x, w) == {product(16, 32, 64): 1}
    assert counts(lambda x: tuned_matmul(x, w), x) == {product(16, 32, 64): 1}
    assert counts(tuned_matmul, x, jnp.ones((64, 128))) == {product(16, 128, 64): 1}


def test_static_arguments_keywords_and_trees_are_those_of_the_function():
    @functools.partial(jax.jit, static_argnames=("depth", "name"))
    def fn(params, x, depth, name="w"):
        for _ in range(depth):
            x = tuned_matmul(x, params[name])
        return x

    square = array(64, 64, over=(None, "model"))
    assert counts(fn, {"w": square}, x=X, depth=2) == {product(16, 16, 64): 2}


def test_on_one_device_nothing_is_divided():
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(one, P("x")))
    found = scheduler.problems(tuned_matmul, x, PLAIN_W)
    assert (found.mesh, [row.problem.m for row in found]) == ("", [32])


def test_what_optimize_replaces_is_divided_as_tuned_calls_are():
    def fn(x, w):
        return tuned_softmax(x @ w)

    found = scheduler.problems(fn, X, W)
    assert [(row.operation.name, str(row.problem)) for row in found] == [
        ("softmax", "rows=16 columns=128 dtype=float32")
    ]
    assert [(row.operation.name, str(row.problem)) for row in found.untuned] == [
        ("matmul", "m=16 n=32 k=64 dtype=float32")
    ]
    assert counts(scheduler.optimize(fn), X, W) == {
        f"{row.operation.name} {row.problem}": row.count for row in (*found, *found.untuned)
    }


# How often


def test_one_problem_divided_in_two_ways_is_two_problems():
    def fn(x, w):
        tall = lax.with_sharding_constraint(x, on(("data", "model")))
        return tuned_matmul(x, w), tuned_matmul(tall, lax.with_sharding_constraint(w, on()))

    assert counts(fn, X, array(64, 128)) == {product(16, 128, 64): 1, product(4, 128, 64): 1}


def test_a_jitted_function_that_two_scans_share_counts_in_each():
    step = jax.jit(lambda x, w: jnp.tanh(tuned_matmul(x, w)))

    def fn(x, w):
        for length in (3, 5):
            x = lax.scan(lambda x, _: (step(x, w), None), x, length=length)[0]
        return step(x, w)

    assert counts(fn, X, array(64, 64, over=(None, "model"))) == {product(16, 16, 64): 9}


def test_arrays_that_inner_functions_close_over_change_no_count():
    w, shift = jnp.ones((64, 64)), jnp.arange(64.0)
    step = jax.jit(lambda x, _: (tuned_matmul(x, w) + shift, None))
    assert counts(lambda x: lax.scan(step, x, length=3)[0], X) == {product(16, 64, 64): 3}


def test_branches_and_turns_count_as_ever():
    def fn(x, w):
        x = lax.cond(jnp.sum(x) > 0, lambda x: tuned_matmul(x, w), tuned_softmax, x)
        return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: tuned_matmul(x, w), x)

    found = scheduler.problems(fn, X, array(64, 64, over=(None, "model")))
    assert sum(row.count for row in found) == 3
    assert {loop.kind for loop in found.loops} == {"cond", "while"}


def test_what_is_inside_of_shard_map_is_one_device_s_already():
    inner = jax.shard_map(tuned_matmul, mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"))
    assert scheduler.problems(inner, PLAIN_X, PLAIN_W).mesh == ""
    assert counts(inner, PLAIN_X, PLAIN_W) == {product(16, 128, 64): 1}
    both = counts(lambda x, w: (inner(x, w), tuned_matmul(x, w)), X, W)
    assert both == {product(16, 128, 64): 1, product(16, 32, 64): 1}


@pytest.mark.parametrize("mesh", MESHES)
def test_with_axes_in_types_problems_and_lines_are_known_without_a_device(mesh):
    explicit = MESHES[mesh].update(axis_types=(AxisType.Explicit,) * 2)
    args = array(32, 64, over=("data",), mesh=explicit), array(64, 128, over=(None, "model"), mesh=explicit)

    def fn(x, w):
        return jnp.sin(tuned_matmul(x, w))

    (row,) = found = scheduler.problems(fn, *args)
    assert (str(row.problem), found.mesh) == ("m=16 n=32 k=64 dtype=float32", "")
    assert [line.line for line in row.lines] == [fn.__code__.co_firstlineno + 1]


def test_what_devices_cannot_share_alike_is_whole_on_each():
    def fn(x, w):
        return tuned_matmul(lax.with_sharding_constraint(x[:31], on("model")), w)

    assert counts(fn, PLAIN_X, PLAIN_W) == {product(31, 128, 64): 1}


def test_what_no_device_is_asked_for_is_xla_s_and_that_is_said():
    found = scheduler.problems(lambda x: tuned(DOUBLE)(x), array(64, over=("data",)))
    (left,) = found.left
    assert (len(found), left.row.operation, left.row.count) == (0, DOUBLE, 1)
    assert "double does not declare how it is sharded" in left.reason
    assert "XLA is used for double" in repr(found)
    assert "makes no tuned call" not in repr(found)
    assert to_json(found)["left"][0]["reason"] == left.reason
    json.dumps(to_json(found))


def test_a_call_that_is_left_to_xla_is_divided_by_xla():
    found = scheduler.problems(lambda x, w: tuned_softmax(tuned_matmul(x, w), backends="xla"), X, W)
    assert [row.operation.name for row in found] == ["matmul"]
    (left,) = found.left
    assert (left.row.operation.name, left.reason) == (
        "softmax",
        "only the library is allowed, which XLA partitions itself",
    )


def test_a_call_with_a_schedule_of_its_own_asks_no_store():
    def fn(x, w):
        return tuned_matmul(x, w, schedule={"tile_m": 64, "tile_n": 64}), tuned_matmul(x, w)

    assert counts(fn, X, W) == {product(16, 32, 64): 1}


# What it is not


@pytest.mark.parametrize("on_miss", ["model", "xla", "tune", "error"])
def test_it_is_what_the_compiled_function_asks_for_and_asks_nothing_itself(on_miss, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    monkeypatch.setattr(misses, "_writer", misses._Writer())
    scheduler.reload()
    args = X, array(3, 64, 256, over=(None, None, "model")), array(3, 256, 64, over=(None, "model"))
    found = {row.problem.canonical() for row in scheduler.problems(lambda *args: layers(*args, on_miss=on_miss), *args)}
    assert misses.flush_misses(600)
    with contextlib.closing(Store(default_url())) as store:
        assert (store.misses.all(), list(store.records())) == ([], [])
        jax.jit(lambda *args: layers(*args)).lower(*args).compile()
        assert misses.flush_misses(600)
        assert {miss.key.problem for miss in store.misses.all()} == found


def test_what_one_device_tunes_beforehand_answers_on_the_mesh():
    args = [jax.device_put(jnp.ones(s.shape), s.sharding) for s in (X, W)]
    for row in scheduler.problems(tuned_matmul, *args):
        scheduler.tune(row.operation, row.problem, budget=1)
    strict = jax.jit(functools.partial(tuned_matmul, on_miss="error"))
    assert jnp.array_equal(strict(*args), jnp.full((32, 128), 64.0))
    with pytest.raises(scheduler.CacheMiss, match="m=16 n=64 k=64"):
        tuned_matmul(args[0], jax.device_put(jnp.ones((64, 256)), on(None, "model")), on_miss="error")


def test_what_jax_has_compiled_before_is_asked_all_the_same(tmp_path):
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        assert [counts(tuned_matmul, X, W) for _ in range(2)] == [{product(16, 32, 64): 1}] * 2
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_too_few_devices_are_said_with_what_makes_more():
    mesh = AbstractMesh((4, 16), ("data", "model"), axis_types=AUTO)
    with pytest.raises(scheduler.SchedulerError, match=r"64 devices \(data=4, model=16\).* --mesh data=4,model=16"):
        scheduler.problems(tuned_matmul, array(64, 64, over=("data",), mesh=mesh), PLAIN_W)


def test_what_jax_refuses_is_said_in_a_sentence():
    with pytest.raises(scheduler.SchedulerError, match=r"cannot be compiled for the mesh data=2, model=4: .*data"):
        scheduler.problems(tuned_matmul, array(31, 64, over=("data",)), PLAIN_W)
