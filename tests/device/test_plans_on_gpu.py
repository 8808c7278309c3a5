"""A plan made on a GPU, with searches in worker processes, answers the same in another process."""

import os
import subprocess
import sys
import textwrap

import pytest

from scheduler.measure.gpu import Gpu, cuda_wanted

STEP = """
    import dataclasses, sys
    import jax, jax.numpy as jnp
    import scheduler
    from scheduler import tuned_matmul, tuned_softmax

    def step(x, w):
        return tuned_softmax(tuned_matmul(x, w))

    def plain(x, w):
        return jax.nn.softmax(jnp.matmul(x, w).astype(jnp.float32)).astype(x.dtype)

    x, w = (jax.random.normal(jax.random.key(i), (2048, 2048), jnp.bfloat16) / 16 for i in range(2))
"""
MAKE = """
    plan = scheduler.tune_function(step, x, w, minutes=0.25, budget=8)
    assert len(plan.answers) == 2 and plan.verdict, plan
    assert {figure.variant for figure in plan.figures} >= {"xla"}, plan
    plan.save(sys.argv[1])
    print(plan)
"""
ANSWER = """
    with scheduler.plan(sys.argv[1], missing="error") as plan:
        text = jax.jit(step).lower(x, w).as_text()
        kernels = {answer.backend for answer in plan.answers} - {"xla"}
        assert ("mosaic_gpu" in text) == bool(kernels), plan
        got, right = (f(x, w).astype(jnp.float32) for f in (step, plain))
        assert jnp.linalg.norm(got - right) < 2e-2 * jnp.linalg.norm(right)
        print(plan.digest, sorted(kernels), float(got.sum()))
"""


def test_a_plan_made_here_answers_the_same_in_two_processes(tmp_path):
    if not (cuda_wanted() and Gpu.query()):
        pytest.skip("needs an NVIDIA GPU and a jax with CUDA")

    def process(code):
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(STEP) + textwrap.dedent(code), str(tmp_path / "step.plan.json")],
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    process(MAKE)
    assert process(ANSWER) == process(ANSWER)
