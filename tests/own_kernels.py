"""Kernels of one's own by `scheduler.autotune`: a product with its epilogue, two results, shared memory, and faults."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

import scheduler
from search_spaces import Tolerance
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, plgpu


def linear_reference(x, w, bias=None, *, activation):
    sums = jnp.dot(x, w, preferred_element_type=jnp.float32)
    sums = sums if bias is None else sums + bias
    return (jax.nn.silu(sums) if activation == "silu" else sums).astype(x.dtype)


@scheduler.autotune(
    tile_m=(8, 16, 32),
    tile_n=(16, 32),
    tile_k=(16, 64),
    reference=linear_reference,
    rules={
        "a tile is no longer than k": lambda x, tile_k: tile_k <= x.shape[1],
        "at most 512 elements of a result tile": lambda tile_m, tile_n: tile_m * tile_n <= 512,
    },
    tolerance=lambda x: Tolerance(absolute=2e-2, relative=2e-2) if x.dtype == jnp.bfloat16 else Tolerance(1e-4, 1e-4),
    flops=lambda x, w: 2 * x.size * w.shape[1],
    name="linear",
)
def linear(x, w, bias=None, *, activation="none", tile_m, tile_n, tile_k, target):
    (m, k), n = x.shape, w.shape[1]
    steps = pl.cdiv(k, tile_k)

    def body(*refs):
        x_ref, w_ref, *bias_ref, out_ref, sums_ref = refs
        step = pl.program_id(2)
        within = step * tile_k + lax.broadcasted_iota(jnp.int32, (tile_m, tile_k), 1) < k

        @pl.when(step == 0)
        def _():
            sums_ref[...] = jnp.zeros_like(sums_ref)

        x_tile = jnp.where(within, x_ref[...], 0)
        w_tile = jnp.where(within[:1].T, w_ref[...], 0)
        sums_ref[...] += jnp.dot(x_tile, w_tile, preferred_element_type=jnp.float32, precision="highest")

        @pl.when(step == steps - 1)
        def _():
            sums = sums_ref[...] + bias_ref[0][...] if bias_ref else sums_ref[...]
            out_ref[...] = (jax.nn.silu(sums) if activation == "silu" else sums).astype(out_ref.dtype)

    return pl.pallas_call(
        body,
        grid=(pl.cdiv(m, tile_m), pl.cdiv(n, tile_n), steps),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda i, j, s: (i, s)),
            pl.BlockSpec((tile_k, tile_n), lambda i, j, s: (s, j)),
            *([] if bias is None else [pl.BlockSpec((tile_n,), lambda i, j, s: (j,))]),
        ],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pl.MemorySpace.ANY((tile_m, tile_n), jnp.float32)],
        interpret=target.platform == "cpu",
    )(x, w, *([] if bias is None else [bias]))


@scheduler.autotune(
    tile=lambda x: tuple(tile for tile in (4, 8, 16) if x.shape[0] % tile == 0),
    reference=lambda x: (x.sum(axis=1), x.max(axis=1)),
    tolerance=1e-5,
    name="sum_and_max",
)
def sum_and_max(x, *, tile, target):
    def body(x_ref, sum_ref, max_ref):
        sum_ref[...] = x_ref[...].sum(axis=1)
        max_ref[...] = x_ref[...].max(axis=1)

    rows = pl.BlockSpec((tile,), lambda i: (i,))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // tile,),
        in_specs=[pl.BlockSpec((tile, x.shape[1]), lambda i: (i, 0))],
        out_specs=(rows, rows),
        out_shape=(jax.ShapeDtypeStruct(x.shape[:1], x.dtype),) * 2,
        interpret=target.platform == "cpu",
    )(x)


@scheduler.autotune(
    tile=(32, 64, 128, 512),
    reference=lambda x: 2 * x,
    rules={"a tile divides the rows": lambda x, tile: x.shape[0] % tile == 0},
    name="doubled",
)
def doubled(x, *, tile, target):
    """Through shared memory: a tile of rows and its barrier are all that a block asks for."""

    def body(x_ref, out_ref, smem_ref, barrier_ref):
        rows = pl.ds(lax.axis_index("i") * tile, tile)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], smem_ref, barrier_ref)
        plgpu.barrier_wait(barrier_ref)
        smem_ref[...] = smem_ref[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem_ref, out_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // tile,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((tile, x.shape[1]), x.dtype), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams() if target.platform == "cpu" and HAS_GPU_INTERPRETER else None,
    )(x)


@scheduler.autotune(how=("right", "wrong", "raises", "misshapen"), reference=lambda x: x + 1, name="faulty_addition")
def faulty(x, *, how, target):
    if how == "raises":
        raise ValueError("no such way")

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + (2 if how == "wrong" else 1)

    shape = jax.ShapeDtypeStruct((x.size - (how == "misshapen"),), x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=target.platform == "cpu")(x[: shape.size])
