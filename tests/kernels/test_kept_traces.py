"""JAX 0.11 and newer keep the trace of a kernel function: none is that of another candidate or of before a reload."""

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import scheduler
from scheduler.core.hardware import CPU
from search_spaces import Kernel, Library, Space
from search_spaces.matmul import MatmulProblem

CHOSEN = {"tile": 0}


def by_global(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2 + (CHOSEN["tile"] != 16)  # right for one choice alone


@pytest.fixture
def reads_its_choice_from_a_global():
    @scheduler.autotune(tile=(8, 16, 32), reference=lambda x: x * 2)
    def kernel(x, *, tile, target):
        CHOSEN["tile"] = tile
        return pl.pallas_call(by_global, out_shape=x, interpret=True)(x)

    return kernel


def test_each_candidate_is_traced_with_its_own_choice_and_equal_programs_are_one(reads_its_choice_from_a_global):
    kernel, x = reads_its_choice_from_a_global, jnp.ones((16, 32))
    record = scheduler.tune(kernel, kernel.problem(x), budget=8)
    assert [dict(entry.schedule) for entry in record.entries if entry.backend == "pallas"] == [{"tile": 16}]
    # Tiles of 8 and of 32 are one wrong program, and XLA has one: the reference is what it runs.
    assert record.tried == 3
    for tile, wanted in ((16, 2), (8, 3), (16, 2)):
        assert (kernel(x, schedule={"tile": tile}) == wanted).all()


class OfAClass(Kernel):
    backend = "own"

    def space(self, problem, target):
        return Space(Library, {"program": ("float32",)})

    def footprint(self, problem, schedules, target):
        return None

    def run(self, problem, schedule, target, /, x, y):
        return pl.pallas_call(add_listed, out_shape=x, interpret=True)(x)


LISTED = [1.0]


def add_listed(x_ref, out_ref):
    out_ref[...] = x_ref[...] + LISTED[0]


def test_a_kernel_of_a_class_reads_its_globals_anew_after_a_reload():
    problem, x = MatmulProblem(8, 8, 8, "float32"), jnp.zeros((8, 8))
    for value in (1.0, 2.0, 3.0):
        LISTED[0] = value
        scheduler.reload()
        assert (OfAClass().results(problem, Library(), CPU.target, x, x)[0] == value).all()
