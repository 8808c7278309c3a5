"""Softmax, RMS norm and SiLU-and-mul: where each spends its time on an H200, and that a search gets them right here.

python examples/rows.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import scheduler
from scheduler import tuned_rms_norm, tuned_silu_and_mul, tuned_softmax
from scheduler.core import hardware
from scheduler.model.cost import CostModel
from search_spaces import load

CALLS = {
    "softmax": lambda x, weight: tuned_softmax(x, backends="pallas"),
    "rms_norm": lambda x, weight: tuned_rms_norm(x, weight, backends="pallas"),
    "silu_and_mul": lambda x, weight: tuned_silu_and_mul(x, backends="pallas"),
}


def main() -> None:
    chip = hardware.find("NVIDIA H200")
    for name in CALLS:
        operation = load(name)
        for rows, columns in ((16384, 4096), (512, 131072)):
            problem = operation.problem(rows=rows, columns=columns)
            first = scheduler.predict(operation, problem, kind=chip.kind, backends="mosaic_gpu")
            bound_us = CostModel(chip).lower_bound(problem) * 1e6
            chosen = " ".join(f"{field}={value}" for field, value in first.schedule.items() if value)
            print(f"{name} {rows} x {columns}: {bound_us:.0f} us at least; the model would begin with {chosen}")

    x, weight = jax.random.normal(jax.random.key(0), (64, 256)), jnp.ones(256)
    for name, call in CALLS.items():
        problem = load(name).problem(rows=64, columns=128 if name == "silu_and_mul" else 256, dtype="float32")
        scheduler.tune(name, problem, budget=3)
        exact = problem.compute(x, weight) if name == "rms_norm" else problem.compute(x)
        print(f"{name}: {'right' if jnp.allclose(call(x, weight), exact, atol=1e-5) else 'wrong'} after a search")


if __name__ == "__main__":
    main()
