"""Tune a kernel that this project does not ship: ``gelu(x + bias)`` in one pass, its rows per block searched.

python examples/own_kernel.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import scheduler
from search_spaces import (
    Columns,
    Footprint,
    Kernel,
    Library,
    LibraryKernel,
    Operand,
    Operation,
    Phase,
    Problem,
    Space,
    Target,
)


@dataclasses.dataclass(frozen=True)
class BiasGeluProblem(Problem):
    """``gelu(x [m, n] + bias [n])`` in float32."""

    m: int
    n: int

    @classmethod
    def of(cls, x: Any, bias: Any) -> BiasGeluProblem:
        return cls(*x.shape)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.result(), jax.ShapeDtypeStruct((self.n,), jnp.dtype("float32"))

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), jnp.dtype("float32"))

    def reference(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.gelu(x + bias)

    @property
    def flops(self) -> float:
        return 10.0 * self.m * self.n


@dataclasses.dataclass(frozen=True)
class Rows:
    tile_m: int


class BlockedBiasGelu(Kernel[BiasGeluProblem, Rows]):
    backend = "blocked"

    def space(self, problem: BiasGeluProblem, target: Target) -> Space[Rows]:
        p = problem
        return Space(Rows, {"tile_m": (8, 16, 32, 64, 128)}, {"a tile has rows to fill it": lambda s: s.tile_m <= p.m})

    def footprint(self, problem: BiasGeluProblem, schedules: Columns, target: Target) -> Footprint:
        row, tile_m = 4 * problem.n, schedules.tile_m
        return Footprint(
            arithmetic="float32",
            grid=(np.ceil(problem.m / tile_m),),
            step=Phase(
                loads=(Operand(bytes=tile_m * row, axes=(0,)), Operand(bytes=np.full_like(tile_m, row), axes=())),
                flops=10.0 * tile_m * problem.n,
            ),
            tile=Phase(bytes_written=tile_m * row),
            onchip_bytes=(2 * tile_m + 1) * row,
        )

    def run(self, problem: BiasGeluProblem, schedule: Rows, target: Target, /, *args: Any) -> jax.Array:
        def body(x_ref: Any, bias_ref: Any, out_ref: Any) -> None:
            out_ref[...] = jax.nn.gelu(x_ref[...] + bias_ref[...])

        rows = pl.BlockSpec((schedule.tile_m, problem.n), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(pl.cdiv(problem.m, schedule.tile_m),),
            in_specs=[rows, pl.BlockSpec((problem.n,), lambda i: (0,))],
            out_specs=rows,
            out_shape=problem.result(),
            interpret=target.platform == "cpu",
        )(*args)


class XlaBiasGelu(LibraryKernel[BiasGeluProblem]):
    def run(self, problem: BiasGeluProblem, schedule: Library, target: Target, /, *args: Any) -> jax.Array:
        return problem.reference(*args)


BIAS_GELU = Operation("bias_gelu", BiasGeluProblem, (BlockedBiasGelu(), XlaBiasGelu()))


def main() -> None:
    x, bias = BiasGeluProblem(200, 256).inputs(seed=0)
    record = scheduler.tune(BIAS_GELU, BiasGeluProblem.of(x, bias), budget=6)
    for entry in record.entries:
        print(f"{entry.backend:8} {dict(entry.schedule)} {1e6 * entry.measurement.median_s:9.1f} us")
    bias_gelu = scheduler.tuned(BIAS_GELU)
    y = bias_gelu(x, bias, on_miss="error")  # found: no search, no model
    blocked = jax.jit(lambda x, bias: bias_gelu(x, bias, backends="pallas"))(x, bias)
    print(f"{record.winner.backend} answers; our own kernel differs from it by {jnp.abs(y - blocked).max():.1e}")
    gradient = jax.grad(lambda bias: bias_gelu(x, bias).sum())(bias)
    print(f"and it differentiates: the bias's gradient has shape {gradient.shape}")


if __name__ == "__main__":
    main()
