"""Kernels that are right only because an interpreter is lenient are refused on a CPU, and right ones are not."""

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

import scheduler
from scheduler.core.hardware import CPU
from scheduler.core.records import Failure
from scheduler.measure.bench import Bench
from search_spaces.jax_compat import HAS_GPU_INTERPRETER

NAMES = itertools.count()
ROWS = jax.ShapeDtypeStruct((16, 32), jnp.float32)
interpreted = functools.partial(pl.pallas_call, interpret=True)
in_hbm = pl.BlockSpec(memory_space=pl.ANY)


def confirmed(kernel, reference):
    def own(x, *, tile, target):
        return kernel(x)

    decorated = scheduler.autotune(tile=(8,), reference=reference, name=f"own_{next(NAMES)}", tolerance=1e-5)(own)
    bench = Bench(decorated.operation, decorated.operation.problem.of(ROWS), CPU)
    assert not isinstance(bench.measure("pallas", {"tile": 8}, 1), Failure), "it is right in the lenient interpreter"
    return bench.confirm("pallas", {"tile": 8})


def by_rows(tile, body, first=lambda i: i):
    def run(x):
        return interpreted(
            body,
            grid=(pl.cdiv(x.shape[0], tile),),
            in_specs=[pl.BlockSpec((tile, 32), lambda i: (first(i), 0))],
            out_specs=pl.BlockSpec((tile, 32), lambda i: (i, 0)),
            out_shape=x,
        )(x)

    return run


def doubled(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def copied_and_doubled(waits):
    def body(x_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        if waits == "before":
            copy.wait()
        out_ref[...] = 2 * buffer[...]
        if waits == "after":
            copy.wait()

    scratch = [pltpu.VMEM(ROWS.shape, ROWS.dtype), pltpu.SemaphoreType.DMA]
    return lambda x: interpreted(body, in_specs=[in_hbm], out_shape=x, scratch_shapes=scratch)(x)


def summed(*, revisits):
    """Adds the four quarters of the columns; with `revisits`, each block of rows is left before it is complete."""
    place = (lambda j, i: (i, j)) if revisits else (lambda i, j: (i, j))

    def body(x_ref, out_ref):
        @pl.when(pl.program_id(0 if revisits else 1) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += x_ref[...]

    return lambda x: interpreted(
        body,
        grid=(4, 2) if revisits else (2, 4),
        in_specs=[pl.BlockSpec((8, 8), place)],
        out_specs=pl.BlockSpec((8, 8), lambda *at: (place(*at)[0], 0)),
        out_shape=jax.ShapeDtypeStruct((16, 8), jnp.float32),
    )(x)


def quarters(x):
    return x.reshape(16, 4, 8).sum(axis=1)


def masked(x):
    def body(x_ref, out_ref):
        rows = pl.ds(6 * pl.program_id(0), 6)
        mask = (6 * pl.program_id(0) + jnp.arange(6) < 16)[:, None]
        triton.store(out_ref.at[rows, :], 2 * triton.load(x_ref.at[rows, :], mask=mask, other=0.0), mask=mask)

    return interpreted(body, grid=(3,), out_shape=x)(x)


def reversed_by_index(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[jnp.arange(16)[::-1], :]

    return interpreted(body, out_shape=x)(x)


def first_row_in_place(x):
    def body(x_ref, out_ref):
        out_ref[0, :] = 2 * x_ref[0, :]

    return interpreted(body, out_shape=x, input_output_aliases={0: 0})(x)


WRONG = {
    "no wait": (copied_and_doubled("never"), lambda x: 2 * x, "is nan"),
    "a wait after the use": (copied_and_doubled("after"), lambda x: 2 * x, "is nan"),
    "a block that is revisited": (summed(revisits=True), quarters, "RuntimeError: Revisited block"),
    "a block out of bounds": (
        by_rows(8, doubled, lambda i: 2 * i),
        lambda x: 2 * x,
        "IndexError: Out-of-bounds block index",
    ),
}
RIGHT = {
    "blocks of rows": (by_rows(8, doubled), lambda x: 2 * x),
    "blocks that do not divide the rows": (by_rows(6, doubled), lambda x: 2 * x),
    "a wait before the use": (copied_and_doubled("before"), lambda x: 2 * x),
    "sums in one visit": (summed(revisits=False), quarters),
    "a batch of kernels": (jax.vmap(lambda row: interpreted(doubled, out_shape=row)(row)), lambda x: 2 * x),
    "code that the strict interpreter lacks": (masked, lambda x: 2 * x),
    "an index that the strict interpreter lacks": (reversed_by_index, lambda x: x[::-1]),
    "results over operands": (first_row_in_place, lambda x: x.at[0].multiply(2)),
    "no kernel": (lambda x: x + x, lambda x: 2 * x),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_only_a_lenient_interpreter_runs_is_refused(wrong, caplog):
    kernel, reference, reason = WRONG[wrong]
    with caplog.at_level(logging.ERROR):
        failure = confirmed(kernel, reference)
    assert (failure.stage, failure.detail.startswith("in Pallas's strict interpreter, ")) == ("verify", True)
    assert reason in failure.detail
    assert "\n" not in failure.detail
    assert caplog.records == [], "JAX's log does not repeat it"


@pytest.mark.parametrize("right", RIGHT)
def test_what_is_right_is_confirmed(right):
    assert confirmed(*RIGHT[right]) is None


@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="Mosaic GPU's interpreter needs JAX 0.11")
@pytest.mark.parametrize("waits", ["before", "after"])
def test_a_race_in_an_interpreted_gpu_kernel_is_refused(waits):
    def body(x_ref, out_ref, smem_ref, barrier_ref):
        plgpu.copy_gmem_to_smem(x_ref, smem_ref, barrier_ref)
        if waits == "before":
            plgpu.barrier_wait(barrier_ref)
        out_ref[...] = 2 * smem_ref[...]
        if waits == "after":
            plgpu.barrier_wait(barrier_ref)

    kernel = plgpu.kernel(
        body,
        out_type=ROWS,
        grid=(1,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM(ROWS.shape, ROWS.dtype), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(),
    )
    found = confirmed(kernel, lambda x: 2 * x)
    if waits == "before":
        assert found is None
    else:
        assert "in Pallas's strict interpreter, RuntimeError: RACE DETECTED" in found.detail
        assert "test_strict_interpreter.py:" in found.detail
