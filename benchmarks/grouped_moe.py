"""A layer of experts in plain JAX, by `scheduler.optimize` and by `jax.jit`: forward, and its gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from harness import Kept
from suite import search
from whole_functions import distances, wall_times, worst

import scheduler
from scheduler.core.hardware import Hardware
from scheduler.measure.pool import start_runner
from scheduler.search import jobs
from scheduler.store.database import CACHE_VARIABLE
from scheduler.store.store import Store
from search_spaces.ragged_dot import RAGGED_DOT

FORWARD, BACKWARD = "moe forward", "moe backward"


@dataclasses.dataclass(frozen=True)
class Moe:
    """The extents of the layer, and its number of experts for each token."""

    tokens: int
    width: int
    hidden: int
    experts: int
    active: int
    dtype: str = "bfloat16"

    def arguments(self) -> tuple[jax.Array, ...]:
        """Returns the tokens, the router and the matrices `gate`, `up` and `down` of each expert."""
        shapes = [
            (self.tokens, self.width),
            (self.width, self.experts),
            (self.experts, self.width, self.hidden),
            (self.experts, self.width, self.hidden),
            (self.experts, self.hidden, self.width),
        ]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        drawn = [jax.random.normal(key, shape, self.dtype) for key, shape in zip(keys, shapes, strict=True)]
        return drawn[0], *(x * jnp.asarray(x.shape[-2] ** -0.5, x.dtype) for x in drawn[1:])


LAYER, REHEARSED = Moe(4096, 2048, 1024, 64, 8), Moe(16, 8, 8, 4, 2, "float32")


def layer(active: int, x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The layer as people write it: tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies those of each."""
    experts = gate.shape[0]
    scores, chosen = jax.lax.top_k(jax.nn.softmax((x @ router).astype(jnp.float32)), active)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=experts).astype(jnp.int32)
    rows = x[order // active]
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
    out = product(hidden, down)
    weighted = out * scores.ravel()[order][:, None].astype(out.dtype)
    return jnp.zeros_like(x).at[order // active].add(weighted)


def gradient(active: int, *args: jax.Array) -> Any:
    """Returns the gradient by tokens and by all matrices."""

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(layer(active, *args).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=tuple(range(len(args))))(*args)


def rows(cache: str, hardware: Hardware, budget: int, kept: Kept, deadline: float) -> list[dict[str, Any]]:
    """A row for the layer and one for its gradient, unless time is up.

    Args:
      cache: path or URL of the cache to search in and to fill.
    """
    of = REHEARSED if hardware.platform == "cpu" else LAYER
    found = []
    for name, function in ((FORWARD, layer), (BACKWARD, gradient)):
        conditions = {"point": name, "layer": str(of), "device": hardware.id, "jax": jax.__version__}
        row = kept.get(conditions)
        if row is None and time.perf_counter() < deadline:
            row = kept.add(_row(name, of, functools.partial(function, of.active), cache, budget, deadline), conditions)
        if row is not None:
            found.append(row)
    return found


def _row(name: str, of: Moe, written: Callable[..., Any], cache: str, budget: int, deadline: float) -> dict[str, Any]:
    args = of.arguments()
    began = time.perf_counter()
    found = scheduler.problems(scheduler.optimize(written), *args)
    tasks = [jobs.Task(row.operation, row.problem, jobs.SearchOptions(budget)) for row in found]
    with contextlib.closing(start_runner(RAGGED_DOT)) as runner:
        search(tasks, runner, Store(cache), deadline)
    # `optimize` reads the user's cache.
    with mock.patch.dict(os.environ, {CACHE_VARIABLE: cache}):
        optimized = scheduler.optimize(written)
        jax.block_until_ready(optimized(*args))
    took_s = time.perf_counter() - began
    runs = {
        "jit": functools.partial(jax.jit(written).lower(*args).compile(), *args),
        "optimize": functools.partial(optimized, *args),
    }
    off = distances(written, args, {version: run() for version, run in runs.items()})
    line = {"point": name, "layer": str(of), "deciding_s": took_s} | wall_times(runs, 1)
    line["error_vs_jit"] = worst(off["optimize"], off["jit"])
    line["optimized"] = optimized.report()
    return line
