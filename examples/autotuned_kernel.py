"""Two kernels of one's own by a decorator: a fused bias and gelu in 20 lines, and a product with a footprint in 40.

python examples/autotuned_kernel.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import scheduler
from search_spaces import Footprint, Operand, Phase


@scheduler.autotune(
    tile_m=(8, 16, 32, 64, 128),
    reference=lambda x, bias: jax.nn.gelu(x + bias),
    rules={"a tile has rows to fill it": lambda x, tile_m: tile_m <= x.shape[0]},
)
def bias_gelu(x, bias, *, tile_m, target):
    def body(x_ref, bias_ref, out_ref):
        out_ref[...] = jax.nn.gelu(x_ref[...] + bias_ref[...])

    rows = pl.BlockSpec((tile_m, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(x.shape[0], tile_m),),
        in_specs=[rows, pl.BlockSpec(bias.shape, lambda i: (0,))],
        out_specs=rows,
        out_shape=x,
        interpret=target.platform == "cpu",
    )(x, bias)


def demand(a, b, tile_m, tile_n):
    (m, k), n, size = a.shape, b.shape[1], a.dtype.itemsize
    return Footprint(
        arithmetic=str(a.dtype),
        grid=(np.ceil(m / tile_m), np.ceil(n / tile_n)),
        step=Phase(
            loads=(Operand(bytes=size * tile_m * k, axes=(0,)), Operand(bytes=size * tile_n * k, axes=(1,))),
            flops=2 * tile_m * tile_n * k,
        ),
        tile=Phase(bytes_written=4 * tile_m * tile_n),
        onchip_bytes=size * (tile_m + tile_n) * k + 4 * tile_m * tile_n,
    )


@scheduler.autotune(
    tile_m=(16, 32, 64, 128),
    tile_n=(16, 32, 64, 128),
    reference=lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32),
    footprint=demand,
    tolerance=1e-3,
    flops=lambda a, b: 2 * a.shape[0] * b.size,
)
def product(a, b, *, tile_m, tile_n, target):
    def body(a_ref, b_ref, out_ref):
        out_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32, precision="highest")

    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(m, tile_m), pl.cdiv(n, tile_n)),
        in_specs=[pl.BlockSpec((tile_m, k), lambda i, j: (i, 0)), pl.BlockSpec((k, tile_n), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        interpret=target.platform == "cpu",
    )(a, b)


def main() -> None:
    x, bias = jax.random.normal(jax.random.key(0), (200, 256)), jnp.linspace(-1, 1, 256)
    a, b = (jax.random.normal(jax.random.key(seed), (100, 100)) for seed in (1, 2))
    for function, arrays in ((bias_gelu, (x, bias)), (product, (a, b))):
        problem = function.problem(*arrays)
        record = scheduler.tune(function, problem, budget=6)
        print(f"{function.operation.name} {problem}")
        for entry in record.entries:
            print(f"  {entry.backend:6} {dict(entry.schedule)} {1e6 * entry.measurement.median_s:9.1f} us")
        own = jax.jit(lambda *xs, f=function: f(*xs, backends="pallas"))(*arrays)
        apart = jnp.abs(function(*arrays, on_miss="error") - own).max()  # found: no search, no model
        print(f"  {record.winner.backend} answers; the kernel differs from it by {apart:.1e}")
    gradient = jax.grad(lambda bias: bias_gelu(x, bias).sum())(bias)
    print(f"and they differentiate: the bias's gradient has shape {gradient.shape}")


if __name__ == "__main__":
    main()
