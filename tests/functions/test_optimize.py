"""An unmodified function, compiled both ways."""

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend import core

import scheduler
from scheduler.core import hardware
from scheduler.prediction.predict import predict
from scheduler.rewriting import comparison, in_place
from scheduler.rewriting.decided import NONE_ON_A_CPU
from scheduler.rewriting.equations import replacing_operations
from scheduler.rewriting.in_place import Copy
from scheduler.rewriting.passes import Rewritten
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ON_CPU = {"backends": "interpret", "keep": "tuned"}


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(actual, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol, atol), actual, expected)


def problems(decided):
    return {str(each.problem) for each in decided.replaced}


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def layer(x, w):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
    p = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / 3, axis=-1)
    x = x + jnp.einsum("bhst,bthe,hed->bsd", p, v, w["o"])
    return x + jax.nn.gelu(clipped(x @ w["up"])) @ w["down"], None


def loss(ws, x):
    return (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).mean()


def weights(dtype=jnp.float32, layers=2, d=12, heads=2, e=6, f=20):
    shapes = {
        "q": (d, heads, e),
        "k": (d, heads, e),
        "v": (d, heads, e),
        "o": (heads, e, d),
        "up": (d, f),
        "down": (f, d),
    }
    return {n: normal(layers, *s, seed=i, dtype=dtype) * 0.2 for i, (n, s) in enumerate(shapes.items())}


def test_a_train_step_with_scan_remat_custom_vjp_and_einsum_gets_tuned_products_and_the_same_gradient():
    step = jax.value_and_grad(loss)
    fast = scheduler.optimize(step, **ON_CPU)
    ws, x = weights(), normal(2, 7, 12)
    close(fast(ws, x), jax.jit(step)(ws, x))
    (decided,) = fast.decisions
    assert decided.kept == "tuned"
    assert len(decided.replaced) > 10
    assert not decided.left


def test_in_bfloat16_the_step_computes_the_same_within_what_that_rounds():
    fast = scheduler.optimize(jax.value_and_grad(loss), **ON_CPU)
    ws, x = weights(jnp.bfloat16, layers=1), normal(2, 5, 12, dtype=jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(ws, x)
    (decided,) = fast.decisions
    assert decided.kept == "tuned"
    assert all("bfloat16" in each or "out_dtype" in each for each in problems(decided))


def test_vmap_inside_is_a_batch():
    def f(a, b):
        return jax.vmap(lambda x: jnp.tanh(x @ b))(a)

    fast = scheduler.optimize(f, **ON_CPU)
    a, b = normal(3, 5, 7), normal(7, 9)
    close(fast(a, b), f(a, b))
    assert problems(fast.decisions[0]) == {str(MATMUL.problem(m=15, n=9, k=7, dtype="float32"))}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_transpose_before_or_after_a_product_is_no_copy(way):
    def forward(x, w):
        return x @ w.T

    def backward(x, w):
        return jax.grad(lambda w: (x @ w.T).sum())(w)

    x, w = normal(5, 7), normal(9, 7, seed=1)
    f = {"forward": forward, "backward": backward}[way]
    fast = scheduler.optimize(f, **ON_CPU)
    close(fast(x, w), f(x, w))
    (text,) = problems(fast.decisions[0])
    if way == "forward":
        assert text == str(MATMUL.problem(m=5, n=9, k=7, dtype="float32", transpose_b=True))
    else:
        assert text == str(MATMUL.problem(m=9, n=7, k=5, dtype="float32", transpose_a=True))
    compiled = fast.decisions[0].compiled.as_text()
    assert " transpose(" not in compiled.split("ENTRY")[1]


def experts(params, x):
    """A layer of experts as users write it: the two best experts of each token, one group of rows for each expert."""
    scores, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    order = jnp.argsort(chosen.ravel())
    rows, sizes = x[order // 2], jnp.bincount(chosen.ravel(), length=params["gate"].shape[0])
    gate, up = (lax.ragged_dot(rows, params[name], sizes) for name in ("gate", "up"))
    out = lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
    return jnp.einsum("tcd,tc->td", out, scores)


def experts_params(count=4, d=12, f=20):
    shapes = {"router": (d, count), "gate": (count, d, f), "up": (count, d, f), "down": (count, f, d)}
    return {name: normal(*shape, seed=i) * 0.3 for i, (name, shape) in enumerate(shapes.items())}


def test_a_layer_of_experts_and_its_gradient_get_grouped_products():
    x, params = normal(33, 12), experts_params()
    forward = {"rows=66 groups=4 k=12 n=20 dtype=float32", "rows=66 groups=4 k=20 n=12 dtype=float32"}
    fast = scheduler.optimize(experts, **ON_CPU)
    close(fast(params, x), jax.jit(experts)(params, x))
    (decided,) = fast.decisions
    assert {str(each.problem) for each in decided.replaced if each.operation == "ragged_dot"} == forward

    step = jax.value_and_grad(lambda params, x: (experts(params, x) ** 2).mean())
    fast = scheduler.optimize(step, **ON_CPU)
    close(fast(params, x), jax.jit(step)(params, x))
    (decided,) = fast.decisions
    grouped = {
        name: {str(each.problem) for each in decided.replaced if each.operation == name}
        for name in ("ragged_dot", "ragged_dot_weights")
    }
    backward = {"rows=66 groups=4 k=12 n=20 dtype=float32 transpose_rhs=True"}
    assert forward | backward <= grouped["ragged_dot"]
    assert grouped["ragged_dot_weights"] == forward
    assert not decided.left
    counted = {f"{row.operation.name} {row.problem}": row.count for row in scheduler.problems(fast, params, x)}
    assert counted["ragged_dot_weights rows=66 groups=4 k=12 n=20 dtype=float32"] == 2


def test_a_grouped_product_with_a_batch_is_left_to_xla_with_a_reason():
    def f(x, w, sizes):
        return jax.vmap(lax.ragged_dot)(x, w, sizes)

    fast = scheduler.optimize(f, **ON_CPU)
    args = normal(2, 8, 4), normal(2, 3, 4, 5), jnp.ones((2, 3), jnp.int32)
    close(fast(*args), f(*args))
    (decided,) = fast.decisions
    assert any("group_sizes (2, 3) are not [rows, k] and [groups]" in reason for reason in decided.left)


def test_where_nothing_answers_but_xla_nothing_is_compiled_or_timed():
    fast = scheduler.optimize(lambda a, b: a @ b)
    a = normal(8, 8)
    close(fast(a, a), a @ a)
    (decided,) = fast.decisions
    assert decided.kept == "plain"
    assert decided.plain is None
    assert decided.reason == NONE_ON_A_CPU
    assert sum(decided.left.values()) == 1


def test_both_are_timed_and_the_interpreter_loses():
    fast = scheduler.optimize(lambda a, b: a @ b, backends="interpret", seconds=0.1)
    a, b = normal(16, 4096) / 64, normal(4096, 16)  # several steps, one after the other
    close(fast(a, b), a @ b)
    (decided,) = fast.decisions
    assert decided.kept == "plain"
    assert decided.tuned.median_s > decided.plain.median_s
    assert decided.tuned.rounds == decided.plain.rounds >= 8
    assert "XLA's version" in fast.report()
    assert "interpret" in fast.report()


def test_a_version_for_each_shape_dtype_weak_type_static_argument_and_structure():
    def f(x, n, scale=1.0, *, bias=None):
        y = (x @ x) * n * scale
        return y if bias is None else y + bias

    fast = scheduler.optimize(f, static_argnums=1, **ON_CPU)
    x = normal(4, 4)
    for args, kwargs in [
        ((x, 2), {}),
        ((x, 3), {}),
        ((x[:3, :3], 2), {}),
        ((x.astype(jnp.bfloat16), 2), {}),
        ((x, 2, 2.0), {}),
        ((x, 2, jnp.float32(2)), {}),
        ((x, 2), {"bias": x[0]}),
        ((np.asarray(x), 2), {}),
    ]:
        close(fast(*args, **kwargs), f(*args, **kwargs), rtol=2e-2)
        decided = len(fast.decisions)
        fast(*args, **kwargs)
        assert len(fast.decisions) == decided
    assert len(fast.decisions) == 7 + 1  # numpy arrays are committed nowhere, as x is, and of another type


def test_the_report_names_the_arrays_of_many_arguments_and_counts_those_of_a_large_one():
    params = {"layers": [{"w": normal(16, 16), "b": normal(16)} for _ in range(4)]}
    x = normal(8, 16)

    def step(params, batch, *rest, mode):
        y = batch["x"]
        for layer in params["layers"]:
            y = y @ layer["w"] + layer["b"]
        return y + batch["y"] + sum(rest)

    fast = scheduler.optimize(step, static_argnames="mode")
    fast(params, {"x": x, "y": x}, 1.0, mode="sum")
    (decided,) = fast.decisions
    batch = "batch['x']: float32[8,16], batch['y']: float32[8,16]"
    assert decided.arguments == f"params: 8 arrays (4.25 KiB), {batch}, argument 2: float, mode='sum'"

    class Model:
        def __init__(self):
            self.params = params

        def __call__(self, x):
            return step(self.params, {"x": x, "y": x}, mode="sum")

    fast = scheduler.optimize(Model())
    fast(x)
    assert fast.decisions[0].arguments == "Model: 8 arrays (4.25 KiB), x: float32[8,16]"


def test_a_jitted_function_keeps_its_static_arguments():
    f = jax.jit(lambda x, *, n: x @ x * n, static_argnames="n")
    fast = scheduler.optimize(f, **ON_CPU)
    x = normal(4, 4)
    for n in (2, 3, 2):
        close(fast(x, n=n), f(x, n=n))
    assert len(fast.decisions) == 2


def test_a_method_gets_its_object():
    class Model:
        scale = 3.0

        @functools.partial(scheduler.optimize, static_argnums=0, **ON_CPU)
        def forward(self, x):
            return self.scale * (x @ x)

    model, x = Model(), normal(4, 4)
    close(model.forward(x), 3 * (x @ x))
    assert "Model object" in Model.forward.report()


def test_another_precision_is_another_version():
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    x = normal(4, 4)
    fast(x)
    with jax.default_matmul_precision("highest"):
        fast(x)
    assert ["highest" in text for each in fast.decisions for text in problems(each)] == [False, True]


def test_donated_arguments_survive_the_trial_and_are_donated_then():
    def f(state, x):
        return state + x @ x, x.sum()

    fast = scheduler.optimize(f, donate_argnums=0, **ON_CPU)
    x = normal(4, 4)
    state = jnp.ones((4, 4))
    expected = state + x @ x
    for _ in range(3):
        before = state
        state, _ = fast(state, x)
        close(state, expected)
        assert before.is_deleted()
        assert not x.is_deleted()
        expected = expected + x @ x
    assert fast.decisions[0].kept == "tuned"


def test_results_without_numbers_are_compared():
    def f(n, x):
        return jax.grad(lambda n, x: (x @ x).sum() * n.sum(), (0, 1), allow_int=True)(n, x), n[:0]

    fast = scheduler.optimize(f, **ON_CPU)
    (of_n, of_x), none = fast(jnp.arange(3), normal(4, 4))
    assert fast.decisions[0].kept == "tuned"
    assert (of_n.dtype, of_x.shape, none.shape) == (jax.dtypes.float0, (4, 4), (0,))


def test_side_effects_happen_once():
    seen = []

    def f(x):
        io_callback(lambda y: seen.append(float(y)), None, x[0, 0])
        return x @ x

    fast = scheduler.optimize(f, **ON_CPU)
    fast(normal(4, 4))
    jax.effects_barrier()
    assert len(seen) == 1
    assert "side effects" in fast.decisions[0].reason
    assert fast.decisions[0].kept == "plain"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_under_another_trace_it_says_what_to_do(transform):
    fast = scheduler.optimize(lambda x: x * 2.0, **ON_CPU)
    with pytest.raises(scheduler.SchedulerError, match="optimize the outer function"):
        transform(fast)(jnp.ones((3, 3)))


def test_a_constant_call_under_another_trace_is_refused_too():
    fast, x = scheduler.optimize(lambda x: x @ x, **ON_CPU), normal(4, 4)
    with pytest.raises(scheduler.SchedulerError, match="optimize the outer function"):
        jax.jit(lambda y: y + fast(x))(x)


def test_a_kernel_that_fails_is_left_out_with_a_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(type(MATMUL.kernel("interpret")), "run", broken)
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    x = normal(6, 6)
    with pytest.warns(RuntimeWarning, match="RESOURCE_EXHAUSTED"):
        close(fast(x), x @ x)
    assert fast.decisions[0].kept == "plain"


def test_attention_that_fails_is_left_out_alone(monkeypatch):
    def broken(*args, **kwargs):
        raise NotImplementedError("no layout for this head")

    monkeypatch.setattr(type(load("flash_attention").kernel("interpret")), "run", broken)
    fast = scheduler.optimize(lambda q, x: (jax.nn.dot_product_attention(q, q, q), x @ x), **ON_CPU)
    with pytest.warns(RuntimeWarning, match="a kernel is not used: flash_attention .*q_len=8.*no layout"):
        fast(normal(1, 8, 2, 4), normal(6, 6))
    (decided,) = fast.decisions
    assert decided.kept == "tuned"
    assert "flash_attention" not in {each.operation for each in decided.replaced}
    assert any("m=6" in problem for problem in problems(decided))


def faulty(monkeypatch, operation, change):
    """Makes the interpreted kernel of an operation return ``change(result)``."""
    kernel = type(load(operation).kernel("interpret"))
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **kwargs: change(run(*args, **kwargs)))


def test_a_kernel_that_disagrees_with_its_product_in_place_is_left_out_alone(monkeypatch):
    # Wrong for large elements, which random operands do not have: the function's own are large.
    faulty(monkeypatch, "matmul", lambda y: jnp.where(y > 500, 1.02 * y, y))
    fast = scheduler.optimize(lambda count, x, y: (count + 1, x @ x, y @ (200 * y)), donate_argnums=0, **ON_CPU)
    count, x, y = jnp.arange(6), normal(6, 6), normal(8, 8, seed=1)
    with pytest.warns(RuntimeWarning, match="a kernel is not used.*on the function's own values"):
        close(fast(count, x, y), (jnp.arange(1, 7), x @ x, y @ (200 * y)))
    (decided,) = fast.decisions
    assert problems(decided) == {str(MatmulProblem(6, 6, 6, "float32", precision="default"))}
    assert any("m=8 n=8 k=8" in reason and "disagree" in reason for reason in decided.left)
    assert count.is_deleted()


def test_operands_are_freed_once_they_are_compared(monkeypatch):
    made = []
    monkeypatch.setattr(in_place, "Copy", lambda *args: made.append(Copy(*args)) or made[-1])
    fast = scheduler.optimize(lambda x: x @ x, **ON_CPU)
    fast(normal(6, 6))
    (copy,) = made
    assert copy.filled
    assert not copy.operands


@pytest.mark.parametrize("change", [lambda x: x + 1e-2, lambda x: x[::-1], lambda x: x.at[0, 0].set(7.0)])
def test_a_function_that_is_put_together_wrongly_leaves_xlas_with_a_warning(monkeypatch, change):
    monkeypatch.setattr("scheduler.rewriting.lowering.with_tuned_calls", lambda jaxpr, *_, **__: changed(jaxpr))

    def changed(jaxpr):
        run = jax.make_jaxpr(lambda *args: [change(x) for x in core.jaxpr_as_fun(jaxpr)(*args)])
        return Rewritten(run(*jaxpr.in_avals), ())

    fast, x = scheduler.optimize(lambda x: jnp.tanh(x @ x), **ON_CPU), normal(6, 6)
    with pytest.warns(RuntimeWarning, match="computed different results"):
        close(fast(x), jnp.tanh(x @ x))
    assert fast.decisions[0].kept == "plain"


@pytest.mark.parametrize("update", ["sign", "momentum"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_disagreement(update):
    """The bias of the keys moves all logits of a query alike, so its gradient is rounding alone."""

    def attend(weights, x):
        x = x.astype(jnp.bfloat16)
        k = (x @ weights["k"].astype(x.dtype) + weights["bias"].astype(x.dtype)).reshape(2, 16, 2, 8)
        q = x.reshape(k.shape)
        return (jax.nn.dot_product_attention(q, k, 2 * q, is_causal=True).astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        gradient = jax.grad(attend)(weights, x)
        moved = jax.tree.map(jnp.sign, gradient) if update == "sign" else gradient
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, moved), gradient

    weights = {"k": normal(16, 16) * 0.2, "bias": normal(16, seed=1) * 0.1}
    fast = scheduler.optimize(step, **ON_CPU)
    fast(weights, normal(2, 16, 16, seed=2))
    (decided,) = fast.decisions
    assert decided.kept == "tuned", decided.reason
    assert {"flash_attention", "flash_attention_backward"} <= {each.operation for each in decided.replaced}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_of_attention_that_is_two_percent_off_is_refused(which, monkeypatch):
    def change(gradients):
        off = (1.02 * gradients[which].astype(jnp.float32)).astype(gradients[which].dtype)
        return (*gradients[:which], off, *gradients[which + 1 :])

    faulty(monkeypatch, "flash_attention_backward", change)
    monkeypatch.setattr(comparison, "_checked", {})
    q, k, v = (normal(2, 16, 2, 32, seed=i, dtype=jnp.bfloat16) for i in range(3))

    def loss(q, k, v):
        return (jax.nn.dot_product_attention(q, k, v).astype(jnp.float32) ** 2).sum()

    fast = scheduler.optimize(jax.value_and_grad(loss, (0, 1, 2)), **ON_CPU)
    fast(q, k, v)
    assert "flash_attention_backward" not in {each.operation for each in fast.decisions[0].replaced}
    assert any("disagree with its equations" in reason for reason in fast.decisions[0].left)


def test_what_the_function_raises_is_raised_as_it_is():
    fast = scheduler.optimize(lambda a, b: a @ b, **ON_CPU)
    with pytest.raises(TypeError, match="contracting dimension"):
        fast(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(TypeError):
        fast("no array", jnp.ones((2, 3)))


def test_what_is_stored_nowhere_is_an_error_where_that_is_asked_for():
    fast = scheduler.optimize(lambda a: a @ a, on_miss="error")
    with pytest.raises(scheduler.CacheMiss, match="tile-scheduler tune matmul"):
        fast(normal(6, 6))


def test_a_backend_of_some_operations_is_asked_of_these_and_the_others_are_the_librarys():
    fast = scheduler.optimize(lambda a: a @ a, backends=("mosaic_tpu", "mosaic_gpu_decode"))
    operations = [operation.name for operation in replacing_operations()]
    asked = dict(zip(operations, (options.backends for options in fast._current_options()), strict=True))
    assert asked == {
        "matmul": {"mosaic_tpu"},
        "ragged_dot": {"mosaic_tpu"},
        "ragged_dot_weights": {"mosaic_tpu"},
        "flash_attention": {"mosaic_tpu", "mosaic_gpu_decode"},
        "flash_attention_backward": {"xla"},
        "rows": {"mosaic_tpu"},
    }
    everything = scheduler.optimize(lambda a: a @ a)
    assert {options.backends for options in everything._current_options()} == {None}


def test_even_odds_are_enough_of_a_product_where_the_whole_is_timed():
    problem = MATMUL.problem(m=384, n=6144, k=6144, dtype="bfloat16")
    h200 = hardware.find("H200")
    unsure = predict(MATMUL, problem, h200)
    assert unsure.backend == "xla"
    assert unsure.faster > 0.5
    assert predict(MATMUL, problem, h200, loss_per_gain=1.0).backend == "mosaic_gpu"
    for keep, ratio in (("faster", 1.0), ("tuned", None)):
        fast = scheduler.optimize(lambda a: a @ a, keep=keep)
        assert {options.loss_per_gain for options in fast._current_options()} == {ratio}


class JittedElsewhere:
    """By a library that nothing is known of: it may update objects that no result holds."""

    def __call__(self, x):
        return x

    def lower(self, x):
        return jax.jit(self).lower(x)


def test_wrong_options_are_refused_before_anything_is_called():
    with pytest.raises(ValueError, match="keep='best'"):
        scheduler.optimize(jnp.sin, keep="best")
    with pytest.raises(ValueError, match="on_miss"):
        scheduler.optimize(jnp.sin, on_miss="perhaps")
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        scheduler.optimize(jnp.sin, backends="cuda")
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        scheduler.optimize(jnp.sin, backends=("interpret", "cuda"))
    with pytest.raises(ValueError, match="empty"):
        scheduler.optimize(jnp.sin, backends=())
    with pytest.raises(TypeError, match="backends must be a name or several"):
        scheduler.optimize(jnp.sin, backends=3)
    with pytest.raises(TypeError, match="expects a function"):
        scheduler.optimize(3)
    with pytest.raises(TypeError, match=r"jitted by jax\.jit, flax\.nnx\.jit or equinox\.filter_jit.*JittedElsewhere"):
        scheduler.optimize(JittedElsewhere())


def test_threads_share_one_decision():
    traces = []

    def f(x):
        traces.append(x)
        return x @ x

    fast, x, results = scheduler.optimize(f, **ON_CPU), normal(5, 5), []
    threads = [threading.Thread(target=lambda: results.append(fast(x))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert len(fast.decisions) == 1
    assert len(traces) == 1


def test_tuned_calls_inside_stay_what_they_are():
    def f(x):
        return scheduler.tuned_matmul(x, x, backends="interpret") + x @ x

    fast, x = scheduler.optimize(f, **ON_CPU), normal(6, 6)
    close(fast(x), 2 * (x @ x))
    assert len(fast.decisions[0].replaced) == 1


def test_a_plain_lowering_of_the_same_function_is_untouched():
    f = jax.jit(lambda x: jnp.tanh(x @ x))
    x = normal(6, 6)
    before = f.lower(x).as_text()
    scheduler.optimize(f, **ON_CPU)(x)
    assert f.lower(x).as_text() == before


def test_results_that_are_rounding_alone_may_differ_and_wrong_ones_may_not():
    right = {"loss": jnp.float32(2.0), "zero": jnp.full(1000, 1e-9)}
    other = {"loss": jnp.float32(2.0), "zero": jnp.full(1000, -1e-9)}
    moved = {"loss": jnp.float32(2.0), "zero": jnp.full(1000, 3e-10)}
    assert comparison.disagreement(right, other, lambda seed: moved) is None
    assert "['zero']" in comparison.disagreement(right, other, lambda seed: right)
    signs = jnp.sign(normal(64))
    assert comparison.disagreement(signs, signs.at[:8].multiply(-1), lambda seed: signs) is None
    assert comparison.disagreement(signs, signs.at[:9].multiply(-1), lambda seed: signs)
    assert comparison.disagreement(signs[:4], -signs[:4], lambda seed: signs[:4])
    assert comparison.disagreement(signs, signs.at[0].set(4.0), lambda seed: signs)
    tile = jnp.ones((512, 512))
    assert comparison.disagreement(tile, tile.at[:8, :8].set(0.0), lambda seed: tile)
    infinite = jnp.array([1.0, jnp.inf, jnp.nan])
    assert comparison.disagreement(infinite, infinite, lambda seed: infinite) is None
    assert "finite" in comparison.disagreement(infinite, jnp.array([1.0, 2.0, jnp.nan]), lambda seed: infinite)
    integers = jnp.arange(4)
    assert comparison.disagreement(integers, integers + 1, lambda seed: integers)
