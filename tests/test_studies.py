"""Trials as studies of Optuna: what its own tools read of them, and what an export leaves alone."""

import contextlib
import dataclasses
import importlib
import json
import sqlite3
import warnings
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from typer.testing import CliRunner
from values import ENVIRONMENT, KEY, record, trial

from scheduler.cli.app import app
from scheduler.core.errors import StoreError
from scheduler.core.hardware import CPU
from scheduler.core.identity import key_of, point_of
from scheduler.core.records import Failure, Key, Measurement, Trial
from scheduler.inspect import studies
from scheduler.inspect.case import Case
from scheduler.inspect.points import Tried
from scheduler.measure import replay
from scheduler.store.store import Store, shipped
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.one_jax

SWEEPS = Path(__file__).parents[1] / "sweeps" / "nvidia-h200"
# A small one: decoding has no sweep, and this problem has few legal schedules.
SWEEP = SWEEPS / "flash_attention-batch32-q_len512-kv_len512-heads16-kv_heads16-head_dim128.jsonl.gz"
SMALL = MatmulProblem(64, 48, 100, "float32")
SLOWEST = Failure("verify", "max error 1 in row 7")


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def searched(count=6, problem=SMALL):
    """Trials of a problem: the library, schedules of the interpreter, of which the last failed."""
    kernel = MATMUL.kernel("interpret")
    space = kernel.space(problem, CPU.target)
    points, _ = space.legal()
    times = [Measurement(1e-3 - n * 1e-5, (1e-3,), "wall", "warm") for n in range(count)]
    made = [Trial(0, "xla", MATMUL.library.version, {}, times[0], 2e-3)]
    for number in range(1, count):
        outcome = SLOWEST if number == count - 1 else times[number]
        made.append(Trial(number, "interpret", kernel.version, space.encode(points.row(number)), outcome, 1.5e-3))
    return made


def tried(trials, **more):
    key = key_of(MATMUL, SMALL, CPU)
    return Tried(key, trials, ENVIRONMENT, case=Case(MATMUL, SMALL, CPU), **more)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


def only_study(url):
    (name,) = optuna.get_all_study_names(url)
    return optuna.load_study(study_name=name, storage=url)


def write(url, *of, **options):
    return list(studies.write(url, of, **options))


def test_a_trial_is_its_whole_schedule_its_time_and_what_was_predicted(url):
    trials = searched()
    final_s = {point_of(trials[2].backend, trials[2].schedule): 0.5e-3}
    assert write(url, tried(trials, final_s=final_s)) == [studies.Written(str(key_of(MATMUL, SMALL, CPU)), 6, 6)]
    study = only_study(url)
    assert (study.metric_names, study.direction.name) == (["median time in us"], "MINIMIZE")
    space = MATMUL.kernel("interpret").space(SMALL, CPU.target)
    for given, held in zip(trials, study.trials, strict=True):
        whole = space.defaults | given.schedule if given.backend == "interpret" else dict(given.schedule)
        assert {**whole, "backend": given.backend}.items() <= held.params.items()
        assert held.user_attrs["predicted_us"] == pytest.approx(given.predicted_s * 1e6)
        assert held.datetime_complete.isoformat() == "2026-03-01T12:00:00"
    assert study.best_value == pytest.approx(960)
    assert study.trials[2].user_attrs["final_us"] == 500
    assert study.user_attrs["problem"] == str(SMALL)
    assert study.user_attrs["jax"] == ENVIRONMENT.jax


def test_what_failed_is_a_failed_trial_with_its_reason(url):
    write(url, tried(searched()))
    *_, last = only_study(url).trials
    assert (last.state, last.value) == (TrialState.FAIL, None)
    assert (last.user_attrs["failed_stage"], last.user_attrs["failure"]) == ("verify", "max error 1 in row 7")


def test_parameters_have_the_choices_of_the_space_and_those_that_were_tried(url):
    space = MATMUL.kernel("interpret").space(SMALL, CPU.target)
    odd = dataclasses.replace(searched()[1], number=6, schedule={**searched()[1].schedule, "tile_m": 7})
    write(url, tried([*searched(), odd]))
    distributions = only_study(url).trials[1].distributions
    for field, values in space.choices.items():
        offered = {*values, 7} if field == "tile_m" else set(values)
        assert offered == set(held_by(distributions[field])), field
    assert set(held_by(distributions["backend"])) == {"interpret", "xla"}


def held_by(distribution):
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1, distribution.step)
    return distribution.choices


@pytest.mark.parametrize(
    ("values", "distribution"),
    [
        ((64, 128, 192), IntDistribution(64, 192, step=64)),
        ((3, 1, 2), IntDistribution(1, 3)),
        ((4, 1, 2, 8), CategoricalDistribution((1, 2, 4, 8))),
        ((64,), CategoricalDistribution((64,))),
        ((True, False), CategoricalDistribution((True, False))),
        (("n", "m"), CategoricalDistribution(("n", "m"))),
        ((1, True, "1"), CategoricalDistribution(("1", "True"))),
    ],
)
def test_only_evenly_spaced_integers_are_a_range(values, distribution, url):
    schedules = [{"field": value} for value in values]
    trials = [dataclasses.replace(trial(n), schedule=schedule) for n, schedule in enumerate(schedules)]
    write(url, Tried(KEY, trials))
    study = only_study(url)
    assert all(one.distributions["field"] == distribution for one in study.trials)
    shown = [str(one.params["field"]) for one in study.trials]
    assert shown == [str(value) for value in values]


def test_a_field_that_is_named_as_the_kernel_is_keeps_a_name_of_its_own(url):
    write(url, Tried(KEY, [dataclasses.replace(trial(), schedule={"backend": "mine"})]))
    assert only_study(url).trials[0].params == {"backend": "mosaic_gpu", "schedule.backend": "mine"}


def test_a_schedule_of_a_chip_has_its_lower_bound(url):
    run("export", "--optuna", url, "--recording", SWEEP)
    trials = only_study(url).trials
    bounded = [one for one in trials if "lower_bound_us" in one.user_attrs]
    assert bounded
    assert all(0 < one.user_attrs["lower_bound_us"] < one.value for one in bounded)
    assert "mosaic_gpu" in {one.params["backend"] for one in bounded}


def test_a_recorded_sweep_is_a_study_whose_best_is_its_fastest(url):
    head, trials = replay.read(SWEEP)
    said = run("export", "--optuna", url, "--recording", SWEEP)
    assert f", swept: {len(trials)} of {len(trials)} trials" in said
    study = only_study(url)
    fastest = min((t for t in trials if isinstance(t.outcome, Measurement)), key=lambda t: t.outcome.median_s)
    assert study.best_value == pytest.approx(fastest.outcome.median_s * 1e6)
    assert fastest.schedule.items() <= study.best_trial.params.items()
    assert study.user_attrs["trials_of"] == SWEEP.name
    assert study.user_attrs["date"] == head.environment.date
    again = {point_of(t.backend, t.schedule) for t in replay.read_again(SWEEP)}
    assert sum("final_us" in one.user_attrs for one in study.trials) == len(again)


def test_a_search_is_exported_and_again_with_what_came_since(url, tmp_path):
    trials = searched()
    key = key_of(MATMUL, SMALL, CPU)
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        for one in trials[:4]:
            store.add_trial(key, one, ENVIRONMENT)
        assert "4 of 4 trials wrote 1 study" in run("export", "--optuna", url)
        for one in trials[4:]:
            store.add_trial(key, one, ENVIRONMENT)
        assert "2 of 6 trials" in run("export", "--optuna", url)
        assert "all 6 were there" in run("export", "--optuna", url)
        assert len(only_study(url).trials) == 6
        store.put(dataclasses.replace(record(key), entries=record().entries))
    run("export", "--optuna", url)
    assert "times as fast as XLA" in only_study(url).user_attrs["verdict"]


def test_a_study_with_other_trials_is_left_alone_unless_it_is_to_be_replaced(url):
    first, other = tried(searched()), tried(searched()[::-1])
    fresh = Tried(KEY, [trial()])
    write(url, first)
    with pytest.raises(StoreError, match=r"is there with other trials.* nothing was written: say --replace"):
        write(url, fresh, other)
    assert optuna.get_all_study_names(url) == [str(first)]
    assert [one.added for one in write(url, fresh, other, replace=True)] == [1, 6]
    held = optuna.load_study(study_name=str(other), storage=url)
    assert held.trials[0].state is TrialState.FAIL
    assert len(held.trials) == 6


@pytest.mark.parametrize("replace", [False, True])
def test_a_study_of_another_program_is_left_alone(url, replace):
    mine = optuna.create_study(study_name=str(tried([])), storage=url)
    mine.optimize(lambda t: t.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StoreError, match="is there, and not by tile-scheduler"):
        write(url, tried(searched()), replace=replace)
    assert len(only_study(url).trials) == 1


def test_a_database_of_another_program_is_left_alone(tmp_path):
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        store.add_trial(KEY, trial(), ENVIRONMENT)
    said = run("export", "--optuna", f"sqlite:///{tmp_path / 'cache.db'}", status=1)
    assert "is no storage of Optuna but a database of another program" in said
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert not any("studies" in name for name in tables)
    (tmp_path / "notes.txt").write_text("not a database, but long enough to look like one" * 50)
    assert "cannot be read as a database" in run("export", "--optuna", f"sqlite:///{tmp_path}/notes.txt", status=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("study.db", "a file is named so: sqlite:///study.db"),
        ("sqlite://", "is in memory, and gone when this command ends"),
        ("sqlite:///:memory:", "is in memory, and gone when this command ends"),
        ("sqlite:////no/such/place/study.db", "there is no directory /no/such/place"),
        ("nonsense://host/base", "cannot be opened as an Optuna storage"),
        ("postgresql://nobody@127.0.0.1:1/base", "cannot be opened as an Optuna storage"),
    ],
)
def test_what_is_no_place_for_studies_is_said_in_a_sentence(given, said, tmp_path):
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        store.add_trial(KEY, trial(), ENVIRONMENT)
    assert said in run("export", "--optuna", given, status=1)


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["--optuna", "sqlite:///study.db"], "shipped records come without theirs", 1),
        (["out.jsonl", "--optuna", "sqlite:///study.db"], "exclude each other", 2),
        (["--recording", "sweep.jsonl.gz"], "go with --optuna", 2),
        (["--replace"], "go with --optuna", 2),
        (
            ["--optuna", "sqlite:///study.db", "--recording", "nothing.jsonl.gz"],
            "cannot be read as a recorded sweep",
            1,
        ),
        (["--optuna", "sqlite:///s.db", "--recording", SWEEP, "--operation", "matmul"], "none of these recordings", 1),
    ],
)
def test_an_export_of_nothing_and_words_that_do_not_go_together_are_said(arguments, said, status):
    assert said in run("export", *arguments, status=status).replace("\u2502 ", "")


def test_what_nobody_knows_here_is_exported_with_the_choices_that_were_tried(url):
    key = Key("nobody's", "NVIDIA H300", '{"x":1}')
    write(url, Tried(key, [trial(), dataclasses.replace(trial(1), schedule={"tile_m": 64})]))
    study = only_study(url)
    assert held_by(study.trials[0].distributions["tile_m"]) == range(64, 129, 64)
    assert study.study_name == "nobody's x=1 on NVIDIA H300"


def test_shipped_records_have_no_trials_to_export():
    assert not any(shipped().trials(record.key) for record in shipped().records())


# What Optuna's own tools make of it


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('swept') / 'study.db'}"
    run("export", "--optuna", url, "--recording", SWEEP)
    return url


def test_optuna_tells_which_choice_matters(swept):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of so few trials, some choices have one
        importances = optuna.importance.get_param_importances(only_study(swept))
    assert sum(importances.values()) == pytest.approx(1)
    assert max(importances.values()) > 0


@pytest.mark.parametrize("name", ["optimization_history", "slice", "parallel_coordinate", "edf", "param_importances"])
def test_optunas_plots_draw_it(swept, name, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    plot = getattr(importlib.import_module("optuna.visualization.matplotlib"), f"plot_{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental, all of them
        drawn = plot(only_study(swept))
    axes = drawn.flat if hasattr(drawn, "flat") else [drawn]
    assert any(one.has_data() for one in axes)


def test_optunas_dashboard_serves_it(swept):
    import optuna_dashboard

    serve = optuna_dashboard.wsgi(swept)
    (study,) = asked(serve, "/api/studies")["study_summaries"]
    shown = asked(serve, f"/api/studies/{study['study_id']}")
    assert study["study_name"].startswith("flash_attention batch=32 q_len=512")
    assert shown["objective_names"] == ["median time in us"], list(shown)
    assert len(shown["trials"]) == len(replay.read(SWEEP)[1])
    told = {attribute["key"] for attribute in shown["trials"][0]["user_attrs"]}
    assert {"predicted_us", "version"} <= told
    assert b"optuna" in b"".join(serve(request("/dashboard/"), lambda *_: None)).lower()


def asked(serve, path):
    """What the dashboard answers, as a browser gets it."""
    said = []
    body = b"".join(serve(request(path), lambda status, *_: said.append(status)))
    assert said[0].startswith("200"), (said, body)
    return json.loads(body)


def request(path):
    from wsgiref.util import setup_testing_defaults

    environ = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    setup_testing_defaults(environ)
    return environ
