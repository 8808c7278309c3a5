"""Plans of optimized functions, and optimized functions under a plan, also in a job of several processes."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_plans import PROBLEM, A, B, plan_of

import scheduler
from scheduler import Plan, SchedulerError
from scheduler.rewriting import comparison, decided, interleaved, trial
from scheduler.rewriting.decided import PLANNED, SEVERAL_PROCESSES
from scheduler.rewriting.interleaved import Seconds
from search_spaces.matmul import MatmulProblem


@pytest.fixture(autouse=True)
def _no_answers(_own_cache, monkeypatch):
    monkeypatch.delenv("TILE_SCHEDULER_PLAN", raising=False)
    scheduler.reload()


@pytest.fixture
def timed(monkeypatch):
    """Returns a function that sets the time of each version by the start of its label, in milliseconds."""

    def given(**times_ms):
        def time_interleaved(runs, **_):
            own = {label: next(ms for start, ms in times_ms.items() if label.startswith(start)) for label in runs}
            return {label: Seconds((1e-3 * ms,) * 12) for label, ms in own.items()}

        monkeypatch.setattr(interleaved, "time_interleaved", time_interleaved)

    return given


def f(a, b):
    return jnp.tanh(a @ b)


def squares(x, y):
    return x @ x, y @ y


def ones(*sizes):
    return [jnp.ones((n, n)) / n for n in sizes]


def backends(plan):
    return {MatmulProblem.from_canonical(each.problem).m: each.backend for each in plan.answers}


def under(plan, fn, *args):
    """The decision of a process that has only the plan."""
    fast = scheduler.optimize(fn)
    with scheduler.plan(plan):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), fast(*args), fn(*args))
    (decision,) = fast.decisions
    return decision


def test_a_plan_answers_products_of_an_unmodified_function():
    decision = under(plan_of(), f, A, B)
    assert (decision.kept, decision.reason) == ("tuned", f"uses 1 kernel: {PLANNED}")
    assert [each.problem for each in decision.replaced] == [PROBLEM]
    assert under(plan_of(answers=(), changes=()), f, A, B).reason == decided.NOT_PLANNED


def test_the_plan_of_an_optimized_function_has_its_kernels_for_each_shape(tmp_path, monkeypatch):
    fast = scheduler.optimize(f, backends="interpret", keep="tuned")
    with pytest.raises(SchedulerError, match="no decision yet: call f first"):
        fast.plan()
    fast(A, B)
    fast(A[:8], B)
    fast.plan().save(tmp_path / "f.plan.json")
    plan = Plan.load(tmp_path / "f.plan.json")
    assert (plan, plan.function) == (fast.plan(), "f")
    assert backends(plan) == {64: "interpret", 8: "interpret"}
    assert [(each.arguments, each.verdict) for each in plan.figures] == [
        (each.arguments, each.reason) for each in fast.decisions
    ]
    monkeypatch.setattr(comparison, "disagreement", None)
    monkeypatch.setattr(interleaved, "time_interleaved", None)
    for a, decision in zip((A, A[:8]), fast.decisions, strict=True):
        replaced = under(plan, f, a, B).replaced
        assert [(each.problem, each.backend, each.schedule) for each in replaced] == [
            (each.problem, each.backend, each.schedule) for each in decision.replaced
        ]


def test_a_dropped_group_is_left_to_xla_with_its_reason_and_the_plan_has_the_times(timed):
    timed(plain=10, tuned=11, **{"without matmul m=8": 8, "without": 12})
    fast = scheduler.optimize(squares, backends="interpret")
    fast(*ones(8, 4))
    plan = fast.plan()
    assert backends(plan) == {8: "xla", 4: "interpret"}
    assert [each.reason for each in plan.answers if each.backend == "xla"] == [trial.DROPPED]
    (figure,) = plan.figures
    assert (figure.plan_s, figure.xla_s) == (8e-3, 10e-3)
    assert figure.verdict.startswith("uses 1 kernel: 1.25 times as fast")
    assert [each.problem.m for each in under(plan, squares, *ones(8, 4)).replaced] == [4]


def test_if_xla_is_used_the_plan_leaves_all_to_xla_and_changes_nothing(timed):
    def picked(x, labels):
        return jnp.take_along_axis(jnp.tanh(x @ x), labels[:, None], -1).sum()

    timed(plain=10, without=11, tuned=12)
    gradient, args = jax.grad(picked), (*ones(8), jnp.arange(8))
    fast = scheduler.optimize(gradient, backends="interpret")
    fast(*args)
    (decision,) = fast.decisions
    assert (decision.kept, bool(decision.replaced or decision.dropped)) == ("plain", True)
    plan = fast.plan()
    assert {each.backend for each in plan.answers} == {"xla"}
    assert any(each.reason == decision.reason for each in plan.answers) == bool(decision.replaced)
    assert under(plan, gradient, *args).reason == decided.NOT_PLANNED
    with_changes = scheduler.optimize(gradient, backends="interpret", keep="tuned")
    with_changes(*args)
    assert under(with_changes.plan(), gradient, *args).changes == with_changes.decisions[0].changes != ()


def test_a_problem_about_which_decisions_disagree_is_left_to_xla(timed):
    fast = scheduler.optimize(squares, backends="interpret")
    timed(plain=10, tuned=5)
    fast(*ones(8, 4))
    timed(plain=10, tuned=12, without=12)
    fast(*ones(8, 6))
    plan = fast.plan()
    assert backends(plan) == {8: "xla", 4: "interpret", 6: "xla"}
    assert plan.answers[0].reason == "decisions disagree about it"


def test_in_a_job_of_several_processes_nobody_decides_apart(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fast = scheduler.optimize(f, backends="interpret")
    np.testing.assert_allclose(fast(A, B), f(A, B), rtol=1e-4, atol=1e-4)
    (decision,) = fast.decisions
    assert (decision.kept, decision.reason) == ("plain", SEVERAL_PROCESSES)


PROCESS = """
    import sys, jax, numpy as np
    rank, address, plan = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    import scheduler
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["x"], []))
    a = jax.make_array_from_callback((128, 32), rows, lambda at: np.ones((128, 32), np.float32)[at])
    b = jax.make_array_from_callback((32, 48), whole, lambda at: np.ones((32, 48), np.float32)[at])
    fast = scheduler.optimize(lambda a, b: (a @ b).sum())
    with scheduler.plan(plan):
        print(float(fast(a, b)), fast.decisions[0].replaced[0].problem.m, fast.decisions[0].reason)
    jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_processes_of_one_job_use_the_kernels_of_the_plan_for_the_part_of_each_device(tmp_path):
    plan_of().save(tmp_path / "f.plan.json")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(rank), address, str(tmp_path / "f.plan.json")],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate() for process in processes]
    assert [out.splitlines()[-1:] for out, _ in said] == [[f"{128 * 32 * 48.0} 64 uses 1 kernel: {PLANNED}"]] * 2, said
