"""Constants of XLA on a chip without records: what is measured, what is found again, and what is refused."""

import itertools
import re

import pytest
from invented import Alone, Invented
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.errors import NoCandidate, SchedulerError
from scheduler.core.hardware import find
from scheduler.core.records import Failure, Measurement
from scheduler.inspect import doctor
from scheduler.model import constants
from scheduler.model.constants import calibrations, model_of
from scheduler.model.cost import Constants, CostModel
from scheduler.prediction.predict import choose
from scheduler.prediction.transfer import WORTH_A_TRIAL, nearest
from scheduler.search.quick import SECONDS, measured
from scheduler.store.store import shipped
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.row_alignment import ROW_BYTES

H100, H200, A100 = find("H100"), find("H200"), find("NVIDIA A100-SXM4-80GB")
TRUE = Constants(library_scale=1.2, library_s=3e-6, library_unaligned=1.0, library_halving=0.1, library_store=3.0)
FAR = MatmulProblem(2048, 3072, 4096)


def ignored(*_):
    pass


@pytest.mark.parametrize("chip", [H100, A100], ids=["a sibling has constants", "no sibling has any"])
def test_the_constants_of_a_chip_are_found_again_and_the_changed_ones_are_named(chip):
    made, changes = measured(Invented(chip, TRUE, noise=0.002), ignored)
    model = model_of(MATMUL, MATMUL.library, chip, found={made.backend: made})
    true = CostModel(chip, TRUE)
    for problem in (
        FAR,
        MatmulProblem(4096, 4097, 4096),
        MatmulProblem(4095, 4095, 4095),
        MatmulProblem(16, 4097, 4096),
    ):
        assert model.library_seconds(problem) == pytest.approx(true.library_seconds(problem), rel=0.06), problem
    assert {"library_scale", "library_s", "library_unaligned", "library_store"} <= changes.keys()
    assert all(after == getattr(model.in_force, name) != before for name, (before, after) in changes.items())


def test_times_of_a_sibling_do_not_correct_what_was_measured_here():
    made, _ = measured(Invented(H100, TRUE), ignored)
    near = nearest(MATMUL, FAR, H100, list(shipped().records(operation="matmul", hardware=H200.id)), WORTH_A_TRIAL)
    assert near
    fitted = {**calibrations("matmul", H100), made.backend: made}
    alone, beside = (choose(MATMUL, MATMUL.library, FAR, H100, fitted, each) for each in ((), near))
    assert alone.predicted_s == beside.predicted_s


def test_no_product_is_begun_after_the_time_and_an_early_end_leaves_some_of_each_alignment():
    ticks, seen = itertools.count(0, SECONDS / 6), []
    measured(Invented(H100, TRUE), lambda problem, _: seen.append(problem), clock=lambda: next(ticks))
    assert len(seen) == 6
    assert {problem.row_alignment == ROW_BYTES for problem in seen} == {True, False}


class Without(Alone):
    """A chip without a clock of its own, or on which nothing runs."""

    hardware = H100

    def __init__(self, outcome):
        self.outcome = outcome

    def measure(self, task, *, again=False):
        return self.outcome


@pytest.mark.parametrize("outcome", [Measurement(1.0, (1.0,), "wall", "cold"), Failure("time", "it hangs")], ids=str)
def test_without_the_clock_of_a_device_nothing_is_calibrated(outcome):
    with pytest.raises(NoCandidate, match="timed by the clock of an accelerator"):
        measured(Without(outcome), ignored)


def test_a_chip_with_constants_from_more_products_keeps_them():
    with pytest.raises(SchedulerError, match=r"NVIDIA H200 has constants from \d+ products: nothing to measure"):
        measured(Invented(H200), ignored)


def test_the_command_stores_what_it_found_and_until_then_doctor_names_it(monkeypatch):
    (finding,) = doctor._constants(H100)
    assert finding.state == "note"
    assert "NVIDIA H200" in finding.detail
    assert "tile-scheduler calibrate --quick" in finding.detail
    monkeypatch.setattr("scheduler.measure.pool.open_runner", lambda options: Invented(H100, TRUE))
    ended = CliRunner().invoke(app, ["calibrate", "--quick"])
    assert ended.exit_code == 0, ended.output
    assert re.search(r"library_store: [\d.]+ before, now 3\n", ended.stderr)
    constants.forget()
    assert calibrations("matmul", H100)["xla"].hardware == H100.id
    assert list(doctor._constants(H100)) == []
    assert list(doctor._constants(H200)) == []
    for wrong in (["calibrate"], ["calibrate", "matmul", "--quick"], ["calibrate", "--quick", "--hardware", "H100"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
