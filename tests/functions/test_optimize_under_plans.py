"""An optimized function under a plan, and in a job of several processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_plans import PROBLEM, A, B, plan_of

import scheduler
from scheduler.functions.decided import PLANNED, SEVERAL_PROCESSES

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_answers(_own_cache, monkeypatch):
    monkeypatch.delenv("TILE_SCHEDULER_PLAN", raising=False)
    scheduler.reload()


def f(a, b):
    return jnp.tanh(a @ b)


def test_a_plan_answers_products_of_an_unmodified_function():
    fast = scheduler.optimize(f, keep="tuned")
    fast(A, B)
    with scheduler.plan(plan_of()):
        np.testing.assert_allclose(fast(A, B), f(A, B), rtol=1e-4, atol=1e-4)
    fast(A, B)
    without, within = fast.decisions
    assert (without.kept, within.kept) == ("plain", "tuned")
    assert [each.problem for each in within.replaced] == [PROBLEM]


def test_in_a_job_of_several_processes_nobody_decides_apart(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fast = scheduler.optimize(f, backends="interpret")
    np.testing.assert_allclose(fast(A, B), f(A, B), rtol=1e-4, atol=1e-4)
    (decided,) = fast.decisions
    assert (decided.kept, decided.reason) == ("plain", SEVERAL_PROCESSES)


def test_in_a_job_of_several_processes_a_plan_answers_without_timing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fast = scheduler.optimize(f)
    with scheduler.plan(plan_of()):
        np.testing.assert_allclose(fast(A, B), f(A, B), rtol=1e-4, atol=1e-4)
    (decided,) = fast.decisions
    assert (decided.kept, decided.reason, decided.plain) == ("tuned", f"uses 1 kernel: {PLANNED}", None)
