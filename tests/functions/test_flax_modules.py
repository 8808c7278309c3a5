"""Functions of flax.nnx modules: what they update in place is planned, and updated once."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import warnings
import weakref

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import scheduler
from scheduler.rewriting import optimize
from scheduler.rewriting.pure import pure_call

pytestmark = pytest.mark.slow

TUNED = {"backends": "interpret", "keep": "tuned"}
WIDTH = 4


class Model(nnx.Module):
    """Statistics, random numbers, and a layer that is used twice."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.up

    def __call__(self, x):
        return self.tied(self.dropout(self.norm(self.up(x))))


class Small(nnx.Module):
    """Enough for what does not depend on layers."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)

    def train(self, optimizer, x):
        return step(self, optimizer, x)


class Tuned(nnx.Module):
    """Two tuned products."""

    def __init__(self, rngs):
        self.one, self.two = (nnx.Param(jax.random.normal(rngs(), (WIDTH, WIDTH))) for _ in range(2))

    def __call__(self, x):
        return scheduler.tuned_matmul(jnp.tanh(scheduler.tuned_matmul(x, self.one[...])), self.two[...])


class Stack(nnx.Module):
    """Layers by vmap, run by scan and remat."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def step(model, optimizer, x, scale=1.0):
    loss, gradients = nnx.value_and_grad(lambda model: scale * (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


# What an optimized step is compared with; compiled, as eager steps compile each operation apart.
REFERENCE = nnx.jit(step)


def made(kind=Small):
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def batch(rows):
    return jax.random.normal(jax.random.key(rows), (rows, WIDTH))


def data(tree):
    def plain(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return [plain(x) for x in jax.tree.leaves(tree)]


def assert_same(actual, expected):
    for x, y in zip(data(actual), data(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-4)


def state(*modules):
    return [nnx.state(module) for module in modules]


def assert_same_effects(fast, plain=REFERENCE, kind=Small, rows=(3, 3)):
    """The original and the optimized function, each on modules of its own: results and states after each step."""
    mine, theirs = made(kind), made(kind)
    for n in rows:
        assert_same(fast(*mine, batch(n)), plain(*theirs, batch(n)))
        assert_same(state(*mine), state(*theirs))


def problems(fn, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {str(row.problem): row.count for row in scheduler.problems(fn, *args, **kwargs)}


STEP = {  # forwards twice, the weights' gradients twice, and the first product's result's
    "m=3 n=4 k=4 dtype=float32": 2,
    "m=4 n=4 k=3 dtype=float32 transpose_a=True": 2,
    "m=3 n=4 k=4 dtype=float32 transpose_b=True": 1,
}


@pytest.mark.parametrize("jitted", [lambda fn: fn, nnx.jit, lambda fn: nnx.jit(fn, donate_argnums=(0, 1))])
def test_a_step_that_updates_modules_is_planned_with_its_backward_pass(jitted):
    assert problems(jitted(step), *made(Tuned), batch(3)) == STEP
    assert problems(jitted(step), *made(Tuned), batch(3), scale=2.0) == STEP


def test_modules_that_are_captured_or_are_shapes_are_planned_alike():
    model, optimizer = made(Tuned)
    assert problems(lambda x: step(model, optimizer, x), batch(3)) == STEP
    assert problems(functools.partial(step, model, optimizer, scale=2.0), batch(3)) == STEP
    shapes = nnx.eval_shape(lambda: made(Tuned))
    assert problems(step, *shapes, jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)) == STEP


def test_derivatives_that_are_dropped_are_never_dropped_in_silence():
    with pytest.warns(RuntimeWarning, match="computes derivatives that none of its results needs"):
        scheduler.problems(jax.jit(step), *made(Tuned), batch(3))  # as jax.jit has it, the updates are lost


@pytest.mark.parametrize(
    ("jitted", "options", "kept"),
    [(lambda fn: fn, TUNED, "tuned"), (nnx.jit, {"backends": "interpret", "seconds": 0.01}, None)],
)
def test_an_optimized_step_updates_modules_once_and_as_the_original(jitted, options, kept):
    """However often the trial runs it: statistics and counts of random numbers are among the states."""
    fast = scheduler.optimize(jitted(step), **options)
    assert_same_effects(fast, kind=Model, rows=(3, 3, 5) if kept else (3, 3))
    for decided in fast.decisions:
        assert len(decided.replaced) == 3 or decided.groups  # of which slow ones are dropped
        assert decided.kept == kept or decided.plain.rounds > 0


def test_no_module_of_a_call_is_kept_alive():
    fast = scheduler.optimize(step)
    model, optimizer = made()
    fast(model, optimizer, batch(3))
    kept = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert kept() is None


def test_layers_of_scan_remat_and_vmap_are_updated():
    assert_same_effects(scheduler.optimize(nnx.jit(step)), kind=Stack, rows=(3, 3))


@pytest.mark.parametrize("how", ["nnx.jit", "optimize"])
def test_what_is_donated_is_deleted_and_nothing_else(how):
    options = {"donate_argnums": (0,), "donate_argnames": "optimizer"}
    fast = scheduler.optimize(step, **options) if how == "optimize" else scheduler.optimize(nnx.jit(step, **options))
    model, optimizer = made()
    x, kernel, count = batch(3), model.layer.kernel[...], optimizer.step[...]
    fast(model, x=x, optimizer=optimizer)
    assert (kernel.is_deleted(), count.is_deleted(), x.is_deleted()) == (True, True, False)
    assert_same_effects(fast, rows=(3,))


def several(model, optimizer, x, times, *, mode="sum"):
    return {"sum": sum(step(model, optimizer, x) for _ in range(times))}[mode]


SEVERAL = nnx.jit(several, static_argnums=3, static_argnames="mode")


@pytest.mark.parametrize("by_library", [False, True])
def test_static_arguments_of_nnx_jit_and_of_optimize_are_static(by_library):
    options = {"static_argnums": 3, "static_argnames": "mode"}
    fast = scheduler.optimize(SEVERAL) if by_library else scheduler.optimize(several, **options)
    assert_same_effects(lambda *a: fast(*a, 2, mode="sum"), lambda *a: SEVERAL(*a, 2, mode="sum"), rows=(3,))


def test_numbers_are_inputs_unless_the_function_decides_by_them():
    fast = scheduler.optimize(several)
    for times in (1, 2):
        assert_same_effects(lambda *a, n=times: fast(*a, n), lambda *a, n=times: SEVERAL(*a, n, mode="sum"), rows=(3,))
    scaled, modules = scheduler.optimize(step), made()
    for scale in (1.0, 2.0, 3.0):
        scaled(*modules, batch(3), scale=scale)
    assert len(scaled.decisions) == 1


class Trainer:
    """A plain object that holds modules, counts and collects."""

    def __init__(self):
        self.model, self.optimizer = made()
        self.count, self.last = 0, {}

    def step(self, x):
        self.count += 1
        self.last["loss"] = step(self.model, self.optimizer, x)
        return self.last["loss"]


def captured_by_closure():
    model, optimizer = made()

    def inner(x):
        return step(model, optimizer, x)

    return (lambda x: inner(x)), (model, optimizer)


def held_by_partial():
    modules = made()
    return functools.partial(step, *modules), modules


def held_by_cached_partial():
    modules = made()
    return nnx.cached_partial(nnx.jit(step), *modules), modules


def method_of_a_module():
    model, optimizer = made()
    return functools.partial(model.train, optimizer), (model, optimizer)


def method_of_an_object():
    trainer = Trainer()
    return trainer.step, (trainer.model, trainer.optimizer)


def object_in_a_closure():
    trainer = Trainer()
    return (lambda x: trainer.step(x)), (trainer.model, trainer.optimizer)


def default_of_a_function():
    modules = made()

    def with_default(x, *, modules=modules):
        return step(*modules, x)

    return with_default, modules


@pytest.mark.parametrize(
    "making",
    [
        captured_by_closure,
        held_by_partial,
        held_by_cached_partial,
        method_of_a_module,
        method_of_an_object,
        object_in_a_closure,
        default_of_a_function,
    ],
)
def test_modules_that_a_function_holds_are_updated_in_place(making):
    fn, mine = making()
    fast, theirs = scheduler.optimize(fn), made()
    for n in (3, 3):
        assert_same(fast(batch(n)), REFERENCE(*theirs, batch(n)))
        assert_same(state(*mine), state(*theirs))


def test_an_optimized_function_of_nnx_jit_is_one_for_cached_partial():
    mine, theirs = made(), made()
    fast = scheduler.optimize(nnx.jit(step), backends="interpret", keep="tuned")
    cached = nnx.cached_partial(fast, *mine)
    for n in (3, 3):
        assert_same(cached(batch(n)), REFERENCE(*theirs, batch(n)))
        assert_same(state(*mine), state(*theirs))
    assert "kernel" in fast.decisions[0].reason
    assert len(fast.decisions) == 1


MODEL, OPTIMIZER = made()


def step_of_globals(x):
    return step(MODEL, OPTIMIZER, x)


def test_modules_in_globals_are_updated_in_place():
    model, optimizer = made()
    assert_same(scheduler.optimize(step_of_globals)(batch(3)), REFERENCE(model, optimizer, batch(3)))
    assert_same(state(MODEL, OPTIMIZER), state(model, optimizer))


def test_attributes_of_an_object_are_set():
    trainer = Trainer()
    fast = scheduler.optimize(trainer.step)
    for count in (1, 2):
        loss = fast(batch(3))
        assert trainer.count == count
        assert trainer.last["loss"] == loss


def test_structure_that_changes_and_modules_that_are_returned_are_those_of_the_original():
    def grow(model, x):
        extra = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        extra.kernel[...] = x.T @ x
        model.extra, model.tag = extra, "grown"
        return model, extra, {"activation": jnp.tanh, "result": model(x), "nothing": None, "count": 3}

    mine, theirs = made()[0], made()[0]
    fast = scheduler.optimize(grow)
    for _ in range(2):  # the second time it has one more to begin with
        model, extra, rest = fast(mine, batch(3))
        *_, expected = grow(theirs, batch(3))
        assert model is mine
        assert extra is mine.extra
        assert (mine.tag, rest["activation"], rest["count"]) == ("grown", jnp.tanh, 3)
        assert_same(rest["result"], expected["result"])
        assert_same(state(mine), state(theirs))


def test_a_function_may_make_modules():
    made_inside = scheduler.optimize(lambda x: Small(nnx.Rngs(0)))(batch(3))
    assert_same(made_inside(batch(3)), Small(nnx.Rngs(0))(batch(3)))


def test_one_module_in_two_arguments_stays_one():
    def apart(one, other, x):
        one.kernel[...] = one.kernel[...] + x.T @ x
        return other(x)

    mine, theirs = made()[0].layer, made()[0].layer
    assert_same(scheduler.optimize(apart)(mine, mine, batch(3)), apart(theirs, theirs, batch(3)))
    assert_same(state(mine), state(theirs))


def test_gradients_of_tied_weights_are_summed():
    def gradients(model, x):
        model.eval()
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    mine, theirs = made(Model)[0], made(Model)[0]
    assert_same(scheduler.optimize(gradients)(mine, batch(3)), gradients(theirs, batch(3)))
    assert mine.dropout.deterministic  # set by `eval` within


def test_what_is_not_updated_is_not_among_the_outputs():
    """So that no copy is made of a model that is read."""
    model, _ = made(Model)
    model.eval()
    for fn in (lambda model, x: model(x), nnx.jit(lambda model, x: model(x))):
        call = pure_call(fn, (model, batch(3)))
        assert len(jax.eval_shape(call.function, *call.arrays).arrays) == 1


def test_modules_that_are_replaced_or_restored_between_calls_are_seen():
    model, _ = made()
    fast = scheduler.optimize(lambda x: model(x))
    model.eval()
    first = fast(batch(3))
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    assert float(jnp.abs(first).sum()) > 0
    assert float(jnp.abs(fast(batch(3))).sum()) == 0
    assert len(fast.decisions) == 1


class Hidden:
    """Modules in a set are not found."""

    def __init__(self):
        self.trainers = {Trainer()}

    def step(self, x):
        return next(iter(self.trainers)).step(x)


class Deep:
    def __init__(self):
        self.trainers = (Trainer(),)

    def step(self, x):
        return self.trainers[0].step(x)


def test_modules_of_objects_in_a_container_of_an_object_are_updated():
    deep, expected = Deep(), Deep()
    fast = scheduler.optimize(deep.step)
    for _ in range(2):
        np.testing.assert_allclose(fast(batch(3)), expected.step(batch(3)), rtol=1e-4)
    assert deep.trainers[0].count == 2


COUNT = 0


def counting(x):
    global COUNT
    COUNT += 1
    return MODEL(x)


def test_effects_that_cannot_be_carried_are_refused_in_a_sentence():
    for ask in (scheduler.problems, lambda fn, x: scheduler.optimize(fn)(x)):
        with pytest.raises(scheduler.SchedulerError, match="changes a module that is neither an argument nor"):
            ask(Hidden().step, batch(3))
        with pytest.raises(scheduler.SchedulerError, match="assigns COUNT outside of itself"):
            ask(counting, batch(3))
    with pytest.raises(scheduler.SchedulerError, match=r"in_shardings apply to arrays only"):
        scheduler.optimize(step, in_shardings=None)(*made(), batch(3))


def test_what_is_new_at_each_call_and_no_array_is_told(monkeypatch):
    monkeypatch.setattr(optimize, "MANY_CONSTANTS", 2)
    fast = scheduler.optimize(lambda model, x, text: model(x))
    fast(MODEL, batch(3), "one")
    fast(MODEL, batch(3), "one")
    with pytest.warns(RuntimeWarning, match="compiled for the 2th time"):
        fast(MODEL, batch(3), "two")


def test_variables_that_are_references_are_updated_and_not_tried_twice():
    with nnx.var_defaults(ref=True):
        layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    before = jnp.copy(layer.kernel[...])

    def add(layer, x):
        y = layer(x)
        layer.kernel[...] = layer.kernel[...] + 1.0
        return y

    fast = scheduler.optimize(add, **TUNED)
    assert_same(fast(layer, batch(3)), batch(3) @ before)
    assert_same(layer.kernel[...], before + 1)
    assert "side effects" in fast.decisions[0].reason


def test_the_core_imports_neither_flax_nor_equinox():
    code = "import sys, scheduler; scheduler.optimize, scheduler.problems; print({'flax', 'equinox'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, train=True):
        x = flax.linen.BatchNorm(use_running_average=not train)(flax.linen.Dense(WIDTH)(x))
        return flax.linen.Dropout(0.5, deterministic=not train)(x)


def test_linen_with_mutable_collections_and_random_numbers():
    model, x, key = Linen(), batch(3), jax.random.key(1)
    variables = model.init(jax.random.key(0), x, train=False)

    def train(params, statistics, x, key):
        def loss(params):
            y, updated = model.apply(
                {"params": params, **statistics}, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
            )
            return (y**2).mean(), updated

        (value, updated), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda w, g: w - g, params, gradients), updated, value

    args = variables["params"], {"batch_stats": variables["batch_stats"]}, x, key
    assert_same(scheduler.optimize(train)(*args), train(*args))
    apply = scheduler.optimize(model.apply)  # what is no array among its arguments is static
    for kwargs in ({"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": key}}, {"train": False}):
        assert_same(apply(variables, x, **kwargs), model.apply(variables, x, **kwargs))
    assert scheduler.problems(model.apply, variables, x, train=False).untuned
