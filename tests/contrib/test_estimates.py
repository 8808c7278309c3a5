"""A chip that is not here: its compiler's estimates are no measurements, wherever a record is made, kept or told."""

import dataclasses
import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from invented import Alone
from test_cli import run
from tpu_kernels import PRODUCT, ProductProblem

import scheduler
from scheduler.contrib.tpu.ahead_of_time import AheadOfTime, elsewhere
from scheduler.contrib.tpu.estimate import grid_steps, reduced_problem
from scheduler.core import codec
from scheduler.core.errors import NoCandidate, StoreError, WorkerError
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Failure, Measurement, Miss, key_of
from scheduler.dispatch import dispatch
from scheduler.dispatch.stored import evidence
from scheduler.inspect import doctor
from scheduler.inspect.provenance import record_head
from scheduler.inspect.verdict import gain_text, verdict
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import InProcess, RunnerOptions, environment
from scheduler.model.calibration import calibrate
from scheduler.prediction.predict import predict
from scheduler.search.baseline import baseline_of, is_current, stored_evidence
from scheduler.search.missed import weigh
from scheduler.search.reverify import reverify
from scheduler.search.sweep import stored_measurements
from scheduler.search.task import Task
from scheduler.search.tuner import tune
from scheduler.store import text_files
from scheduler.store.cache import Cache
from scheduler.store.store import Store
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.always  # what stores, calls and commands do with estimates is no part of the shelf

ROOT = Path(__file__).parents[2]
V6E = find("v6e")
PROBLEM = ProductProblem(1024, 512, 256)
OWN = f"{Path(__file__).parent / 'tpu_kernels.py'}:PRODUCT"


class Estimating(Alone):
    """Tells times as a compiler does, always the same: the larger the tile, the less, and XLA's between them."""

    def __init__(self, hardware=V6E, library_s=3e-6):
        self.hardware, self.environment = elsewhere(hardware), environment(driver="libtpu 0.0.1")
        self.library_s, self.asked = library_s, []

    def measure(self, task, *, again=False):
        assert not again, "a time that is always the same is taken once"
        self.asked.append(dict(task.schedule))
        size = task.schedule.get("tile_m", 0) * task.schedule.get("tile_n", 0)
        time_s = 1e-6 + 1e-1 / size if size else self.library_s
        return Measurement(time_s, (time_s,), self.hardware.abilities.clock, "cold")


@pytest.fixture
def store(_own_cache):
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    yield store
    store.close()
    scheduler.reload()


@pytest.fixture
def estimate(store):
    """The record of a search whose times were estimated, which `store` holds."""
    return tune(PRODUCT, PROBLEM, store=store, runner=Estimating())


def as_measured(record, **changes):
    """The same as if it had been measured on the chip."""
    entries = [
        dataclasses.replace(e, measurement=dataclasses.replace(e.measurement, clock="wall")) for e in record.entries
    ]
    return dataclasses.replace(record, entries=tuple(entries), **changes)


def lowered(problem=PROBLEM, **options):
    """The text of a call lowered for a TPU; made anew, for JAX keeps what it has traced."""
    call = scheduler.tuned(PRODUCT)
    with scheduler.target(V6E.kind):
        traced = jax.jit(lambda *xs: call(*xs, **options)).trace(*problem.operands())
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def decided(problem=PROBLEM, **options):
    return dispatch.decide(PRODUCT, problem, "tpu", dispatch.options(PRODUCT, target=V6E.kind, **options))


def test_a_search_by_estimates_takes_each_once_and_says_what_they_are(estimate):
    assert estimate.estimated
    assert (estimate.winner.backend, estimate.winner.schedule) == ("mosaic_tpu", {"tile_m": 512, "tile_n": 512})
    assert {entry.measurement.clock for entry in estimate.entries} == {"static"}
    assert all(len(entry.measurement.samples_s) == 1 for entry in estimate.entries)
    assert estimate.library_entry is not None
    assert (estimate.confidence.rounds, estimate.undecided) == (0, False)
    assert estimate.environment.driver == "libtpu 0.0.1"
    assert verdict(estimate)[0].startswith("These are the compiler's estimates for an absent chip")
    assert next(record_head(estimate, trials_kept=True)).startswith("Estimated by the compiler, not measured")
    assert ">estimated</th>" in estimate._repr_html_()
    assert "nothing ran" in estimate._repr_html_()
    assert codec.record_from_text(codec.record_to_text(estimate)) == estimate


def test_a_tie_of_estimates_goes_to_the_library():
    best_s = 1e-6 + 1e-1 / 512**2
    for library_s, winner in ((1.005 * best_s, "xla"), (0.5 * best_s, "xla"), (1.02 * best_s, "mosaic_tpu")):
        record = tune(PRODUCT, PROBLEM, runner=Estimating(library_s=library_s))
        assert record.winner.backend == winner
        assert bool(record.confidence.tied) == (library_s == 1.005 * best_s)
        if record.confidence.tied:
            assert gain_text(record) == "tie"
            assert record.confidence.tied[0].startswith("xla")


def test_an_estimate_is_known_to_who_estimates_and_searched_again_on_the_chip(store, estimate):
    runner = Estimating()
    assert tune(PRODUCT, PROBLEM, store=store, runner=runner) == estimate
    assert not runner.asked
    assert is_current(Task(PRODUCT, PROBLEM), elsewhere(V6E), store) == estimate
    assert is_current(Task(PRODUCT, PROBLEM), V6E, store) == "it was estimated by the compiler, not measured"


def test_no_estimate_replaces_what_was_measured(store, estimate, tmp_path):
    measured = as_measured(estimate)
    store.put(measured)
    runner = Estimating()
    assert tune(PRODUCT, PROBLEM, store=store, runner=runner) == measured
    with pytest.raises(NoCandidate, match="is measured, and an estimate does not replace it"):
        tune(PRODUCT, PROBLEM, store=store, runner=runner, force=True)
    old = as_measured(estimate, versions={**estimate.versions, "mosaic_tpu": 0})
    store.put(old)  # it no longer holds, and was measured all the same
    with pytest.raises(NoCandidate, match="an estimate does not replace it"):
        tune(PRODUCT, PROBLEM, store=store, runner=runner)
    with pytest.raises(StoreError, match="an estimate does not replace"):
        store.put(estimate)
    assert not runner.asked
    assert store.get(measured.key) == old
    file = tmp_path / "records.jsonl"
    file.write_text(text_files.export_text([estimate]))
    assert "put 0 records" in run("import", file)[1]
    assert store.get(measured.key) == old
    store.put(measured)
    assert store.get(measured.key) == measured  # what was measured replaces all


def test_what_was_measured_replaces_an_estimate(store, estimate):
    measured = as_measured(estimate)
    store.put(measured)
    assert store.get(estimate.key) == measured


def test_a_call_for_the_chip_is_answered_by_an_estimate_that_says_so(store, estimate):
    decision = decided()
    assert decision.kernel.backend == "mosaic_tpu"
    assert decision.missed is None
    assert (decision.schedule.tile_m, decision.schedule.tile_n) == (512, 512)
    assert decision.reason == "estimated by the compiler, not measured, from the user's cache"
    assert "tpu_custom_call" in lowered()
    assert "own_product" in lowered()
    assert decided(on_miss="error").kernel.backend == "mosaic_tpu"
    assert decided(on_miss="tune").reason.startswith("estimated")  # the chip is not here: nothing can be measured


def test_what_was_measured_answers_before_an_estimate_wherever_they_lie(store, estimate, monkeypatch):
    library = next(entry for entry in estimate.entries if entry.backend == "xla")
    measured = as_measured(dataclasses.replace(estimate, entries=(library, *estimate.entries[:2])))
    shipped = Store(":memory:")
    shipped.put(measured)
    monkeypatch.setattr("scheduler.store.store.shipped", lambda: shipped)
    scheduler.reload()
    decision = decided()
    assert (decision.kernel.backend, decision.reason) == ("xla", "measured, from the shipped cache.db")
    assert evidence(Cache(), PRODUCT, PROBLEM, V6E) == [measured]
    monkeypatch.setattr("scheduler.search.baseline.shipped", lambda: shipped)
    monkeypatch.setattr(shipped, "close", lambda: None)
    task = Task(PRODUCT, PROBLEM)
    assert baseline_of(task, V6E, stored_evidence(task, V6E, store), estimate, store).backend == "xla"


def test_where_misses_are_tuned_an_estimate_of_the_chip_that_is_here_is_one(store):
    """A CPU stands for a chip that is here: its record is made an estimate."""
    problem = MatmulProblem(16, 16, 16, dtype="float32")
    record = tune(MATMUL, problem, store=store, budget=2)
    entries = [
        dataclasses.replace(e, measurement=dataclasses.replace(e.measurement, clock="static")) for e in record.entries
    ]
    store.forget(record.key)
    store.put(dataclasses.replace(record, entries=tuple(entries)))
    scheduler.reload()
    ask = dispatch.options(MATMUL)
    assert dispatch.decide(MATMUL, problem, "cpu", ask).reason.startswith("estimated by the compiler, not measured")
    assert dispatch.decide(MATMUL, problem, "cpu", dispatch.options(MATMUL, on_miss="tune")).reason == "measured now"
    assert not store.get(key_of(MATMUL, problem, CPU)).estimated


def test_estimates_correct_a_prediction_only_for_want_of_measurements(store, estimate):
    near = dataclasses.replace(PROBLEM, m=512)
    far = tune(PRODUCT, near, runner=Estimating())
    measured = as_measured(
        dataclasses.replace(
            tune(PRODUCT, dataclasses.replace(PROBLEM, n=1024), runner=Estimating()),
        )
    )
    only = frozenset({"mosaic_tpu"})
    here = dataclasses.replace(PROBLEM, m=1024, n=512)
    assert "estimated" in predict(PRODUCT, here, V6E, backends=only, records=[far]).reason
    told = predict(PRODUCT, here, V6E, backends=only, records=[far, measured])
    assert "estimated" not in told.reason
    assert told.neighbour == str(dataclasses.replace(PROBLEM, n=1024))
    own = predict(PRODUCT, PROBLEM, V6E, backends=only, records=[estimate, as_measured(estimate)])
    assert own.reason.startswith("measured on")
    assert predict(PRODUCT, PROBLEM, V6E, backends=only, records=[estimate]).reason.startswith("estimated by")


def test_the_model_is_not_fitted_to_estimates(store, estimate):
    found = stored_measurements(PRODUCT, V6E, store)
    with pytest.raises(NoCandidate, match="no trial of own_product on TPU v6 lite was timed"):
        calibrate(PRODUCT, V6E, found.trials, found.environments)


def test_an_estimate_cannot_be_verified_and_says_why(estimate):
    (one,) = reverify([estimate], operation=PRODUCT)
    assert one.state == "elsewhere"
    assert "estimate of the compiler" in one.reason
    message = run("verify", "--operation", OWN, status=1)[1]
    assert "none of 1 records could be timed" in message
    assert "estimate of the compiler" in message


def test_all_that_prints_a_record_says_that_it_is_estimated(store, estimate, tmp_path):
    fields = str(PROBLEM).split()
    assert "estimated by the compiler, not measured, with jax" in run("list")[0].replace("\n", " ")
    (listed,) = [row for row in json.loads(run("list", "--json")[0]) if row["operation"] == PRODUCT.name]
    assert listed["estimated"]
    assert listed["winner"]["estimated"]
    assert listed["winner"]["clock"] == "static"
    assert "own_product" in run("list", "--hardware", "TPU v6e")[0]
    shown = run("show", OWN, *fields, "--hardware", "v6e")[0]
    assert "Estimated by the compiler, not measured" in shown
    assert "These are the compiler's estimates" in shown
    assert "estimated" in shown.partition("trial")[2]
    assert "Estimated by the compiler, not measured" in run("explain", OWN, *fields, "--hardware", "v6e")[0]
    page = tmp_path / "report.html"
    run("report", "--out", page, "--operation", OWN, "--pictures", "none")
    assert 'class="badge" title="by the compiler: nothing ran"' in page.read_text()


def test_a_process_that_would_wait_for_nothing_is_refused_in_words(monkeypatch):
    with pytest.raises(WorkerError, match="no compiler for NVIDIA A100-SXM4-80GB runs on a host without that chip"):
        AheadOfTime(find("a100"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(WorkerError, match="the compiler for TPU v4 estimates no cycles"):
        AheadOfTime(find("TPU v4"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WorkerError, match=r"not installed: pip install 'tile-scheduler\[tpu\]'"):
        start_runner(PRODUCT, RunnerOptions(hardware="v6e"))
    assert "tile-scheduler[tpu]" in run("tune", OWN, *str(PROBLEM).split(), "--hardware", "v6e", status=1)[1]
    with pytest.raises(WorkerError, match="no hardware 'v66'"):
        start_runner(PRODUCT, RunnerOptions(hardware="v66"))


def test_an_operation_that_no_process_can_load_is_refused_before_any_is_started():
    nobodys = dataclasses.replace(PRODUCT, name="nobodys")
    with pytest.raises(WorkerError, match="no worker process can load nobodys"):
        tune(nobodys, PROBLEM, options=RunnerOptions(hardware="v6e"))


def test_estimates_have_operands_come_from_memory():
    runner = Estimating()
    runner.capacity = functools.partial(AheadOfTime.capacity, runner)
    with pytest.raises(NoCandidate, match="an estimate has operands come from its memory: no time is warm"):
        tune(PRODUCT, PROBLEM, runner=runner, l2="warm")


def test_the_chip_that_is_here_is_measured_on_by_its_name():
    runner = start_runner(MATMUL, RunnerOptions(hardware="cpu"))
    assert isinstance(runner, InProcess)
    with pytest.raises(ValueError, match="no hardware 'nowhere'"):
        scheduler.tune("matmul", {"m": 16, "n": 16, "k": 16}, hardware="nowhere")


def test_a_large_grid_is_told_by_two_small_ones_of_the_same_tiles():
    kernel, schedule = PRODUCT.kernel("mosaic_tpu"), {"tile_m": 128, "tile_n": 256}
    whole = ProductProblem(16384, 8192, 512)
    assert grid_steps(kernel, whole, schedule, V6E) == 128 * 32

    def steps(problem):
        return grid_steps(kernel, problem, schedule, V6E)

    part = reduced_problem(PRODUCT, whole, steps, 256)
    assert part is not None
    assert part.times == 16
    assert grid_steps(kernel, part.larger, schedule, V6E) == 256
    assert grid_steps(kernel, part.smaller, schedule, V6E) == 128
    assert part.larger.k == part.smaller.k == whole.k  # only what is independent is divided
    once, each = 7.0, 0.25  # what a grid takes once, and each of its steps
    assert part.whole(once + 256 * each, once + 128 * each) == pytest.approx(once + 4096 * each)


def test_what_does_not_come_apart_into_whole_tiles_is_not_reduced():
    kernel, schedule = PRODUCT.kernel("mosaic_tpu"), {"tile_m": 128, "tile_n": 128}
    odd = ProductProblem(128 * 33, 128 * 17, 128)

    def steps(problem):
        return grid_steps(kernel, problem, schedule, V6E)

    assert reduced_problem(PRODUCT, odd, steps, 256) is None
    unsharded = dataclasses.replace(PRODUCT, shard=None)
    assert reduced_problem(unsharded, ProductProblem(8192, 8192, 128), steps, 256) is None


def test_a_stage_and_a_clock_that_estimates_have_are_kept(store, estimate):
    trial = dataclasses.replace(store.trials(estimate.key)[0], outcome=Failure("estimate", "its grid has 4096 steps"))
    assert codec.trial_from_text(codec.trial_to_text(trial)) == trial
    assert [t.outcome.clock for t in store.trials(estimate.key)] == ["static"] * len(store.trials(estimate.key))


def test_doctor_says_of_each_chip_what_there_is(store, estimate):
    told = {finding.what: finding.detail for finding in doctor.examine(lambda: CPU)}
    for row in doctor.coverage([]):
        assert told[f"chip {row.hardware.kind}"]
    shipped = sum(r.key.hardware == V6E.id for r in text_files.read_records(ROOT / "records"))
    assert f"{shipped + 1} estimated" in told["chip TPU v6 lite"]
    assert "measured" in told["chip NVIDIA H200"]


def test_a_product_of_arrays_is_traced_with_the_schedule_that_was_estimated(store, estimate):
    exported = jax.export.export(
        jax.jit(lambda a, b: scheduler.tuned(PRODUCT)(a, b)),
        platforms=["tpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
    )
    with scheduler.target("v6e"):
        text = exported(*(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in PROBLEM.operands())).mlir_module()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize("chip", ["TPU v5e", "TPU v6e"])
def test_what_is_shipped_of_tpus_is_estimated_and_answers_calls_for_them(chip):
    hardware = find(chip)
    records = [record for record in text_files.read_records(ROOT / "records") if record.key.hardware == hardware.id]
    assert records
    for record in records:
        operation = load(record.key.operation)
        problem = operation.problem.from_canonical(record.key.problem)
        answer = dispatch.decide(operation, problem, "tpu", dispatch.options(operation, target=hardware.kind))
        assert record.estimated
        assert answer.reason == "estimated by the compiler, not measured, from the shipped cache.db"
        assert answer.kernel.backend == record.winner.backend
        assert vars(answer.schedule).items() >= dict(record.winner.schedule).items()


def test_a_miss_is_covered_by_what_was_measured_before_what_was_estimated(estimate):
    load(OWN)
    entries = [
        dataclasses.replace(e, measurement=dataclasses.replace(e.measurement, clock="cupti")) for e in estimate.entries
    ]
    measured = dataclasses.replace(estimate, entries=tuple(entries))
    miss = Miss(estimate.key, 1, "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "", "")
    (one,) = weigh([miss], lambda *asked: [estimate, measured], lambda identity: V6E)
    assert not one.covered_by.measurement.estimated


def test_what_is_not_stored_is_told_with_the_chip_that_was_named():
    _, said = run("show", "matmul", "m=8", "n=8", "k=8", "--hardware", "v6e", status=1)
    assert said.rstrip().endswith("--hardware 'TPU v6 lite'")


def test_a_call_that_no_kernel_answers_is_told_of_the_kernels_for_its_chip_alone():
    found = predict(MATMUL, MatmulProblem(512, 512, 512), V6E)
    assert found.reason == "mosaic_tpu: not verified on TPU v6 lite"
    scaled = load("scaled_matmul")
    assert "is written for NVIDIA Hopper" in predict(scaled, scaled.problem(64, 128, 256), V6E).reason


def test_rows_say_of_another_chip_what_they_are_for():
    reason = load("softmax").kernel("mosaic_gpu").supports(load("softmax").problem(8, 1024), CPU.target)
    assert reason == "is written for NVIDIA Ampere, Ada and Hopper (sm_80, sm_86, sm_89, sm_90), not for cpu (cpu)"
