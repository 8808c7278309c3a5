"""What `scheduler.optimize` costs besides its kernels: the host's time of a call, and the first call of a process.

    python benchmarks/optimize_overhead.py linen_adamw optimize     # seconds of the first call; or: plain

models.py measures both. The functions of the host's time have next to no work for a device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import framework_steps
import jax
import jax.numpy as jnp
import optax
import plain_steps
from call_overhead import measure

import scheduler

# Of the second process.
STEP = "linen_adamw"


def optimized(fn: Callable[..., Any], small: bool) -> Any:
    """Returns `scheduler.optimize(fn)`; in a rehearsal on a CPU, with interpreted kernels."""
    return scheduler.optimize(fn, backends="interpret", keep="tuned") if small else scheduler.optimize(fn)


def host_time(ours: Callable[[], Any], direct: Callable[[], Any], turns: int, calls: int) -> dict[str, Any]:
    """Microseconds of a call of both until it returns: the least of several turns."""
    times = measure(ours, direct, (), turns, calls)["repetitions_us"]
    return {"optimize_us": min(times["tuned"]), "jnp_us": min(times["direct"]), "repetitions_us": times}


def of_arrays(count: int) -> dict[str, Any]:
    """The host's time of a function of so many arrays, by `optimize` and by `jax.jit`."""

    def add_one(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: x + 1 for name, x in tree.items()}

    tree = {str(i): jnp.zeros(2) for i in range(count)}
    ours, direct = scheduler.optimize(add_one), jax.jit(add_one)
    return host_time(lambda: ours(tree), lambda: direct(tree), turns=20, calls=max(20, 2000 // count))


def of_nnx() -> dict[str, Any]:
    """The host's time of an nnx step whose module and optimizer have 180 arrays, by `optimize` and by `nnx.jit`."""
    from flax import nnx

    class Layers(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(30)])

    def step(model: Layers, optimizer: nnx.Optimizer) -> None:
        optimizer.update(model, jax.tree.map(lambda w: w * 0.1, nnx.state(model, nnx.Param)))

    def call(version: Callable[..., Any]) -> Callable[[], Any]:
        model = Layers()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        return lambda: version(model, optimizer)

    plain = nnx.jit(step)
    return host_time(call(scheduler.optimize(plain)), call(plain), turns=20, calls=20)


def second_process(small: bool) -> dict[str, Any]:
    """Seconds of the first call of a step in a process of its own, whose decision and programs are stored.

    Four processes: the first decides; the others find its decision in the store, and compiled programs in JAX's cache.
    """
    with tempfile.TemporaryDirectory() as directory:
        env = os.environ | {
            "TILE_SCHEDULER_CACHE": str(Path(directory, "cache.db")),
            "JAX_COMPILATION_CACHE_DIR": str(Path(directory, "jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the process that waits holds most of a GPU's memory
        }

        def first_call(version: str) -> float:
            command = [sys.executable, __file__, STEP, version, *["--small"] * small]
            ran = subprocess.run(command, env=env, capture_output=True, text=True)
            if ran.returncode:
                raise RuntimeError(f"{' '.join(command)}: {ran.stderr[-2000:]}")
            return float(ran.stdout.split()[-1])

        decided_s, _, plain_s, optimize_s = map(first_call, ("optimize", "plain", "plain", "optimize"))
    return {"step": STEP, "decided_s": decided_s, "plain_s": plain_s, "optimize_s": optimize_s}


def main() -> None:
    steps = {step.name: step for step in (*plain_steps.STEPS, *framework_steps.STEPS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=steps)
    parser.add_argument("version", choices=("optimize", "plain"))
    parser.add_argument("--small", action="store_true", help="a small model by the interpreter")
    options = parser.parse_args()
    built = steps[options.step].build(options.small)
    version = optimized(built.function, options.small) if options.version == "optimize" else built.function
    call = built.caller(version)
    started = time.perf_counter()
    jax.block_until_ready(call())
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
