"""A product for a TPU that is not here: schedules that its compiler takes or refuses, that end it, or are wrong."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from search_spaces import Columns, Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Problem, Space, Target
from search_spaces.sharding import Sharding

DTYPE = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ProductProblem(Problem):
    """`script`: how schedules behave beside those that are right, by a word each, separated by dots."""

    m: int
    n: int
    k: int
    script: str = "right"

    @classmethod
    def of(cls, *args: Any, **params: Any) -> ProductProblem:
        (m, k), (_, n) = args[0].shape, args[1].shape
        return cls(m, n, k)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return jax.ShapeDtypeStruct((self.m, self.k), DTYPE), jax.ShapeDtypeStruct((self.k, self.n), DTYPE)

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), jnp.dtype(jnp.float32))

    def reference(self, *args: jax.Array) -> jax.Array:
        return jnp.dot(*args, preferred_element_type=jnp.float32)

    @property
    def arithmetic(self) -> str:
        return "bfloat16"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True)
class ProductSchedule:
    tile_m: int
    tile_n: int
    behave: str = "right"


class Product(Kernel[ProductProblem, ProductSchedule]):
    backend = "mosaic_tpu"

    def supports(self, problem: ProductProblem, target: Target) -> str | None:
        return None if target.platform == "tpu" else f"it is for TPUs, and {target.kind} is none"

    def space(self, problem: ProductProblem, target: Target) -> Space[ProductSchedule]:
        return Space(
            ProductSchedule,
            {"tile_m": (128, 256, 512), "tile_n": (128, 256, 512), "behave": tuple(problem.script.split("."))},
            {
                "tiles divide the result": lambda s: (problem.m % s.tile_m == 0) & (problem.n % s.tile_n == 0),
                "others are of one tile": lambda s: (s.behave == "right") | ((s.tile_m == 128) & (s.tile_n == 128)),
            },
        )

    def footprint(self, problem: ProductProblem, schedules: Columns, target: Target) -> Footprint:
        m, n, k = schedules.tile_m, schedules.tile_n, problem.k
        return Footprint(
            arithmetic="bfloat16",
            grid=(problem.m / m, problem.n / n),
            step=Phase(
                loads=(Operand(bytes=2.0 * m * k, axes=(0,)), Operand(bytes=2.0 * k * n, axes=(1,))),
                flops=2.0 * m * n * k,
            ),
            tile=Phase(bytes_written=4.0 * m * n),
            onchip_bytes=np.asarray(4 * (m * k + k * n) + 8 * m * n),
        )

    def run(
        self, problem: ProductProblem, schedule: ProductSchedule, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        m, n, k, behave = schedule.tile_m, schedule.tile_n, problem.k, schedule.behave
        match behave:
            case "raises":
                raise ValueError("no such way")
            case "aborts":
                os.abort()
            case "hangs":
                time.sleep(1000)
        live = 5000 if behave == "greedy" else 1

        def kernel(a: Any, b: Any, out: Any, scratch: Any) -> None:
            @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
            def _() -> None:
                scratch[...] = jnp.zeros_like(scratch)

            product = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
            scratch[...] += jnp.broadcast_to(product[:8, :128], scratch.shape)
            out[...] = product if behave != "wrong" else product + 1.0

        return pl.pallas_call(
            kernel,
            out_shape=problem.result(),
            grid=(problem.m // m, problem.n // n),
            in_specs=[pl.BlockSpec((m, k), lambda i, j: (i, 0)), pl.BlockSpec((k, n), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((m, n), lambda i, j: (i, j)),
            scratch_shapes=[pltpu.VMEM((live, 8, 128), jnp.float32)],
            name="own_product",
        )(*args)


class ProductLibrary(LibraryKernel[ProductProblem]):
    def run(self, problem: ProductProblem, schedule: Any, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        return jnp.dot(*args, preferred_element_type=jnp.float32)


PRODUCT = Operation(
    "own_product",
    ProductProblem,
    (Product(), ProductLibrary()),
    shard=lambda problem: Sharding("m k, k n -> m n", divided=("m", "n")),
)
