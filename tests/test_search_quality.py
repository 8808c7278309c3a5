"""The benchmark of the search judges what it says it judges."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler import replay
from scheduler.calibrate import fit
from scheduler.cost import Constants
from search_spaces.matmul import MATMUL

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import search_quality

SWEEPS = Path(__file__).parents[1] / "sweeps" / "nvidia-h200"
FEW_ROWS, SMALL = SWEEPS / "matmul-m16-n8192-k8192.jsonl.gz", SWEEPS / "matmul-m1024-n1024-k2048.jsonl.gz"


@pytest.fixture(scope="module")
def shape():
    (found,) = search_quality.read(SMALL)
    return found


def test_without_a_second_pass_the_only_one_judges_and_the_row_says_so(shape):
    assert shape.second_pass == 0
    assert np.array_equal(shape.judged_s, shape.seen.seconds)
    assert search_quality.split_ceiling(shape) <= 1


def test_a_second_pass_judges_and_whoever_was_lucky_in_the_first_loses_by_it(tmp_path):
    head, trials = replay.read(FEW_ROWS)
    path = tmp_path / "twice.jsonl.gz"
    with replay.Recorder(path, dataclasses.replace(head, again=5, rounds=2)) as recorder:
        for trial in trials:
            recorder.add(trial)
        chosen = replay.second_pass(recorder_head(path), trials)
        slower = [dataclasses.replace(t, outcome=times(t, 2 if i == 1 else 1)) for i, t in enumerate(chosen)]
        recorder.add_again(slower)
    (found,) = search_quality.read(path)
    assert found.second_pass == 5
    lucky = int(np.argmin(found.seen.seconds))
    assert found.judged_s[lucky] == 2 * found.seen.seconds[lucky]
    assert found.share(lucky) < 0.6


def recorder_head(path):
    return replay.read(path)[0]


def times(trial, factor):
    samples = tuple(factor * sample for sample in trial.outcome.samples_s)
    return dataclasses.replace(trial.outcome, median_s=factor * trial.outcome.median_s, samples_s=samples)


def test_after_so_many_trials_the_race_of_the_four_fastest_decides(shape):
    slow, fast = int(np.argmax(shape.seen.seconds)), int(np.argmin(shape.seen.seconds))
    assert search_quality.chosen_after(shape, [slow, fast, slow], seed=0) == [slow, fast, fast]


def test_a_shape_is_judged_by_every_strategy_and_summed_up(shape):
    (other,) = search_quality.read(FEW_ROWS)
    constants = fit(shape.kernel, shape.hardware, [other.seen])
    row, curves = search_quality.judge(MATMUL, shape, constants, seeds=1)
    assert set(curves) == set(row["search"])
    for strategy, (curve,) in curves.items():
        assert len(curve) <= search_quality.TRIALS, strategy
        assert all(0 < share <= 1 for share in curve)
    assert row["search"]["model + GP"]["16"]["median"] >= row["search"]["random"]["16"]["median"]
    assert row["model_first_4"] <= row["model_first_8"] <= row["model_first_16"] <= 1
    assert row["ablations"]["rows are as fast as their bytes"]["tau"] < row["ablations"]["as fitted"]["tau"]
    summary = search_quality.summarise([row])
    assert summary["after16_worst"] == row["search"]["model + GP"]["16"]["median"]
    assert summary["shapes_with_second_pass"] == 0


def test_drawn_and_searched_schedules_are_never_repeated(shape):
    tpe = search_quality.plain_tpe(shape, 3)
    assert len(tpe) == len(set(tpe)) <= search_quality.TRIALS
    footprint = shape.kernel.footprint(shape.seen.problem, shape.seen.schedules, shape.hardware.target)
    predicted = search_quality.CostModel(shape.hardware, Constants()).seconds(footprint)
    candidates = [
        search_quality.Candidate(t.backend, t.schedule, float(p), 0.0)
        for t, p in zip(shape.trials, predicted, strict=True)
    ]
    asked = search_quality.searched(candidates, shape, 3)
    assert len(asked) == len(set(asked)) == search_quality.TRIALS
