"""Probes on a chip without measurements: what they choose, and how they correct the constants of a sibling."""

import pytest
from invented import NOW, Alone

from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Failure, Measurement
from scheduler.model.constants import calibrations
from scheduler.model.pruning import illegal
from scheduler.prediction.predict import choose
from scheduler.prediction.transfer import WORTH_A_TRIAL, nearest
from scheduler.search.probes import MOST_PROBES, corrected, measure, probes
from scheduler.store.store import Store, shipped
from search_spaces.matmul import MATMUL, MatmulProblem

H100, H200 = find("H100"), find("H200")
SLOWER = 1.1


@pytest.fixture(scope="module")
def chosen():
    return probes(H100, shipped().records(hardware=H200.id))


class Slower(Alone):
    """A chip on which each probe takes longer than expected by this factor, and softmax's kernel fails."""

    hardware = H100

    def __init__(self, chosen):
        self.expected_s = {(p.operation.name, p.problem, p.entry.backend): p.expected_s for p in chosen}

    def measure(self, task, *, again=False):
        if (task.operation.name, task.backend) == ("softmax", "mosaic_gpu"):
            return Failure("time", "it hangs")
        seconds = SLOWER * self.expected_s[task.operation.name, task.problem, task.backend]
        return Measurement(seconds, (seconds,) * task.repetitions, "cupti", "cold")


def test_probes_are_of_many_operations_and_run_on_the_chip(chosen):
    assert 8 <= len(chosen) <= MOST_PROBES
    assert len({probe.operation.name for probe in chosen}) >= 5
    for probe in chosen:
        kernel = probe.operation.kernel(probe.entry.backend)
        assert illegal(kernel, probe.problem, H100, probe.entry.schedule) is None
        ratio = probe.expected_s / probe.entry.measurement.median_s
        assert 0.9 <= ratio <= 1.5, "an H100 has the cores of an H200, and 0.7 of its bandwidth"


def test_a_chip_with_constants_of_its_own_or_without_siblings_has_no_probes():
    records = list(shipped().records(hardware=H200.id))[:20]
    assert probes(H200, records) == probes(CPU, records) == []


def test_a_corrected_calibration_has_the_median_error_and_no_uncertainty_of_another_chip(chosen):
    said = []
    errors = measure(Slower(chosen), chosen, lambda probe, outcome: said.append(outcome))
    assert len(said) == len(chosen)
    assert ("softmax", "mosaic_gpu") not in errors
    made = corrected(H100, NOW, errors)
    borrowed = calibrations("matmul", H100)
    fitted = {one.backend: one for one in made if one.operation == "matmul"}
    records = list(shipped().records(operation="matmul", hardware=H200.id))
    near = nearest(MATMUL, MatmulProblem(2048, 3072, 4096), H100, records, within=WORTH_A_TRIAL)
    assert near
    assert fitted["mosaic_gpu"].constants["scale"] == pytest.approx(SLOWER * borrowed["mosaic_gpu"].constants["scale"])
    for backend in fitted:
        kernel, problem = MATMUL.kernel(backend), MatmulProblem(2048, 3072, 4096)
        before, after = (choose(MATMUL, kernel, problem, H100, each, ()) for each in (borrowed, fitted))
        assert after.predicted_s == pytest.approx(SLOWER * before.predicted_s, rel=0.01)
        beside_a_sibling = choose(MATMUL, kernel, problem, H100, fitted, near)
        assert beside_a_sibling.predicted_s == after.predicted_s, "the sibling's times do not undo the correction"
        assert after.deviation < before.deviation

    store = Store(":memory:")
    for calibration in made:
        store.put_calibration(calibration)
    assert store.calibrations(hardware=H100.id, operation="matmul") == [
        one for one in made if one.operation == "matmul"
    ]


def test_without_a_measured_probe_nothing_is_calibrated():
    with pytest.raises(SchedulerError, match="no probe ran on NVIDIA H100"):
        corrected(H100, NOW, {})
