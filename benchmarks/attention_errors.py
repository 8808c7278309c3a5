"""What results of attention are off by, against the formula in float32: a process of its own for `attention.py`.

Reads points from its input as JSON, and writes a line of JSON for each; begins none after so many seconds.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from harness import posed

from scheduler.core import hardware
from search_spaces import load
from search_spaces.problem import as_tuple


@jax.jit
def off(actual: jax.Array, expected: jax.Array) -> dict[str, jax.Array]:
    """Largest and mean absolute error, and the mean of the error over the size of what is expected, where that is
    not next to nothing."""
    error, size = jnp.abs(actual.astype(jnp.float32) - expected), jnp.abs(expected)
    counts = size > 1e-3 * jnp.max(size)
    relative = jnp.sum(jnp.where(counts, error / jnp.where(counts, size, 1.0), 0.0)) / jnp.sum(counts)
    return {"largest_absolute": jnp.max(error), "mean_absolute": jnp.mean(error), "mean_relative": relative}


def compared(asked: dict[str, Any], target: Any) -> dict[str, list[dict[str, float]]]:
    """By candidate, the errors of each result."""
    operation = load(asked["operation"])
    problem = posed(operation.problem, asked["problem"])
    args = problem.inputs(seed=0)
    expected = as_tuple(jax.jit(problem.reference)(*args))
    found = {}
    for name, (backend, schedule) in asked["candidates"].items():
        kernel = operation.kernel(backend)
        chosen = kernel.space(problem, target).decode(schedule)
        results = jax.jit(functools.partial(kernel.results, problem, chosen, target))(*args)
        figures = [off(actual, right) for actual, right in zip(results, expected, strict=True)]
        found[name] = [{key: float(value) for key, value in one.items()} for one in figures]
    return found


def main() -> None:
    deadline = time.perf_counter() + float(sys.argv[1])
    target = hardware.detect().target
    for asked in json.load(sys.stdin):
        if time.perf_counter() > deadline:
            return
        schedules = {name: schedule for name, (_, schedule) in asked["candidates"].items()}
        told = {"point": asked["point"], "schedules": schedules, "errors": compared(asked, target)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
