"""Ranges whose points nobody measured: what calls get of them, and what goes before them."""

import contextlib
import dataclasses
import io

import pytest
from operations import DoubleProblem
from rich.console import Console
from stepped import STEPPED
from test_estimates import V6E, Estimating, decided
from test_ranges import OWN, command, decide
from test_ranges import run as run_range
from tpu_kernels import PRODUCT, ProductProblem
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.cli.search_report import results as shown
from scheduler.contrib.tpu.ahead_of_time import elsewhere
from scheduler.core.hardware import CPU
from scheduler.core.records import Miss, key_of
from scheduler.prediction.between import Evidence, answer
from scheduler.search import jobs
from scheduler.search.baseline import baseline_of, is_current, stored_evidence
from scheduler.search.missed import weigh
from scheduler.search.task import Task
from scheduler.store.store import Store, default_url
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow


def as_estimated(record, problem=None):
    """The same as if its times had been estimated; of another problem where one is given."""
    entries = [
        dataclasses.replace(e, measurement=dataclasses.replace(e.measurement, clock="static")) for e in record.entries
    ]
    key = record.key if problem is None else key_of(STEPPED, problem, CPU)
    return dataclasses.replace(record, key=key, entries=tuple(entries))


@pytest.fixture(scope="module")
def measured():
    """The records at the points of a range from 1 to 1024, and the range."""
    with contextlib.closing(Store(":memory:")) as store:
        *_, whole = run_range(store)
        keys = {key_of(STEPPED, DoubleProblem(n), CPU) for n in whole.range.points}
        return [record for record in store.records() if record.key in keys], whole.range


@contextlib.contextmanager
def kept(records, of):
    """These in the user's own store."""
    with contextlib.closing(Store(default_url())) as mine:
        for record in records:
            mine.put(record)
        mine.ranges.put(of)
    scheduler.reload()
    try:
        yield
    finally:
        scheduler.reload()


def test_a_range_of_estimates_is_tuned_and_says_what_it_is():
    with contextlib.closing(Store(default_url())) as store:
        task = jobs.task_of(PRODUCT, {"m": "128..1024", "n": "512", "k": "256"}, budget=4)
        *points, whole = jobs.run([task], store=store, runner=Estimating())
        assert {result.record.estimated for result in points} == {True}
        assert whole.range.points[0] == 128
        assert whole.range.points[-1] == 1024
        assert len(whole.range.held_out) == 5
        assert (state(points[0]), state(whole)) == ("estimated", "estimated")
        known = list(jobs.run([task], store=store, runner=Estimating()))[-1]
        assert state(known) == "known"
        brief = next(result.record for result in points if result.record.brief)
        problem = ProductProblem.from_canonical(brief.key.problem)
        assert "only a few schedules" in is_current(PRODUCT, problem, elsewhere(V6E), store)
        assert "estimated" in is_current(PRODUCT, problem, V6E, store, brief=True)
    scheduler.reload()
    asked = ProductProblem(700, 512, 256)  # no tile divides it
    decision = decided(asked, on_miss="error")
    assert decision.reason.startswith("the range m=128..1024: estimated by the compiler, not measured, at m=")
    assert (decision.kernel.backend, decision.missed) == ("xla", None)
    assert decided(asked, on_miss="tune").reason == decision.reason  # the chip is not here


def state(result):
    """What a job's table says of a result that stands alone in it."""
    console = Console(width=200, file=io.StringIO())
    with console.capture() as said:
        console.print(*shown([result], 200))
    return (
        next(line for line in said.get().splitlines() if line.startswith(str(result.task)))
        .removeprefix(str(result.task))
        .split()[0]
    )


def test_where_misses_are_tuned_a_range_of_estimates_is_one(measured):
    records, of = measured
    with kept(map(as_estimated, records), of):
        assert "estimated by the compiler, not measured, at n=" in decide(77).reason
        assert decide(77, on_miss="tune").reason == "measured now"


def test_one_point_that_was_not_measured_makes_the_range_an_estimate(measured):
    records, of = measured
    low, _ = of.around(77)
    some = [as_estimated(r) if r.key == key_of(STEPPED, DoubleProblem(low), CPU) else r for r in records]
    with kept(some, of):
        assert "estimated by the compiler" in decide(77).reason
        assert ": measured at n=" in decide(700).reason


def test_what_was_measured_goes_first_a_record_or_a_range(measured):
    records, of = measured
    own = as_estimated(records[0], DoubleProblem(77))
    for at_points, expected in (
        (records, "the range n=1..1024: measured at n="),
        (list(map(as_estimated, records)), "estimated by the compiler, not measured, from the user's cache"),
    ):
        with contextlib.closing(Store(default_url())) as mine:
            for record in mine.records():
                mine.forget(record.key)
        with kept([own, *at_points], of):
            assert decide(77).reason.startswith(expected)
            out, _ = command("explain", OWN, "n=77")
            told = "From a range, a call gets" in out and "Of the problem itself only an estimate is stored" in out
            assert told == (at_points is records)
            shown_points, _ = command("show", OWN, "n=1..1024")
            assert ("estimated" in shown_points) != (at_points is records)
        said = answer(STEPPED, DoubleProblem(77), CPU, records=[own, *at_points], ranges=[of])
        assert (said.source, said.estimated) == (("range", False) if at_points is records else ("record", True))


def test_before_a_search_is_what_a_call_got_then(measured):
    records, of = measured
    own = as_estimated(records[0], DoubleProblem(77))
    task, searched = Task(STEPPED, DoubleProblem(77)), dataclasses.replace(records[0], key=own.key)
    with kept([own, *records], of), contextlib.closing(Store(default_url())) as mine:
        decision = decide(77)
        found = baseline_of(task, CPU, stored_evidence(task, CPU, mine), searched, mine)
    assert found.backend == decision.kernel.backend != own.winner.backend
    assert decision.kernel.space(task.problem, CPU.target).decode(found.schedule) == decision.schedule


def test_a_point_is_taken_as_it_was_measured_wherever_its_estimate_lies(measured, monkeypatch):
    records, of = measured
    shipped = Store(":memory:")
    for record in records:
        shipped.put(record)
    monkeypatch.setattr("scheduler.store.store.shipped", lambda: shipped)
    with kept(map(as_estimated, records), of):
        assert decide(77).reason.startswith("the range n=1..1024: measured at n=")


def test_a_miss_is_settled_by_what_was_measured_before_what_was_estimated(measured):
    load(OWN)
    (first, *_), _ = measured
    miss = Miss(first.key, 1, "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", "", f"{__file__}:none")
    (one,) = weigh([miss], lambda *asked: Evidence([as_estimated(first), first]), lambda identity: CPU)
    assert not one.covered_by.measurement.estimated


def test_what_is_not_stored_is_told_with_the_chip_that_was_named():
    done = CliRunner().invoke(app, ["show", "matmul", "m=8", "n=8", "k=8", "--hardware", "v6e"])
    assert done.exit_code != 0
    assert done.stderr.rstrip().endswith("--hardware 'TPU v6 lite'")


def test_a_call_that_no_kernel_answers_is_told_of_the_kernels_for_its_chip_alone():
    found = answer(MATMUL, MatmulProblem(512, 512, 512), V6E)
    assert found.reason == "mosaic_tpu: not verified on TPU v6 lite"
    scaled = load("scaled_matmul")
    assert "is written for NVIDIA Hopper" in answer(scaled, scaled.problem(64, 128, 256), V6E).reason


def test_rows_say_of_another_chip_what_they_are_for():
    reason = load("softmax").kernel("mosaic_gpu").supports(load("softmax").problem(8, 1024), CPU.target)
    assert reason == "is written for NVIDIA Ampere, Ada and Hopper (sm_80, sm_86, sm_89, sm_90), not for cpu (cpu)"
