"""What the model gets wrong is learnt near measured problems, and decides how sure an answer without a search is."""

import dataclasses
import json
import math

import numpy as np
import pytest
from invented import H200, NOW

from scheduler.core import codec
from scheduler.core.records import Calibration, Measurement, Observation, Trial, variant_of
from scheduler.model.calibration import calibrate
from scheduler.model.constants import (
    MIN_RESIDUALS,
    Covariance,
    ProblemPoint,
    Residuals,
    calibrations,
    fitted,
    residuals_of,
)
from scheduler.model.cost import CostModel
from scheduler.prediction.predict import LOSS_PER_GAIN, Choice, Prospect, predict
from search_spaces import load
from search_spaces.matmul import MATMUL, MatmulProblem

KERNEL = MATMUL.kernel("mosaic_gpu")
SEEN = tuple(ProblemPoint(MatmulProblem(m, 4096, 4096), 20e-6) for m in (64, 128, 256))


def errors_of(places, error):
    return Residuals(places, (error,) * len(places), Covariance(deviation=0.2))


def test_an_error_is_expected_next_to_where_it_was_made_and_hardly_far_away():
    learnt = errors_of(SEEN, 0.3)
    near, near_deviation = learnt.at(ProblemPoint(MatmulProblem(160, 4096, 4096), 20e-6))
    far, far_deviation = learnt.at(ProblemPoint(MatmulProblem(65536, 64, 131072), 20e-6))
    assert near == pytest.approx(0.3, abs=0.03)
    assert abs(far) < 0.1 * near
    assert near_deviation < 0.05 < 0.2 < far_deviation


def test_without_measurements_nothing_is_corrected_and_two_times_are_told_apart_from_a_tenth_on():
    error, deviation = Residuals().at(ProblemPoint(SEEN[0].problem, 1e-3))
    assert error == 0
    assert math.hypot(deviation, deviation) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    "other", [MatmulProblem(128, 4096, 4096, bias="bfloat16"), MatmulProblem(128, 4095, 4096)], ids=["bias", "odd rows"]
)
def test_what_was_measured_tells_less_of_another_epilogue_and_of_rows_that_start_anywhere(other):
    learnt = errors_of(SEEN, 0.3)
    alike, _ = learnt.at(ProblemPoint(MatmulProblem(128, 4096, 4000), 20e-6))
    error, _ = learnt.at(ProblemPoint(other, 20e-6))
    assert error < alike


def test_rows_that_are_no_multiple_of_16_bytes_are_less_certain_if_their_errors_were_larger():
    places = [ProblemPoint(MatmulProblem(2**i, n, 4096), 1e-3) for i in range(6, 12) for n in (2048, 4096, 1500, 3500)]
    found = fitted(
        places, [(0.8 if place.problem.row_alignment < 16 else 0.05) * math.sin(i) for i, place in enumerate(places)]
    )
    assert found.unaligned > 1
    far = MatmulProblem(65536, 64, 131072), MatmulProblem(65536, 60, 131072)
    aligned, unaligned = (Residuals(covariance=found).at(ProblemPoint(one, 1e-3))[1] for one in far)
    assert unaligned > 2 * aligned


def test_short_launches_are_less_certain():
    learnt = errors_of(SEEN, 0.0)
    certain, uncertain = (learnt.at(ProblemPoint(SEEN[1].problem, seconds))[1] for seconds in (2e-3, 2e-6))
    assert uncertain > 2 * certain


def test_the_likeliest_covariance_follows_the_spread_of_errors_and_few_problems_tell_nothing():
    places = [ProblemPoint(MatmulProblem(2**i, 2**j, 4096), 1e-3) for i in range(6, 12) for j in range(8, 12)]
    calm = fitted(places, [0.01 * (-1) ** i for i in range(len(places))])
    wild = fitted(places, [0.4 * math.sin(i) for i in range(len(places))])
    assert calm.deviation < wild.deviation
    assert fitted(places[: MIN_RESIDUALS - 1], [0.4] * (MIN_RESIDUALS - 1)) == Covariance()


def test_a_size_on_which_errors_depend_is_relevant_and_one_on_which_they_do_not_is_not():
    grid = [(2**i, 2**j) for i in range(6, 12) for j in range(6, 12)]
    places = [ProblemPoint(MatmulProblem(m, 4096, k), 1e-3) for m, k in grid]
    found = fitted(places, [0.3 * (-1) ** int(math.log2(k)) for _, k in grid]).relevance
    assert found["k"] > 1
    assert found.get("m", 1.0) <= 1


def test_a_covariance_is_kept_among_constants_and_values_that_mean_nothing_are_left_out():
    some = Covariance(0.4, 2.0, 5.0, 0.04, 0.0, 8.0, {"k": 4.0})
    assert Covariance.of(some.named()) == some
    assert Covariance.of({"residual_noise": -1.0, "residual_doublings": 0.0, "scale": 3.0}) == Covariance()


# --- what is kept of it, and what an answer makes of it ---


def calibration(backend, factor, *, variants=(), deviation=0.05, version=None):
    """All problems of a ladder take so many times what is predicted."""
    kernel = MATMUL.kernel(backend)
    ladder = [MatmulProblem(2**i, 4096, 4096) for i in range(4, 12)]
    observations = tuple(Observation(p.canonical(), 1e-5, factor * 1e-5) for p in ladder)
    covariance = Covariance(deviation=deviation, small_deviation=0.0, small_noise=0.0)
    told = {"library_s": 4e-6} if kernel.library else {}
    return Calibration(
        H200.id,
        "matmul",
        backend,
        kernel.version if version is None else version,
        told | covariance.named(),
        len(ladder),
        len(ladder),
        0.02,
        NOW,
        observations,
        variants,
    )


def answer(library, ours):
    return predict(MATMUL, MatmulProblem(192, 4096, 4096), H200, fitted={"xla": library, "mosaic_gpu": ours})


def test_a_calibration_reads_back_with_what_was_observed():
    kept = calibration("xla", 1.2, variants=("a=1",))
    assert codec.calibration_from_text(codec.calibration_to_text(kept)) == kept


def test_a_calibration_of_before_has_no_observations():
    text = codec.calibration_to_text(dataclasses.replace(calibration("xla", 1.2), observations=(), variants=()))
    fields = json.loads(text)
    del fields["observations"], fields["variants"]
    assert codec.calibration_from_text(json.dumps(fields)).observations == ()


def test_where_the_library_was_always_slower_than_predicted_a_kernel_answers_and_where_faster_it_does_not():
    slow, fast = (answer(calibration("xla", factor), calibration("mosaic_gpu", 1.0)) for factor in (1.3, 0.7))
    assert (slow.backend, fast.backend) == ("mosaic_gpu", "xla")
    assert fast.faster < 0.5 < slow.faster
    assert slow.otherwise_s == slow.library_s
    assert slow.library_s == pytest.approx(fast.library_s * 1.3 / 0.7, rel=0.05)


def test_an_expected_gain_is_not_enough_where_errors_are_large():
    sure, unsure = (
        predict(
            MATMUL,
            MatmulProblem(192, 262144, 64),
            H200,
            fitted={"xla": calibration("xla", 1.1, deviation=d), "mosaic_gpu": calibration("mosaic_gpu", 1.0)},
        )
        for d in (0.0, 2.0)
    )
    assert sure.backend == "mosaic_gpu"
    assert unsure.faster < sure.faster
    assert unsure.backend == "xla"


def test_the_expected_loss_is_weighed_against_the_expected_gain():
    def ratio(predicted_s, deviation):
        return Prospect.of(Choice("xla", {}, 1.0, 0.0), Choice("mosaic_gpu", {}, predicted_s, deviation)).loss_per_gain

    assert ratio(1.0, 0.1) == pytest.approx(1.0)
    assert ratio(1.1, 0.1) > 1 > ratio(0.9, 0.1) > ratio(0.8, 0.1)
    draws = np.random.default_rng(0).normal(math.log(1 / 0.9), 0.1, 10**6)
    assert ratio(0.9, 0.1) == pytest.approx(np.maximum(-draws, 0).mean() / np.maximum(draws, 0).mean(), rel=0.02)
    assert ratio(0.98, 0.01) < LOSS_PER_GAIN < ratio(0.98, 0.1)
    assert ratio(0.1, 0.01) == 0.0
    assert ratio(10.0, 0.01) == math.inf


def test_a_kernel_competes_with_the_vendors_library_where_that_is_faster_than_xla():
    """cuDNN takes 0.1 of the time of XLA, so only a kernel that is faster than cuDNN answers."""
    attention, problem = load("flash_attention"), load("flash_attention").problem(2, 4096, 4096, 16, 16, 128)

    def answer(ours):
        scales = {"xla": 10.0, "cudnn": 1.0, "mosaic_gpu": ours}
        fitted = {
            backend: dataclasses.replace(
                calibration("xla", 1.0), operation="flash_attention", backend=backend, observations=(),
                version=attention.kernel(backend).version,
                constants={"library_scale" if backend == "xla" else "scale": scale},
            )
            for backend, scale in scales.items()
        }  # fmt: skip
        return predict(attention, problem, H200, fitted=fitted)

    slower, faster = answer(1.2), answer(0.5)
    assert (slower.backend, faster.backend) == ("cudnn", "mosaic_gpu")
    assert slower.otherwise == faster.otherwise == "cudnn"
    assert slower.predicted_s == slower.otherwise_s < slower.library_s
    assert "over cudnn" in slower.reason
    assert "the speed of cudnn" in faster.reason


def test_errors_of_another_version_of_a_kernel_are_not_taken():
    ours = calibration("mosaic_gpu", 3.0, version=KERNEL.version + 1)
    assert residuals_of(MATMUL, KERNEL, {"mosaic_gpu": ours}) == Residuals()
    assert residuals_of(MATMUL, KERNEL, {"mosaic_gpu": calibration("mosaic_gpu", 3.0)}).errors[0] == math.log(3.0)


def test_an_answer_is_of_a_variant_that_was_measured():
    library = calibration("xla", 1.5)
    free = answer(library, calibration("mosaic_gpu", 1.0)).schedule
    whole = {**KERNEL.space(MatmulProblem(192, 4096, 4096), H200.target).defaults, **free}
    other = "cluster=none consumers=cooperative_m grid_minor_dim=n swap_ab=False"
    assert variant_of(whole) != other
    kept = answer(library, calibration("mosaic_gpu", 1.0, variants=(other,)))
    assert kept.backend == "mosaic_gpu"
    assert kept.schedule["consumers"] == "cooperative_m"
    none = answer(library, calibration("mosaic_gpu", 1.0, variants=("cluster=unheard_of",)))
    assert none.backend == "xla"
    assert "no measured variant of the kernel" in none.reason


def test_a_calibration_keeps_the_time_of_the_top_prediction_or_else_of_the_fastest():
    problem = MatmulProblem(192, 4096, 4096)
    top = predict(MATMUL, problem, H200, backends=frozenset({"mosaic_gpu"}), fitted={}).schedule
    other = {**top, "stages": top["stages"] - 1}

    def trial(number, schedule, seconds, backend="mosaic_gpu", version=KERNEL.version):
        return Trial(number, backend, version, schedule, Measurement(seconds, (seconds,), "cupti", "cold"), 1e-5)

    library = trial(2, {}, 17e-6, "xla", 1)
    both = calibrate(MATMUL, H200, {problem: [trial(0, top, 16e-6), trial(1, other, 15e-6), library]}, [NOW])
    one = calibrate(MATMUL, H200, {problem: [trial(1, other, 15e-6), library]}, [NOW])
    assert [[o.measured_s for o in c.observations] for c in both] == [[16e-6], [17e-6]]
    assert [[o.measured_s for o in c.observations] for c in one] == [[15e-6], [17e-6]]
    assert len(both[0].variants) == 1


def test_the_shipped_constants_know_today_s_kernels_and_answer_what_was_slower_than_xla_before():
    """200 x 4096 x 4096 was answered with a variant that nobody had measured: 18.9 us, where XLA takes 15.6."""
    found = calibrations("matmul", H200, shared_only=True)
    assert residuals_of(MATMUL, KERNEL, found).errors
    told = predict(MATMUL, MatmulProblem(200, 4096, 4096), H200, shared_only=True)
    assert told.backend == "xla" or told.schedule.get("cluster") != "split_k"


def test_a_residual_that_the_library_may_add_itself_makes_its_time_unsure():
    model = CostModel(H200)
    alone, activated = (MatmulProblem(4096, 4096, 4096, residual="bfloat16", activation=name) for name in ("", "gelu"))
    plain = MatmulProblem(4096, 4096, 4096)
    assert model.library_spread(plain) == model.library_spread(activated) == 0.0
    epilogue_s = model.library_seconds(activated) - model.library_seconds(alone)
    assert math.exp(model.library_spread(alone)) == pytest.approx(
        1 + epilogue_s / model.library_seconds(alone), rel=0.05
    )
    fitted = {"xla": calibration("xla", 1.3), "mosaic_gpu": calibration("mosaic_gpu", 1.0)}
    sure, unsure = (predict(MATMUL, problem, H200, fitted=fitted).faster for problem in (plain, alone))
    assert unsure < sure
