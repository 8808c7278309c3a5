"""Loops of a kernel that the compiler's static estimate does not count in full are told from its jaxpr."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from scheduler.contrib.tpu.estimate import dynamic_grid, miscounted_loops

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def kernel(outer, inner):
    """A kernel with `outer` iterations of `inner`; None is no such loop."""

    def body(x_ref, out_ref):
        def step(_, x):
            return jnp.exp(x) if inner is None else lax.fori_loop(0, inner, lambda _, x: jnp.exp(x), x)

        x = x_ref[...]
        out_ref[...] = step(0, x) if outer is None else lax.fori_loop(0, outer, step, x)

    return pl.pallas_call(
        body,
        out_shape=X,
        grid=(8,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    )


@pytest.mark.parametrize(
    ("outer", "inner", "wrong"),
    [(None, None, False), (16, None, False), (None, 16, False), (16, 4, True), (2, 16, False), (16, 1, False)],
)
def test_a_loop_within_a_loop_of_more_than_two_iterations_is_miscounted(outer, inner, wrong):
    assert miscounted_loops(jax.make_jaxpr(jax.jit(kernel(outer, inner)))(X)) is wrong


def test_bounds_that_are_values_may_be_any():
    def body(n_ref, x_ref, out_ref):
        def step(_, x):
            return lax.fori_loop(0, 4, lambda _, x: jnp.exp(x), x)

        out_ref[...] = lax.fori_loop(0, n_ref[0], step, x_ref[...])

    call = pl.pallas_call(body, out_shape=X)
    assert miscounted_loops(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((1,), jnp.int32), X))


def test_loops_around_a_kernel_are_counted():
    def run(x):
        return lax.fori_loop(0, 8, lambda _, x: kernel(16, None)(x), x)

    assert not miscounted_loops(jax.make_jaxpr(run)(X))


def test_a_grid_of_steps_known_at_run_time_is_dynamic():
    def call(n, x):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(copy, out_shape=X, grid=(n,), in_specs=[block], out_specs=block)(x)

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    assert dynamic_grid(jax.make_jaxpr(jax.jit(call))(jax.ShapeDtypeStruct((), jnp.int32), X))
    assert not dynamic_grid(jax.make_jaxpr(kernel(None, None))(X))
