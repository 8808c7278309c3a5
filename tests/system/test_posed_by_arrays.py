"""`tune` of arrays: the problem that a call of them poses, searched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_kernels import linear, sum_and_max

import scheduler
from scheduler import tuned, tuned_flash_attention, tuned_matmul, tuned_rms_norm, tuned_softmax
from scheduler.core.records import AllFailed, Entry, Environment, Failure, Key, Measurement, Record, Verdict
from search_spaces.matmul import MATMUL

A, B = jnp.ones((8, 16)), jnp.ones((16, 8))
SHAPE = jax.ShapeDtypeStruct((8, 16), "float32")
BIAS = jnp.ones(8)


def other(x, *, seed, tile):
    return x * seed


SEEDED = scheduler.autotune(tile=(1,), reference=lambda x, seed: x * seed, name="seeded")(other)


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("search", "problem"),
    [
        (lambda: scheduler.tune("matmul", A, B, budget=1), "m=8 n=8 k=16 dtype=float32"),
        (lambda: scheduler.tune(MATMUL, np.asarray(A), B, budget=1), "m=8 n=8 k=16 dtype=float32"),
        (lambda: scheduler.tune(tuned_matmul, SHAPE, B, budget=1), "m=8 n=8 k=16 dtype=float32"),
        (lambda: scheduler.tune(tuned_matmul, A[None], B, budget=1), "m=8 n=8 k=16 dtype=float32"),
        (
            lambda: scheduler.tune(tuned_matmul, A, B, bias=BIAS, activation="silu", budget=1, seed=3),
            "m=8 n=8 k=16 dtype=float32 bias=float32 activation=silu",
        ),
        (
            lambda: scheduler.tune(tuned_matmul, A, A, transpose_b=True, budget=1),
            "n=8 k=16 dtype=float32 transpose_b=True",
        ),
        (lambda: scheduler.tune(tuned_softmax, A, axis=-1, budget=1), "rows=8 columns=16 dtype=float32"),
        (lambda: scheduler.tune(tuned_rms_norm, A, jnp.ones(16), eps=1e-5, budget=1), "rows=8 columns=16"),
        (
            lambda: scheduler.tune(tuned_flash_attention, *[jnp.ones((1, 8, 2, 16))] * 3, causal=True, budget=1),
            "causal=True",
        ),
        (lambda: tuned("matmul").tune(A, B, budget=1), "m=8 n=8 k=16 dtype=float32"),
        (lambda: linear.tune(A, B, activation="silu", budget=1), "w=float32[16,8] activation=silu"),
        (lambda: linear.tune(A, bias=BIAS, w=B, budget=1), "w=float32[16,8] bias=float32[8]"),
        (lambda: linear.tune(x=SHAPE, w=B, budget=1), "x=float32[8,16] w=float32[16,8]"),
        (lambda: linear.tune(linear.problem(A, B), budget=1), "x=float32[8,16] w=float32[16,8]"),
        (
            lambda: scheduler.tune(linear, problem={"x": "float32[8,16]", "w": "float32[16,8]"}, budget=1),
            "w=float32[16,8]",
        ),
        (lambda: scheduler.tune(sum_and_max, SHAPE, budget=1), "x=float32[8,16]"),
        (lambda: SEEDED.tune(SEEDED.problem(A, seed=3), seed=1, budget=1), "seed=3"),
    ],
)
def test_the_problem_of_a_call_is_searched(search, problem):
    record = search()
    assert set(problem.split()) <= set(str(record.key).split())
    assert record.budget == 1


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (lambda: scheduler.tune(linear, A, B, bugdet=3), "no option 'bugdet'; did you mean 'budget'"),
        (lambda: linear.tune(A, B, activatoin="silu"), "no option 'activatoin'; did you mean 'activation'"),
        (lambda: linear.tune(A, B, tile_m=8), "tile_m of linear is tuned"),
        (lambda: linear.tune(A), "linear takes the arrays x, w, bias; 1 were given, without w"),
        (lambda: SEEDED.tune(A, seed=3, budget=1), "seed is an option of the search and a parameter of seeded"),
        (lambda: scheduler.tune("matmul", A, B, transposed_b=True), "did you mean 'transpose_b'"),
        (lambda: scheduler.tune("matmul", {"m": 8, "n": 8, "k": 8}, transpose_b=True), "tune has no option 'transpose"),
        (lambda: scheduler.tune("matmul", {"m": 8, "n": 8, "k": 8}, secnods=1), "did you mean 'seconds'"),
        (lambda: scheduler.tune("matmul"), "expected arrays as in a call of matmul"),
        (lambda: scheduler.tune("matmul", 1, 2), "found 1, 2"),
        (lambda: scheduler.tune("matmul", A), "missing|required"),
    ],
)
def test_what_poses_no_problem_is_told(search, words):
    with pytest.raises(TypeError, match=words):
        search()


def test_a_call_that_the_library_answers_poses_no_problem():
    with pytest.raises(ValueError, match="no kernel can be selected for this call of matmul"):
        scheduler.tune("matmul", A.astype(jnp.int32), B.astype(jnp.int32), budget=1)
    with pytest.raises(ValueError, match="no kernel can be selected for this call"):
        tuned("softmax").tune(A, axis=0, budget=1)


def test_a_record_is_printed_in_a_few_lines_and_represented_in_full():
    record = scheduler.tune("matmul", A, B, budget=3)
    lines = str(record).splitlines()
    assert 5 <= len(lines) <= 6
    assert len(str(record)) < 800
    assert lines[0] == str(record.key)
    assert lines[1].startswith("winner: ")
    assert record.winner.backend in lines[1]
    assert lines[2].startswith("library: ")
    assert lines[-2].startswith("how sure: ")
    assert f"{record.tried} trials (budget 3) of {record.space} schedules" in lines[-1]
    assert record.environment.date in lines[-1]
    assert repr(record).startswith("Record(key=Key(")
    assert f"{record}" == str(record)


@pytest.mark.parametrize("entries", ["library alone", "library first", "library last", "no library"])
@pytest.mark.parametrize("changes", [{}, {"failed": 1}, {"confidence": Verdict()}, {"stopped": "\x1b[31m"}])
def test_whatever_a_record_holds_it_is_printed_in_safe_lines(entries, changes):
    winner = Entry("pallas", 0, {"tile": 8, "how": "a\nb"}, Measurement(1e-6, (1e-6,), "wall", "cold"), 1e-6)
    library = dataclasses.replace(winner, backend="xla", schedule={}, measurement=Measurement(2e-6, (), "wall", "cold"))
    held = {
        "library alone": (library,),
        "library first": (library, winner),
        "library last": (winner, library),
        "no library": (winner,),
    }[entries]
    if changes.get("failed"):
        changes = {"failed": (AllFailed("triton", 3, Failure("lower", "x" * 5000 + "\n\x1b[31m"), 3),)}
    environment = Environment("0.10.2", "0.10.2", "", "2026-01-01T00:00:00")
    key = Key("matmul", "NVIDIA H200", '{"m":8,"n":8,"k":8}')
    record = Record(key, held, {"xla": 1}, environment, 8, 2, 16, **{"confidence": Verdict(rounds=9), **changes})
    text = str(record)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 5 + len(record.failed)
    assert len(text) < 1000
    assert "1.00 us" in text or "2.00 us" in text or entries.startswith("library")
