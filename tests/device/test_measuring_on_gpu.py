"""What a bench finds on a GPU: a tile that is never written, results in place, and the state of the cache."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from scheduler.core.records import Failure, Measurement
from scheduler.measure.runner import Task
from scheduler.model.cost import CostModel
from scheduler.search.tuner import tune
from search_spaces import Columns, Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Problem, Space
from search_spaces.jax_compat import plgpu
from search_spaces.matmul import MATMUL, MatmulProblem

TILE = 128


@dataclasses.dataclass(frozen=True)
class TwiceProblem(Problem):
    n: int

    @classmethod
    def of(cls, *args, **params):
        return cls(n=args[0].shape[0])

    def operands(self):
        return (self.result(),)

    def result(self):
        return jax.ShapeDtypeStruct((self.n,), jnp.dtype("float32"))

    def reference(self, *args):
        return args[0] * 2

    @property
    def flops(self):
        return float(self.n)


@dataclasses.dataclass(frozen=True)
class Skipping:
    """The tile that is left out; -1 for none."""

    skip: int


class MosaicTwice(Kernel):
    """Doubles an array, one tile a block; one block may do nothing."""

    backend = "mosaic_gpu"

    def supports(self, problem, target):
        return None if target.platform == "cuda" else "needs a GPU"

    def space(self, problem, target):
        return Space(Skipping, {"skip": (-1, 0, 3)})

    def footprint(self, problem, schedules: Columns, target):
        one = np.ones(len(schedules))
        return Footprint(
            arithmetic="float32",
            grid=(one * problem.n // TILE,),
            step=Phase(loads=(Operand(bytes=4.0 * TILE * one, axes=(0,)),), flops=1.0 * TILE),
            tile=Phase(bytes_written=4.0 * TILE),
            onchip_bytes=np.zeros(len(schedules), dtype=np.int64),
        )

    def run(self, problem, schedule, target, /, *args, **params):
        def body(x_ref, out_ref):
            tile = jax.lax.axis_index("tile")
            here = pl.ds(tile * TILE, TILE)

            @pl.when(tile != schedule.skip)
            def _():
                out_ref[here] = x_ref[here] * 2

        kernel = plgpu.kernel(body, out_type=problem.result(), grid=(problem.n // TILE,), grid_names=("tile",))
        return kernel(*args)


class XlaTwice(LibraryKernel):
    def run(self, problem, schedule, target, /, *args, **params):
        return args[0] + args[0]


TWICE = Operation("twice", TwiceProblem, (MosaicTwice(), XlaTwice()))


def twice(skip, n=8 * TILE):
    return Task(TWICE, TwiceProblem(n), "mosaic_gpu", {"skip": skip}, 10)


def test_a_tile_that_is_never_written_is_found_as_nan(pool):
    assert isinstance(pool.measure(twice(skip=-1)), Measurement)
    for tile in (0, 3):
        outcome = pool.measure(twice(skip=tile))
        assert isinstance(outcome, Failure)
        assert outcome.stage == "verify"
        said = f"{TILE} of {8 * TILE} elements are off; the worst, at ({tile * TILE},), is nan (as where nothing was"
        assert outcome.detail.startswith(said)


def test_a_search_lets_no_kernel_win_that_skips_a_tile(pool):
    record = tune(TWICE, TwiceProblem(2**20), runner=pool, budget=8)
    assert record.tried == 4
    assert record.best(frozenset({"mosaic_gpu"})).schedule == {"skip": -1}
    assert all(entry.measurement.clock == "cupti" for entry in record.entries)
    assert record.confidence.rounds >= 8


def test_operands_in_the_cache_come_faster(pool):
    cold = Task(TWICE, TwiceProblem(2**22), "xla", {}, 30)
    measured = {l2: pool.measure(dataclasses.replace(cold, l2=l2)) for l2 in ("cold", "warm")}
    assert {l2: outcome.l2 for l2, outcome in measured.items()} == {"cold": "cold", "warm": "warm"}
    assert measured["warm"].median_s < measured["cold"].median_s


@pytest.mark.parametrize(
    "problem",
    [
        *(TwiceProblem(2**power) for power in (16, 22, 26)),
        MatmulProblem(16, 8192, 8192),
        MatmulProblem(8192, 8192, 8192),
    ],
    ids=str,
)
def test_an_honest_time_is_above_the_lower_bound(pool, problem):
    operation = TWICE if isinstance(problem, TwiceProblem) else MATMUL
    measured = pool.measure(Task(operation, problem, "xla", {}, 10))
    assert isinstance(measured, Measurement), measured
    assert measured.median_s > 0.9 * CostModel(pool.hardware).lower_bound(problem)


def test_the_finalists_of_a_product_are_right_on_a_ragged_neighbour(pool):
    record = tune(MATMUL, MatmulProblem(1024, 1024, 1024), runner=pool, budget=32)
    entry = record.best(frozenset({"mosaic_gpu"}))
    task = Task(MATMUL, MatmulProblem(1024, 1024, 1024), entry.backend, entry.schedule, 10)
    assert pool.confirm(task) is None


def test_a_process_of_our_own_is_no_stranger(pool):
    pool.measure(twice(skip=-1))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert pool.others() == 0
    else:  # other test processes hold this GPU, too, and start and end workers meanwhile
        assert any(pool._gpu.others(()) > pool.others() for _ in range(20))
