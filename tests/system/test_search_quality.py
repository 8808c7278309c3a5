"""The benchmark of the search judges what it says it judges."""

import dataclasses
import sys
from pathlib import Path

import invented
import numpy as np
import pytest

from scheduler.measure import replay
from scheduler.model.cost import Constants

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import search_quality

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.jsonl.gz"
    (found,) = search_quality.read(invented.recording(path, (1024, 1024, 2048), sample=150))
    return found


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("few") / "few.jsonl.gz"
    return invented.recording(path, (16, 8192, 8192), sample=60)


def test_without_a_second_pass_the_only_one_judges_and_the_row_says_so(shape):
    assert shape.second_pass == 0
    assert np.array_equal(shape.judged_s, shape.seen.seconds)
    assert search_quality.split_ceiling(shape) <= 1


def test_a_second_pass_judges_and_whoever_was_lucky_in_the_first_loses_by_it(few_rows, tmp_path):
    head, trials = replay.read(few_rows)
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
    row, curves = search_quality.judge(shape, seeds=1)
    assert set(curves) == set(row["search"])
    for strategy, (curve,) in curves.items():
        assert len(curve) <= search_quality.TRIALS, strategy
        assert all(0 < share <= 1 for share in curve)
    assert row["search"]["search"]["16"]["median"] >= row["search"]["random"]["16"]["median"]
    assert row["model_first_4"] <= row["model_first_8"] <= row["model_first_16"] <= 1
    assert row["ablations"]["TMA rows are as fast as their bytes"]["tau"] < row["ablations"]["as it is"]["tau"]
    summary = search_quality.summarise([row])
    assert summary["after16_worst"] == row["search"]["search"]["16"]["median"]
    assert summary["shapes_with_second_pass"] == 0


def test_drawn_and_searched_schedules_are_never_repeated(shape):
    for name in ("tpe", "cmaes"):
        proposed = search_quality.proposed(shape, name, 3)
        assert len(proposed) == len(set(proposed)) == search_quality.TRIALS
    footprint = shape.kernel.footprint(shape.seen.problem, shape.seen.schedules, shape.hardware.target)
    predicted = search_quality.CostModel(shape.hardware, Constants()).seconds(footprint)
    asked = search_quality.searched(shape, predicted, np.zeros_like(predicted), 3)
    assert len(asked) == len(set(asked)) == search_quality.TRIALS


def test_a_recording_of_another_version_of_the_kernel_is_left_out_by_name(few_rows, tmp_path, capsys):
    head, trials = replay.read(few_rows)
    path = tmp_path / "old.jsonl.gz"
    versions = {backend: version - (backend == "mosaic_gpu") for backend, version in head.versions.items()}
    with replay.Recorder(path, dataclasses.replace(head, versions=versions)) as recorder:
        for trial in trials:
            recorder.add(dataclasses.replace(trial, version=versions[trial.backend]))
    assert list(search_quality.read(path)) == []
    version, said = head.versions["mosaic_gpu"], capsys.readouterr().out
    assert f"left out, recorded with version {version - 1} of mosaic_gpu, today's is {version}" in said
    with pytest.raises(SystemExit, match="tile-scheduler sweep --job"):
        search_quality.main([str(path)])
