"""Sweeps into a file, and searches of that file in place of a device."""

import contextlib
import dataclasses
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import invented
import jax
import jax.numpy as jnp
import pytest
import strategies
from failures import failures
from hypothesis import given
from operations import DOUBLE, Double, DoubleLibrary, DoubleProblem
from paced import PACED
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core import codec
from scheduler.core.errors import NotRecorded, RecordingError
from scheduler.core.hardware import CPU, find, swept
from scheduler.core.records import Failure, Measurement, key_of, schedule_to_text
from scheduler.measure.replay import Recorder, Replay, read, read_again
from scheduler.measure.runner import InProcess, Task
from scheduler.search.sweep import file_name, sweep
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, Phase, load
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.operation import ROWS_ALONG

ROOT = Path(__file__).parents[2]
PROBLEM = DoubleProblem(n=8)
PACED_NAME = f"{Path(__file__).parents[1] / 'paced.py'}:PACED"
SMALL = ["m=32", "n=32", "k=32", "dtype=float32"]


class Scripted(InProcess):
    """Told times in place of measured ones: the larger the tile the faster, `wrong` ones fail."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def measure(self, task, *, again=False):
        self.asked += 1
        if task.schedule.get("behave") in ("wrong", "exit"):
            return Failure("verify", "8 of 8 elements are off")
        time_s = 1e-3 / task.schedule.get("tile", 4)
        samples = tuple(time_s * (1 + 0.01 * i) for i in range(task.repetitions))
        return Measurement(sorted(samples)[len(samples) // 2], samples, "wall", "warm")


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "double.jsonl.gz"
    head, trials = sweep(DOUBLE, PROBLEM, path, Scripted())
    return path, head, trials


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def choice(trial):
    return trial.backend, *sorted(trial.schedule.items())


def test_a_sweep_holds_every_legal_schedule_once_with_every_repetition_or_its_failure(recorded):
    path, head, trials = recorded
    assert read(path) == (head, trials)
    assert len(trials) == head.legal == head.space - sum(head.dropped.values()) == 21
    assert len({choice(trial) for trial in trials}) == 21
    assert trials[0].backend == "xla"
    measured = [trial.outcome for trial in trials if isinstance(trial.outcome, Measurement)]
    assert all(len(outcome.samples_s) == 5 for outcome in measured)
    assert len(measured) == 13


def test_the_head_says_what_was_swept_where_and_with_what(recorded):
    _, head, _ = recorded
    assert (head.operation, head.problem, head.sample) == ("double", PROBLEM.canonical(), None)
    assert (head.platform, head.kind, head.architecture, head.cores) == ("cpu", "cpu", "cpu", 1)
    assert head.versions == {"scripted": 1, "xla": 1}
    assert head.environment.jax == InProcess().environment.jax


def test_what_is_dropped_and_refused_is_counted(tmp_path):
    head, _ = sweep(MATMUL, MatmulProblem(32, 32, 32, "float32"), tmp_path / "a.gz", InProcess(), sample=1)
    assert head.space == head.legal + sum(head.dropped.values())
    assert "Hopper" in head.refused["mosaic_gpu"]


def test_a_sample_is_stated_and_the_same_for_the_same_seed(tmp_path):
    def drawn(name, **how):
        head, trials = sweep(DOUBLE, PROBLEM, tmp_path / name, Scripted(), **how)
        return head, [choice(trial) for trial in trials]

    head, first = drawn("a", sample=6, seed=1)
    assert (head.sample, head.seed, len(first)) == (6, 1, 7)
    assert drawn("b", sample=6, seed=1)[1] == first
    assert drawn("c", sample=6, seed=2)[1] != first
    assert drawn("d", sample=99)[0].sample is None


def test_the_model_does_not_change_a_sample(tmp_path):
    class Other(Double):
        def footprint(self, problem, schedules, target):
            footprint = super().footprint(problem, schedules, target)
            return dataclasses.replace(footprint, step=Phase(footprint.step.loads, 1e9 / schedules.tile**3))

    other = Operation("double", DoubleProblem, (Other(), DoubleLibrary()))
    samples = [
        [choice(t) for t in sweep(op, PROBLEM, tmp_path / str(i), Scripted(), sample=6)[1]]
        for i, op in enumerate((DOUBLE, other))
    ]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_sweep_that_ended_anywhere_goes_on_from_there(recorded, cut):
    path, _, trials = recorded
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - len(whole) * cut // 100])
    left = len(read(path)[1])
    assert (left == len(trials)) == (cut < 40)
    runner, seen = Scripted(), []
    _, again = sweep(DOUBLE, PROBLEM, path, runner, progress=seen.append)
    assert runner.asked == len(trials) - left
    assert again[:left] == trials[:left]
    assert read(path)[1] == again
    assert sorted(map(choice, again)) == sorted(map(choice, trials))
    assert [step.done for step in seen] == list(range(left, len(trials) + 1))


def test_a_second_pass_measures_the_fastest_in_turns_and_is_read_apart(tmp_path):
    path, order = tmp_path / "a.gz", []

    class Watched(Scripted):
        def measure(self, task, *, again=False):
            if again:
                order.append(schedule_to_text(task.schedule))
            return super().measure(task, again=again)

    head, trials = sweep(DOUBLE, PROBLEM, path, Watched(), again=3)
    again = read_again(path)
    assert read(path) == (head, trials), "the first pass is as it would be without a second"
    times = sorted(t.outcome.median_s for t in trials if t.schedule and isinstance(t.outcome, Measurement))
    assert [trial.backend for trial in again] == ["xla", "scripted", "scripted", "scripted"]
    assert sorted(trial.outcome.median_s for trial in again[1:]) == times[:3]
    assert all(len(trial.outcome.samples_s) == head.rounds * head.repetitions for trial in again)
    assert len(order) == 4 * head.rounds
    rounds = [sorted(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(one == rounds[0] for one in rounds), "each is measured once in each round"
    assert Replay(path).measure(Task(DOUBLE, PROBLEM, "xla", {}, 3)) == trials[0].outcome


@pytest.mark.parametrize("cut", [1, 60])
def test_a_second_pass_that_was_cut_short_is_made_again(tmp_path, cut):
    path = tmp_path / "a.gz"
    sweep(DOUBLE, PROBLEM, path, Scripted(), again=3)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    assert json.loads(lines[0])["format"] == 2
    path.write_bytes(gzip.compress(b"".join(lines[:-1])[:-cut]))
    assert read_again(path) == []
    runner = Scripted()
    _, trials = sweep(DOUBLE, PROBLEM, path, runner, again=3)
    assert len(read_again(path)) == 4
    assert 0 < runner.asked <= 4 * 10 + 1
    again = Scripted()
    sweep(DOUBLE, PROBLEM, path, again, again=3)
    assert again.asked == 0
    assert read(path)[1] == trials


def test_a_recording_without_a_second_pass_gets_one_from_the_same_command(recorded):
    path, head, trials = recorded
    assert read_again(path) == []
    runner = Scripted()
    later, _ = sweep(DOUBLE, PROBLEM, path, runner, again=2)
    assert runner.asked == 3 * later.rounds
    assert len(read_again(path)) == 3
    assert read(path) == (dataclasses.replace(head, again=2, rounds=later.rounds), trials)
    second, asked = read_again(path), runner.asked
    largest, _ = sweep(DOUBLE, PROBLEM, path, runner, again=4)
    assert (largest.again, runner.asked, read_again(path)) == (2, asked, second), "it keeps the one that it has"


@pytest.mark.slow
def test_a_killed_sweep_loses_what_was_running_and_no_more(tmp_path):
    path = tmp_path / "paced.jsonl.gz"
    command = ["sweep", PACED_NAME, "n=8", "--out", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def recorded():
        with contextlib.suppress(RecordingError):  # there is no file yet, or an empty one
            return len(read(path)[1])
        return 0

    while process.poll() is None and recorded() < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    _, before = read(path)
    assert 4 <= len(before) < 21
    out, _ = run(*command)
    assert "all, measured 5 times" in out
    head, after = read(path)
    assert after[: len(before)] == before
    assert len({choice(trial) for trial in after}) == len(after) == head.legal == 21


def test_a_file_of_another_sweep_is_never_overwritten(recorded):
    path, *_ = recorded
    before = path.read_bytes()
    with pytest.raises(RecordingError, match=r"another sweep \(repetitions 5 instead of 7\); delete the file"):
        sweep(DOUBLE, PROBLEM, path, Scripted(), repetitions=7)
    with pytest.raises(RecordingError, match="problem"):
        sweep(DOUBLE, DoubleProblem(n=16), path, Scripted())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"no gzip", "cannot be read as a recorded sweep"),
        (b"", "it is empty"),
        (gzip.compress(b"{}\n", mtime=0), "line 1: format is missing"),
        (gzip.compress(b'{"format": 9}\n', mtime=0), "line 1: this version reads format 1 or 2, found format 9"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_place(tmp_path, content, complaint):
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(RecordingError, match=complaint):
        Replay(tmp_path / "a.gz")
    with pytest.raises(RecordingError, match=r"not-there.*No such file"):
        Replay(tmp_path / "not-there")


def test_a_malformed_trial_is_refused_with_its_line(recorded):
    path, *_ = recorded
    lines = gzip.decompress(path.read_bytes()).splitlines()
    wrong = b'{"number": 1.5, "failure": {"stage": "time", "detail": ""}}'
    path.write_bytes(gzip.compress(b"\n".join([*lines[:3], wrong, *lines[3:], b""])))
    with pytest.raises(RecordingError, match="line 4: number: an integer"):
        read(path)


@given(head=strategies.sweeps, trial=strategies.trials)
def test_any_sweep_and_trial_survive_the_file(tmp_path_factory, head, trial):
    path = tmp_path_factory.mktemp("sweep") / "a.gz"
    with Recorder(path, head) as recorder:
        recorder.add(trial)
    assert read(path) == (head, [trial])
    assert codec.sweep_from_text(codec.sweep_to_text(head)) == head


def test_a_search_of_a_recording_finds_what_a_search_of_the_device_finds(recorded):
    path, *_ = recorded
    on_device = tune(DOUBLE, PROBLEM, budget=64, runner=Scripted())
    replayed = tune(DOUBLE, PROBLEM, budget=64, runner=Replay(path))
    assert replayed.key == on_device.key == key_of(DOUBLE, PROBLEM, CPU)
    assert replayed.winner.schedule == on_device.winner.schedule
    assert replayed.tried == on_device.tried == 21
    assert replayed.environment == read(path)[0].environment


def test_a_recording_of_another_chip_is_searched_where_there_is_none(tmp_path):
    class OnH200(Scripted):
        def __init__(self):
            super().__init__()
            self.hardware = find("NVIDIA H200")

        def measure(self, task, *, again=False):
            time_s = 1e-3 if task.backend == "xla" else 1e-1 / task.schedule["tile_m"]
            return Measurement(time_s, (time_s,), "cupti", "cold")

    path, problem = tmp_path / "h200.gz", MatmulProblem(4096, 4096, 4096)
    _, trials = sweep(MATMUL, problem, path, OnH200(), sample=60)
    replay = Replay(path)
    assert replay.hardware == find("NVIDIA H200")
    record = tune(MATMUL, problem, budget=20, runner=replay)
    assert record.key.hardware == find("NVIDIA H200").id
    assert record.winner.measurement.median_s == min(trial.outcome.median_s for trial in trials)


def test_a_kept_sweep_is_whole_and_searched():
    def check(path):
        replay = Replay(path)
        head, trials = read(path)
        assert len(trials) == (head.legal if head.sample is None else head.sample + 1)
        operation = load(head.operation)
        record = tune(operation, operation.problem.from_canonical(head.problem), budget=12, runner=replay)
        assert record.tried == 12 or re.fullmatch(r"all \d+ candidates were tried", record.stopped)
        assert record.environment == head.environment

    assert failures(check, sorted((ROOT / "sweeps").glob("*/*.jsonl.gz")), lambda path: path.name) == []


def test_a_search_ends_where_nothing_more_is_to_be_found_and_its_record_says_so(tmp_path):
    replay = Replay(invented.recording(tmp_path / "a.jsonl.gz", (2048, 5120, 5120), sample=400))
    record = tune(MATMUL, MatmulProblem(2048, 5120, 5120), budget=200, runner=replay)
    assert record.tried < 100
    assert record.stopped.startswith("the last 64 trials brought nothing")
    assert record.excluded > 0, "what cannot beat the fastest by its lower bound"
    best_s = min(t.outcome.median_s for t in read(replay.path)[1] if isinstance(t.outcome, Measurement))
    assert record.winner.measurement.median_s <= 1.01 * best_s
    assert codec.record_from_text(codec.record_to_text(record)) == record


def test_the_kept_sweeps_are_small():
    assert sum(path.stat().st_size for path in (ROOT / "sweeps").rglob("*.gz")) < 10e6


def test_the_same_replay_gives_the_same_search(recorded):
    path, *_ = recorded
    tried = []
    for _ in range(2):
        store = Store(":memory:")
        record = tune(DOUBLE, PROBLEM, budget=9, seed=3, store=store, runner=Replay(path, seed=5))
        tried.append((record, store.trials(record.key)))
    assert tried[0] == tried[1]


def test_only_what_was_recorded_is_searched(tmp_path):
    path = tmp_path / "a.gz"
    sweep(DOUBLE, PROBLEM, path, Scripted(), sample=6)
    store = Store(":memory:")
    record = tune(DOUBLE, PROBLEM, budget=64, store=store, runner=Replay(path))
    assert record.tried == 7
    assert {choice(trial) for trial in store.trials(record.key)} == {choice(trial) for trial in read(path)[1]}


def test_recorded_samples_are_given_as_they_are_or_drawn_from_with_a_seed(recorded):
    path, _, trials = recorded
    told = trials[0].outcome
    task = Task(DOUBLE, PROBLEM, "xla", {}, 3)
    assert Replay(path).measure(task) == told
    answers = [[replay.measure(task) for _ in range(4)] for replay in (Replay(path, seed=7), Replay(path, seed=7))]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1
    for answer in answers[0]:
        assert len(answer.samples_s) == 3
        assert set(answer.samples_s) <= set(told.samples_s)
        assert answer.median_s == sorted(answer.samples_s)[1]
    failed = next(trial for trial in trials if isinstance(trial.outcome, Failure))
    asked = Task(DOUBLE, PROBLEM, failed.backend, failed.schedule, 3)
    assert Replay(path, seed=7).measure(asked) == failed.outcome


def test_what_is_not_in_a_recording_is_an_error_that_names_it(recorded):
    path, *_ = recorded
    with pytest.raises(NotRecorded, match=r"does not contain the schedule scripted behave=ok tile=16$"):
        Replay(path).measure(Task(DOUBLE, PROBLEM, "scripted", {"tile": 16, "behave": "ok"}, 3))
    with pytest.raises(NotRecorded, match="records double n=8, not double n=16"):
        Replay(path).measure(Task(DOUBLE, DoubleProblem(n=16), "xla", {}, 3))
    assert issubclass(NotRecorded, LookupError)


def test_a_recording_of_an_older_kernel_is_searched_and_its_record_says_so(recorded):
    class Newer(Double):
        version = 2

    path, *_ = recorded
    newer = Operation("double", DoubleProblem, (Newer(), DoubleLibrary()))
    record = tune(newer, PROBLEM, budget=5, runner=Replay(path))
    assert record.versions == {"xla": 1, "scripted": 1}
    assert all(entry.version == 1 for entry in record.entries)


def test_python_searches_a_recording_and_stores_nothing_unless_asked(recorded):
    path, *_ = recorded
    replay = Replay(path)
    record = scheduler.tune(DOUBLE, replay.fields, budget=5, runner=replay)
    user = Store(os.environ["TILE_SCHEDULER_CACHE"])
    assert (user.get(record.key), user.trials(record.key)) == (None, [])
    scheduler.tune(DOUBLE, replay.fields, budget=5, runner=replay, store=user)
    assert user.get(record.key) == record


def test_the_command_line_takes_the_problem_from_the_recording_and_stores_only_on_request(tmp_path):
    path = tmp_path / "small.jsonl.gz"
    out, _ = run("sweep", "matmul", *SMALL, "--sample", 4, "--repetitions", 2, "--out", path)
    told = " ".join(out.split())
    assert "4 drawn with seed 0, and the library, measured 2 times each" in told
    assert f"Written to {path}" in told
    user = Store(os.environ["TILE_SCHEDULER_CACHE"])
    out, _ = run("replay", path, "--budget", 3)
    assert "m=32" in out
    assert "3 trials of" in out
    assert "Not stored: the store is in memory" in out
    assert user.keys() == []
    said = json.loads(run("replay", path, "--budget", 3, "--json", "--store")[0])
    assert said["record"]["tried"] == 3
    assert [key.operation for key in user.keys()] == ["matmul"]  # noqa: SIM118 (no mapping)


def test_a_job_is_swept_into_a_file_for_each_problem(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(f'operation="{PACED_NAME}"\n[[problem]]\nn=8\n[[problem]]\nn=4\n[[problem]]\nq=1\n')
    _, err = run("sweep", "--job", job, "--out", tmp_path / "sweeps", "--sample", 2, "--own", PACED_NAME, status=1)
    assert "no field 'q'" in err
    assert "1 of 3 problems" in err
    names = [file_name(PACED, DoubleProblem(n)) for n in (4, 8)]
    assert (
        sorted(path.name for path in (tmp_path / "sweeps").iterdir())
        == names
        == ["paced-n4.jsonl.gz", "paced-n8.jsonl.gz"]
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["sweep", "--out", "x"], "an operation with its fields"),
        (["sweep", "matmul", *SMALL], "--out"),
    ],
)
def test_wrong_words_are_told_with_the_right_ones(arguments, complaint):
    assert complaint in " ".join(run(*arguments, status=2)[1].split())


def test_a_replay_of_nothing_is_a_sentence():
    assert "not-there" in run("replay", "not-there", status=1)[1]


def test_the_files_of_sweeps_that_were_begun_are_found_under_the_same_names():
    assert file_name(MATMUL, MatmulProblem(1, 4096, 14336)) == "matmul-m1-n4096-k14336.jsonl.gz"
    assert (ROOT / "sweeps" / "nvidia-h200" / file_name(MATMUL, MatmulProblem(1, 4096, 14336))).exists()


def test_the_files_of_long_problems_have_short_names_of_their_own():
    rows = [jax.ShapeDtypeStruct((8, 64 + n, 128), jnp.float32) for n in range(2)]
    names = {file_name(ROWS_ALONG, scheduler.rows(lambda x: jax.nn.softmax(x), axis=1).problem(x)) for x in rows}
    assert len(names) == 2
    assert max(map(len, names)) < 200


def test_every_shipped_sweep_holds_schedules_of_todays_spaces():
    paths = sorted(ROOT.glob("sweeps/*/*.jsonl.gz"))
    assert paths
    for path in paths:
        head, trials = read(path)
        operation = load(head.operation)
        problem, target = operation.problem.from_canonical(head.problem), swept(head).target
        spaces = {backend: operation.kernel(backend).space(problem, target) for backend in {t.backend for t in trials}}
        assert head.refused.keys() <= set(operation.backends)
        assert len(trials) > 2
        runner = Replay(path)
        for trial in (*trials, *read_again(path)):
            space = spaces[trial.backend]
            assert space.encode(dataclasses.asdict(space.decode(trial.schedule))) == trial.schedule, path
            assert runner.version(trial.backend, trial.schedule) == trial.version


def test_a_recording_without_a_trial_is_one_sentence(tmp_path):
    whole = ROOT / "sweeps" / "nvidia-h200" / "matmul-m4096-n4096-k4096.jsonl.gz"
    head = tmp_path / "head.jsonl.gz"
    head.write_bytes(gzip.compress(gzip.decompress(whole.read_bytes()).partition(b"\n")[0] + b"\n"))
    ended = CliRunner().invoke(app, ["replay", str(head), "--budget", "4"])
    assert ended.exit_code == 1, ended.output
    assert isinstance(ended.exception, SystemExit)
    assert ended.stderr.splitlines()[-1].strip()
    assert "Traceback" not in ended.output
