"""A plan answers calls alone, from a file of which nothing is believed unchecked, the same in every process."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import Plan, tuned_matmul, tuned_softmax
from scheduler.core import hardware
from scheduler.core.plan import Figure, Planned
from scheduler.core.records import Environment
from scheduler.dispatch import dispatch
from search_spaces.matmul import MATMUL, MatmulProblem

A = jax.random.normal(jax.random.key(0), (64, 32), jnp.float32)
B = jax.random.normal(jax.random.key(1), (32, 48), jnp.float32)
PROBLEM = MatmulProblem(64, 48, 32, "float32")


@pytest.fixture(autouse=True)
def _no_answers(_own_cache, monkeypatch):
    scheduler.reload()


def plan_of(problem=PROBLEM, backend="interpret", **fields):
    chip = hardware.detect()
    schedule = dict(scheduler.predict(MATMUL, problem, backends=backend).schedule)
    answer = Planned("matmul", problem.canonical(), backend, MATMUL.kernel(backend).version, schedule, "faster")
    figures = (Figure("x: float32[64,32]", "uses 1 kernel: 1.50 times as fast", 2e-3, 3e-3),)
    environment = Environment("0.11.2", "0.11.2", "", "2026-11-22T10:00:00Z")
    made = Plan("step", chip.id, environment, "0.1", (answer,), figures, ("padded",))
    return dataclasses.replace(made, **fields)


def with_answer(**fields):
    (answer,) = plan_of().answers
    return plan_of(answers=(dataclasses.replace(answer, **fields),))


def interpreted(f, *args):
    """Whether the interpreted kernel's grid loop is in the lowered program."""
    return "while" in (f if hasattr(f, "lower") else jax.jit(f)).lower(*args).as_text()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


# The file


def test_a_plan_is_the_same_after_its_file(tmp_path):
    made = plan_of()
    made.save(tmp_path / "step.plan.json")
    loaded = Plan.load(tmp_path / "step.plan.json")
    assert (loaded, hash(loaded), loaded.digest) == (made, hash(made), made.digest)
    assert dataclasses.asdict(loaded) == dataclasses.asdict(made)
    assert loaded != with_answer(reason="slower")


def test_a_plan_prints_what_it_answers_and_what_that_gained():
    shown = repr(plan_of()).splitlines()
    assert shown[0].startswith(f"plan {plan_of().digest} of step on cpu (")
    assert shown[2:] == [
        "(x: float32[64,32])",
        "  uses 1 kernel: 1.50 times as fast",
        "  a call: with kernels 2.00 ms, XLA 3.00 ms",
        "matmul m=64 n=48 k=32 dtype=float32",
        "  interpret minor=m tile_k=32 tile_m=64 tile_n=48: faster",
        "changed: padded",
    ]
    assert max(map(len, repr(with_answer(reason="word " * 60)).splitlines())) <= 100


DAMAGES = [
    (lambda plan: "", "invalid JSON"),
    (lambda plan: "[1]", "a JSON object is wanted"),
    (lambda plan: json.dumps(plan)[:-40], "invalid JSON"),
    (lambda plan: json.dumps({**plan, "format": 2}), "this version reads format 1, found format 2: upgrade"),
    (lambda plan: json.dumps({k: v for k, v in plan.items() if k != "digest"}), "digest is missing"),
    (lambda plan: json.dumps({k: v for k, v in plan.items() if k != "answers"}), "answers is missing"),
    (lambda plan: json.dumps({**plan, "answers": [{}]}), "answers: item 0: operation is missing"),
    (lambda plan: json.dumps({**plan, "hardware": 7}), "hardware: text is wanted, found 7"),
    (lambda plan: json.dumps({**plan, "answers": plan["answers"] * 2}), "occurs twice"),
    (
        lambda plan: json.dumps({**plan, "answers": [{**plan["answers"][0], "schedule": {"tile_m": {"of": 1}}}]}),
        "tile_m: ",
    ),
    (lambda plan: json.dumps({**plan, "answers": [{**plan["answers"][0], "version": -1}]}), "version: an integer"),
    (lambda plan: json.dumps({**plan, "figures": [{"arguments": 1}]}), "figures: item 0: arguments: text"),
    (lambda plan: json.dumps({**plan, "function": "other"}), "it was changed after it was written"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_plan_is_refused_with_the_place(damage, words, tmp_path):
    file = tmp_path / "step.plan.json"
    plan_of().save(file)
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(scheduler.PlanError, match=words) as refused:
        Plan.load(file)
    assert str(file) in str(refused.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(scheduler.PlanError, match="cannot be read: No such file"), scheduler.plan(tmp_path / "none"):
        pass
    with pytest.raises(scheduler.PlanError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(scheduler.PlanError, match="is not a valid plan"):
        Plan.load(tmp_path / "bytes")
    with pytest.raises(ValueError, match="missing='ignore' is not one of xla, error"):
        scheduler.plan(plan_of(), missing="ignore").__enter__()


def test_a_plan_that_was_changed_is_accepted_with_the_digest_that_the_message_tells(tmp_path):
    file = tmp_path / "step.plan.json"
    plan_of().save(file)
    fields = json.loads(file.read_text())
    fields["answers"][0]["reason"] = "mine"
    file.write_text(json.dumps(fields))
    with pytest.raises(scheduler.PlanError) as refused:
        Plan.load(file)
    fields["digest"] = str(refused.value).split('"digest": "')[1][:16]
    file.write_text(json.dumps(fields))
    assert Plan.load(file) == with_answer(reason="mine")


# Its answers


def test_calls_within_are_answered_by_the_plan_and_others_by_xla(tmp_path):
    plan_of().save(tmp_path / "step.plan.json")
    with scheduler.plan(tmp_path / "step.plan.json") as plan:
        assert plan == plan_of()
        assert interpreted(tuned_matmul, A, B)
        assert not interpreted(tuned_matmul, A[:8], B)
        close(tuned_matmul(A, B), A @ B)
    assert not interpreted(tuned_matmul, A, B)


def test_what_a_plan_does_not_hold_is_an_error_if_asked_so():
    with scheduler.plan(plan_of(), missing="error"):
        close(tuned_matmul(A, B), A @ B)
        with pytest.raises(scheduler.CacheMiss, match="has no entry for matmul m=8 n=48 k=32 dtype=float32; "):
            tuned_matmul(A[:8], B)
    with scheduler.plan(plan_of()), pytest.raises(scheduler.CacheMiss, match="has no entry for matmul m=8"):
        tuned_matmul(A[:8], B, on_miss="error")


def test_no_store_is_opened_and_a_dead_one_costs_nothing(tmp_path, monkeypatch):
    plan = plan_of()  # which asks the model
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "sub" / "cache.db"))
    scheduler.reload()
    with scheduler.plan(plan):
        tuned_matmul(A, B)
        tuned_matmul(A[:8], B, on_miss="tune")
    assert not (tmp_path / "sub").exists()
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", "postgresql://nobody@192.0.2.1:1/none")
    scheduler.reload()
    with warnings.catch_warnings(), scheduler.plan(plan):
        warnings.simplefilter("error")
        tuned_matmul(A, B)
        tuned_softmax(A)
    assert not dispatch.user_cache()._opened


def test_what_was_jitted_outside_is_traced_again_inside_and_the_other_way_round():
    f = jax.jit(lambda a, b: tuned_matmul(a, b))
    close(f(A, B), A @ B)
    assert not interpreted(f, A, B)
    with scheduler.plan(plan_of()):
        assert interpreted(f, A, B)
        close(f(A, B), A @ B)
    assert not interpreted(f, A, B)
    with scheduler.plan(plan_of()):
        traced = f.trace(A, B)
    assert "while" in traced.lower().as_text()
    assert f"plan {plan_of().digest}" in str(traced.jaxpr)


def test_the_innermost_plan_answers_alone():
    with scheduler.plan(plan_of()):
        with scheduler.plan(plan_of(answers=())):
            assert not interpreted(tuned_matmul, A, B)
        assert interpreted(tuned_matmul, A, B)


def test_a_plan_is_of_the_thread_that_entered_it():
    seen = []
    with scheduler.plan(plan_of()):
        thread = threading.Thread(target=lambda: seen.append(interpreted(tuned_matmul, A, B)))
        thread.start()
        thread.join()
        assert interpreted(tuned_matmul, A, B)
    assert seen == [False]


def test_derivatives_are_answered_by_the_plan_too():
    backward = MatmulProblem(64, 32, 48, "float32", transpose_b=True)
    answers = plan_of().answers + plan_of(backward).answers
    with scheduler.plan(plan_of(answers=answers)):
        gradient = jax.jit(jax.grad(lambda a: tuned_matmul(a, B).sum()))
        assert interpreted(gradient, A)
        close(gradient(A), jax.grad(lambda a: (a @ B).sum())(A))


def test_a_schedule_of_the_call_goes_before_the_plan():
    given = plan_of().answers[0].schedule | {"tile_m": 16}
    assert given != plan_of().answers[0].schedule
    with scheduler.plan(plan_of()):
        text = jax.jit(lambda a, b: tuned_matmul(a, b, schedule=given)).lower(A, B).as_text()
        assert text != jax.jit(lambda a, b: tuned_matmul(a, b)).lower(A, B).as_text()


STALE = [
    (lambda: with_answer(version=99), "version 99 of the interpret kernel, now version"),
    (lambda: with_answer(backend="cutlass"), r"uses cutlass, which no longer exists \(available: mosaic_gpu,"),
    (lambda: with_answer(schedule={"tile_m": 7, "tile_n": 48, "tile_k": 32}), "has a schedule that cannot run: "),
    (lambda: plan_of(hardware="NVIDIA H200 (132 cores, 140 GiB)"), "is for NVIDIA H200 .*, and this is "),
]


@pytest.mark.parametrize(("stale", "words"), STALE)
def test_an_answer_that_does_not_hold_is_xlas_with_one_warning_or_an_error(stale, words):
    with scheduler.plan(stale(), missing="error"), pytest.raises(scheduler.CacheMiss, match=words):
        tuned_matmul(A, B)
    with scheduler.plan(stale()):
        with pytest.warns(RuntimeWarning, match=f"{words}.*; xla is used") as warned:
            assert not interpreted(tuned_matmul, A, B)
        assert len(warned) == 1
        scheduler.reload()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not interpreted(tuned_matmul, A, B)
        close(tuned_matmul(A, B), A @ B)


def test_backends_of_a_call_are_kept():
    with scheduler.plan(plan_of()):
        assert not interpreted(lambda a, b: tuned_matmul(a, b, backends="xla"), A, B)
    words = r"has no entry for matmul .*; only xla can run, which the call does not allow"
    with scheduler.plan(plan_of(answers=())), pytest.raises(scheduler.NoCandidate, match=words):
        tuned_matmul(A, B, backends="interpret")
    words = r"uses xla for matmul .*, which the call does not allow"
    with scheduler.plan(plan_of(backend="xla")), pytest.raises(scheduler.NoCandidate, match=words):
        tuned_matmul(A, B, backends="interpret")


# Processes


def test_the_process_has_a_plan_by_its_environment(tmp_path, monkeypatch):
    plan_of().save(tmp_path / "step.plan.json")
    monkeypatch.setenv("TILE_SCHEDULER_PLAN", str(tmp_path / "step.plan.json"))
    scheduler.reload()
    assert interpreted(lambda a, b: tuned_matmul(a, b), A, B)
    with scheduler.plan(plan_of(answers=())):
        assert not interpreted(lambda a, b: tuned_matmul(a, b), A, B)
    monkeypatch.setenv("TILE_SCHEDULER_PLAN", str(tmp_path / "none"))
    scheduler.reload()
    with pytest.raises(scheduler.PlanError, match=r"TILE_SCHEDULER_PLAN: .* cannot be read"):
        tuned_matmul(A, B)


ALONE = """
    import jax, numpy as np
    from scheduler import tuned_matmul
    a, b = np.ones((64, 32), np.float32), np.ones((32, 48), np.float32)
    print("while" in jax.jit(tuned_matmul).lower(a, b).as_text(), float(tuned_matmul(a, b)[0, 0]))
"""


@pytest.mark.slow
def test_a_deployment_needs_the_plan_and_nothing_more(tmp_path):
    plan_of().save(tmp_path / "step.plan.json")
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TILE_SCHEDULER", "XDG_"))}
    env = kept | {"HOME": str(home), "TILE_SCHEDULER_PLAN": str(tmp_path / "step.plan.json"), "JAX_PLATFORMS": "cpu"}
    unshipped = "from scheduler.store import store; store.shipped = lambda: 1 / 0\n"
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", unshipped + textwrap.dedent(ALONE)], env=env, capture_output=True, text=True
        )
        assert ran.stdout == "True 32.0\n", ran.stderr
    assert not list(home.iterdir())


PROCESS = """
    import contextlib, sys, jax, numpy as np
    rank, address, plan = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    import scheduler
    a, b = np.ones((64, 32), np.float32), np.ones((32, 48), np.float32)
    with jax.default_device(jax.local_devices()[0]), scheduler.plan(plan) if plan else contextlib.nullcontext():
        try:
            print("while" in jax.jit(scheduler.tuned_matmul).lower(a, b).as_text())
        except Exception as error:
            print(type(error).__name__, error)
    jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second_plan", "says"),
    [
        ("one", "True"),
        ("other", "SchedulerError process 1 runs with the plan {other}, and process 0 with the plan {one}; give all"),
        ("", "SchedulerError process 1 runs without a plan, and process 0 with the plan {one}; give all processes"),
    ],
)
def test_processes_of_one_job_answer_by_one_plan_or_say_that_theirs_differ(second_plan, says, tmp_path):
    plans = {"one": plan_of(), "other": with_answer(reason="other")}
    for name, plan in plans.items():
        plan.save(tmp_path / name)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(rank), address, str(tmp_path / name) if name else ""],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(("one", second_plan))
    ]
    said = [process.communicate() for process in processes]
    assert said[0][0].strip() == "True", said
    assert said[1][0].strip().startswith(says.format(**{name: plan.digest for name, plan in plans.items()})), said
