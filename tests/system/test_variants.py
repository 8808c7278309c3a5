"""Operands that decide the amount of work: a candidate is verified and timed with each; the record has the worst."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import DoubleLibrary, DoubleProblem
from rich.console import Console

from scheduler.cli import record_report
from scheduler.core import codec
from scheduler.core.hardware import CPU
from scheduler.core.records import Failure, Measurement
from scheduler.measure.bench import Bench, calls_to_confirm
from scheduler.measure.buffers import needed_buffer_bytes
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Kernel, Operation, Space
from search_spaces.ragged_dot.problem import (
    DISTRIBUTIONS,
    GatedRaggedDotProblem,
    RaggedDotProblem,
    RaggedDotWeightsProblem,
    group_sizes,
    random_boundaries,
)

pytestmark = pytest.mark.slow_but_first

LENGTH = 32


@dataclasses.dataclass(frozen=True)
class PartProblem(DoubleProblem):
    """Doubles the first elements, as many as the second operand says, and sets the others to zero."""

    counts = (LENGTH, LENGTH // 2, 0)

    def operands(self):
        return *super().operands(), jax.ShapeDtypeStruct((), jnp.int32)

    def reference(self, *args):
        x, count = args
        return jnp.where(jnp.arange(self.n) < count, 2 * x, 0)

    def inputs(self, seed):
        x, _ = super().inputs(seed)
        return x, jnp.int32(self.counts[0] if seed == 0 else 5)

    def variants(self, operands):
        return tuple((operands[0], np.int32(count)) for count in self.counts)


@dataclasses.dataclass(frozen=True)
class Right:
    right: str


class PartLibrary(DoubleLibrary):
    def run(self, problem, schedule, target, /, *args, **params):
        return problem.reference(*args)


class Part(Kernel):
    """Is right for some numbers of elements only, as its schedule says."""

    backend = "part"

    def space(self, problem, target):
        return Space(Right, {"right": ("always", "full", "timed")})

    def footprint(self, problem, schedules, target):
        return None

    def run(self, problem, schedule, target, /, *args, **params):
        x, count = args
        right = problem.reference(x, count)
        known = {"always": (), "full": problem.counts[:1], "timed": problem.counts}[schedule.right]
        return right if not known else jnp.where(jnp.isin(count, np.array(known)), right, 2 * x + 1)


PART = Operation("part", PartProblem, (Part(), PartLibrary()))
PROBLEM = PartProblem(LENGTH)


@pytest.fixture
def bench():
    return Bench(PART, PROBLEM, CPU)


def test_a_candidate_is_verified_with_each_variant(bench):
    assert isinstance(bench.measure("part", {"right": "always"}, 3), Measurement)
    wrong = bench.measure("part", {"right": "full"}, 3)
    assert isinstance(wrong, Failure)
    assert wrong.stage == "verify"


def test_other_operands_are_confirmed_too(bench):
    assert isinstance(bench.measure("part", {"right": "timed"}, 3), Measurement)
    assert bench.confirm("part", {"right": "timed"}).stage == "verify"
    assert bench.confirm("part", {"right": "always"}) is None
    assert bench.intact()


def test_the_worst_variant_is_measured_and_kept(bench):
    measured = bench.measure("part", {"right": "always"}, 5)
    assert len(measured.samples_s) == 5
    assert measured.worst_s > 0
    with contextlib.closing(Store(":memory:")) as store:
        record = tune(PART, PROBLEM, store=store, budget=4)
        (stored,) = store.records()
    assert record == stored
    assert record.winner.measurement.worst_s > 0
    assert codec.record_from_text(codec.record_to_text(record)) == record
    assert record_report.entry_json(record.winner)["worst_s"] == record.winner.measurement.worst_s
    with (console := Console(width=120)).capture() as shown:
        console.print(*record_report.entries(record, None, None, 120))
    assert "worst" in shown.get()


def test_a_variant_shares_the_other_operands(bench):
    bench.measure("part", {"right": "always"}, 1)
    for first, *others in bench._sets:
        assert [int(count) for _, count in (first, *others)] == list(PROBLEM.counts)
        assert all(x is first[0] for x, _ in others)


def test_each_variant_needs_a_reference_and_calls():
    problem = RaggedDotProblem(64, 4, 64, 64)
    single = dataclasses.replace(problem, distribution="skewed")
    assert (problem.variant_count, single.variant_count) == (3, 1)
    assert needed_buffer_bytes(problem, CPU) > needed_buffer_bytes(single, CPU)
    assert calls_to_confirm(problem) == 12 + len(problem.special()) + 4
    assert calls_to_confirm(single) == 10 + len(problem.special()) + 1


def test_a_problem_names_a_distribution_or_recorded_sizes():
    problem = RaggedDotProblem.parse({"rows": "96", "groups": "3", "k": "8", "n": "8", "distribution": "64+0+16"})
    (boundaries,) = problem.draws()
    assert boundaries.tolist() == [0, 64, 64, 80]
    assert RaggedDotProblem.from_canonical(problem.canonical()) == problem
    assert problem.flops == 2 * 80 * 8 * 8
    assert problem.neighbour() is None or problem.neighbour().distribution == ""
    for wrong in ("64+0", "64+64+0", "-1+2+3", "0+0+0", "twisted", "1+2+x"):
        with pytest.raises(ValueError, match="distribution"):
            dataclasses.replace(problem, distribution=wrong)


def test_traffic_counts_rows_and_matrices_in_use():
    problem = RaggedDotProblem(64, 4, 8, 16, distribution="32+0+0+16")
    boundaries = 4 * 5
    assert problem.bytes_moved == 2 * (48 * 8 + 2 * 8 * 16 + 64 * 16) + boundaries
    weights = RaggedDotWeightsProblem(64, 4, 8, 16, distribution="32+0+0+16")
    assert weights.bytes_moved == 2 * (48 * 8 + 48 * 16 + 4 * 8 * 16) + boundaries


@pytest.mark.parametrize("kind", [RaggedDotProblem, GatedRaggedDotProblem, RaggedDotWeightsProblem])
def test_the_reference_of_some_rows_is_that_of_all(kind):
    problem = kind(60, 4, 20, 8, "float32")
    *operands, _ = problem.inputs(0)
    for seed in range(5):
        args = *operands, jnp.asarray(random_boundaries(seed, 60, 4))
        count = problem.result().shape[-2]
        rows = np.sort(np.random.default_rng(seed).choice(count, 7, replace=False)).astype(np.int32)
        below, take = problem.at_rows(rows)
        np.testing.assert_allclose(
            below.reference(*take(args)), jnp.take(problem.reference(*args), rows, axis=-2), rtol=1e-5, atol=1e-5
        )


def test_each_distribution_has_all_rows():
    for name in DISTRIBUTIONS:
        assert group_sizes(name, 1000, 7).sum() == 1000
