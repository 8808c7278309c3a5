"""A plan made on a GPU has the same kernels in another process, which compares and times nothing."""

import os
import subprocess
import sys
import textwrap

import pytest

from scheduler.measure.gpu import Gpu, cuda_wanted

STEP = """
    import sys
    import jax, jax.numpy as jnp
    import scheduler
    from scheduler.rewriting import interleaved

    def step(x, w):
        return jax.nn.softmax((x @ w).astype(jnp.float32)).astype(x.dtype)

    x, w = (jax.random.normal(jax.random.key(i), (2048, 2048), jnp.bfloat16) / 16 for i in range(2))
    fast = scheduler.optimize(step)
"""
MAKE = """
    fast(x, w)
    plan = fast.plan()
    assert plan.figures[0].verdict == fast.decisions[0].reason, plan
    plan.save(sys.argv[1])
"""
ANSWER = """
    interleaved.time_interleaved = None
    with scheduler.plan(sys.argv[1]) as plan:
        got = fast(x, w).astype(jnp.float32)
    kernels = {(each.operation, each.backend) for each in plan.answers if each.backend != "xla"}
    (decision,) = fast.decisions
    assert {(each.operation, each.backend) for each in decision.replaced} == kernels, fast.report()
    right = step(x, w).astype(jnp.float32)
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
