"""Any sampler of Optuna drives a search, over legal schedules only, and Optuna's own tools read what was tried."""

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import itertools
import json
import sqlite3
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import optuna
import pytest
import values
from failures import failures
from operations import Double, DoubleLibrary, DoubleProblem
from paced import PACED
from test_cli import run
from test_resume import Counted
from test_search import grid, spend
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.errors import SamplerFailed
from scheduler.core.hardware import find
from scheduler.core.records import Failure, Measurement
from scheduler.measure.replay import Replay
from scheduler.search import jobs
from scheduler.search.job_queue import DeviceExecutor
from scheduler.search.samplers import CandidateSpace
from scheduler.search.search import Search
from scheduler.search.task import SAMPLERS, SearchOptions, sampler_of
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation
from search_spaces.matmul import MATMUL, MatmulProblem

RECORDING = Path(__file__).parents[2] / "sweeps" / "nvidia-h200" / "matmul-m512-n512-k512.jsonl.gz"
PROBLEM = MatmulProblem(512, 512, 512)
# GP needs PyTorch, of which the tests install nothing.
TRIED = sorted(set(SAMPLERS) - {"gp"})


@dataclasses.dataclass(frozen=True)
class Candidate:
    backend: str
    schedule: Mapping[str, object]
    predicted_s: float = 1e-3
    floor_s: float = 0.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.db"


@pytest.fixture
def store(path):
    with contextlib.closing(Store(path)) as store:
        yield store


def studies(path):
    """What Optuna itself finds in a cache."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    try:
        return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
    finally:
        storage.remove_session()
        storage.engine.dispose()


@pytest.mark.parametrize("name", TRIED)
def test_each_sampler_proposes_legal_schedules_once_each_and_the_same_for_a_seed(name):
    candidates, seconds = grid(500)
    one, same = (spend(Search(candidates, budget=30, sampler=sampler_of(name, 1), first=[9, 4]), seconds) for _ in "ab")
    assert len(set(one)) == 30
    assert one[:2] == [9, 4]
    assert one == same
    other = spend(Search(candidates, budget=30, sampler=sampler_of(name, 2), first=[9, 4]), seconds)
    assert other != one


@pytest.mark.parametrize("name", TRIED)
def test_each_sampler_searches_several_backends_with_fields_of_every_kind(name):
    one, seconds = grid(120)
    other = [Candidate("triton", {"warps": 1 << (i % 5), "block": (16, 8 << (i % 4)), "cap": None}) for i in range(20)]
    mixed = [
        Candidate("own", {"scale": 0.5 * (1 + i), "cap": i % 3 or None, "backend": "abc"[i % 3]}) for i in range(9)
    ]
    candidates = [*one, *other, *mixed, Candidate("xla", {})]
    seconds = [*seconds, *[3e-4] * 20, *[None] * 9, 0.9e-4]
    order = spend(Search(candidates, budget=len(candidates), sampler=sampler_of(name, 0), first=[149]), seconds)
    assert sorted(order) == list(range(150))
    assert order[0] == 149


FIELDS = {"tile": (16, 32, 64), "order": ("m", "n", "k")}
SMALL = [Candidate("own", {"tile": tile, "order": order}, 1e-4) for tile, order in itertools.product(*FIELDS.values())]
SECONDS = [1e-4 * (1 + index) for index in range(len(SMALL))]


class Own(optuna.samplers.BaseSampler):
    """Proposes the last value of each parameter, and fails after `most` values."""

    def __init__(self, most=1000):
        self.left = iter(range(most))

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):
        if next(self.left, None) is None:
            raise LookupError("nothing is left")
        return FIELDS[param_name][-1]


class Uncopied(Own):
    def __deepcopy__(self, memo):
        raise TypeError("cannot copy it")


def of_optuna(name):
    made = getattr(optuna.samplers, name)
    if name == "GridSampler":
        return made(FIELDS)
    if name == "PartialFixedSampler":
        return made({"tile": 32}, optuna.samplers.TPESampler(seed=0))
    return made(**{"n_startup_trials": 2} if name == "GPSampler" else {})


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_each_sampler_that_optuna_has_searches_or_the_missing_package_is_named_before_a_trial():
    classes = {name: getattr(optuna.samplers, name) for name in optuna.samplers.__all__}
    names = [name for name, one in classes.items() if inspect.isclass(one) and not inspect.isabstract(one)]
    assert {"GridSampler", "BruteForceSampler", "PartialFixedSampler", "GPSampler", "NSGAIIISampler"} <= set(names)

    def check(name):
        if name == "GPSampler" and importlib.util.find_spec("torch") is None:
            for one in (of_optuna(name), optuna.samplers.PartialFixedSampler({}, of_optuna(name))):
                with pytest.raises(ValueError, match="GPSampler needs torch: pip install torch"):
                    sampler_of(one, 0)
            return
        search = Search(SMALL, budget=9, sampler=sampler_of(of_optuna(name), 0), first=[4])
        order = spend(search, SECONDS, in_flight=2)
        assert order[0] == 4
        assert sorted(order) == list(range(9))

    assert failures(check, names) == []


def test_a_grid_is_searched_to_its_end_and_no_further():
    sampler = optuna.samplers.GridSampler({"tile": [16, 32], "order": ["k", "m"]})
    search = Search(SMALL, budget=9, sampler=sampler, first=[4])
    order = spend(search, SECONDS)
    assert sorted(order[1:]) == [0, 2, 3, 5]
    assert search.reason == "the sampler stopped the search"


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (lambda: optuna.samplers.GridSampler({"tile": [16]}), r"order, is not found in the given grid.*order: m, n, k"),
        (lambda: optuna.samplers.GridSampler({**FIELDS, "warps": [4]}), r"warps is not a parameter.*tile: 16 to 64"),
        (lambda: optuna.samplers.GridSampler({**FIELDS, "tile": [16, 999]}), "999 of parameter 'tile' isn't contained"),
        (lambda: optuna.samplers.GridSampler({**FIELDS, "order": ["m", "z"]}), "'z' not in"),
        (lambda: optuna.samplers.PartialFixedSampler({"order": "z"}, Own()), "PartialFixedSampler .*'z' not in"),
        (lambda: Own(0), "sampler Own cannot propose a schedule .LookupError: nothing is left"),
    ],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_sampler_that_cannot_propose_is_refused_before_a_trial_with_the_parameters(sampler, why):
    with pytest.raises(SamplerFailed, match=why):
        Search(SMALL, budget=9, sampler=sampler(), first=[4])
    with pytest.raises(SamplerFailed, match="nothing is left"):
        Search(SMALL, budget=9, sampler=Uncopied(0)).ask()


def test_a_rehearsal_leaves_the_users_sampler_as_it_was():
    own = Own()
    Search(SMALL, budget=9, sampler=own)
    assert next(own.left) == 0


def test_a_sampler_that_fails_in_the_middle_ends_the_search_with_what_was_measured(store):
    runner = Counted()
    with pytest.warns(RuntimeWarning, match="sampler Failing cannot propose .*ends with the trials so far"):
        record = tune(PACED, DoubleProblem(8), budget=12, store=store, runner=runner, sampler=Failing())
    assert len(runner.measured) == record.tried == len(store.trials(record.key)) == 4
    assert store.get(record.key) == record
    assert "KeyError: 'a defect'" in record.stopped


class Failing(optuna.samplers.RandomSampler):
    def after_trial(self, study, trial, state, values):
        if trial.number == 3:
            raise KeyError("a defect")


def test_tpe_finds_more_than_chance_on_a_model_that_tells_little():
    candidates, seconds = grid(1000)
    shares = {
        name: np.mean(
            [
                min(seconds) / min(seconds[i] for i in spend(Search(candidates, budget=40, sampler=each), seconds))
                for each in (sampler_of(name, seed) for seed in range(8))
            ]
        )
        for name in ("tpe", "random")
    }
    assert shares["tpe"] > shares["random"]


def test_a_proposal_becomes_the_nearest_legal_schedule_that_was_not_tried():
    space = CandidateSpace(
        [Candidate("a", {"tile": tile, "order": order}) for tile in (16, 32, 128) for order in "mn"]
        + [Candidate("b", {"tile": 64, "warps": 4}), Candidate("xla", {})]
    )
    asked = {"backend": "a", "tile": 60, "order": "n", "warps": 4}
    tried = []
    for _ in range(8):
        tried.append(space.nearest(asked))
        space.free[tried[-1]] = False
    # 128 and 32 lie 1.09 and 0.91 doublings away; a different order counts more than that; other backends come last.
    assert tried[:6] == [3, 5, 1, 2, 4, 0]
    assert set(tried[6:]) == {6, 7}


def test_a_name_a_class_a_function_and_an_object_are_samplers_and_all_else_is_refused(monkeypatch):
    module = types.ModuleType("own_samplers")
    module.Tpe = optuna.samplers.TPESampler
    module.made = lambda seed: optuna.samplers.RandomSampler(seed=seed)
    module.ready = optuna.samplers.RandomSampler()
    module.wrong = lambda seed: 7
    module.Grid, module.seedless = optuna.samplers.GridSampler, lambda: module.ready
    monkeypatch.setitem(sys.modules, "own_samplers", module)
    assert sampler_of("model", 0) is None
    assert isinstance(sampler_of("own_samplers:Tpe", 0), optuna.samplers.TPESampler)
    assert isinstance(sampler_of("own_samplers:made", 0), optuna.samplers.RandomSampler)
    assert sampler_of("own_samplers:ready", 0) is sampler_of("own_samplers:seedless", 0) is module.ready
    for named, why in [
        ("tpee", "use model, tpe, gp, cmaes, nsgaii, qmc, random, or module:NAME"),
        ("own_samplers:wrong", "must be or return an Optuna sampler, found int"),
        ("own_samplers:Grid", "with the seed alone makes no sampler: TypeError: .*'search_space'"),
        ("own_samplers:nothing", "cannot be loaded"),
        ("no_such_module:NAME", "cannot be loaded"),
    ]:
        with pytest.raises(ValueError, match=why):
            sampler_of(named, 0)
    with pytest.raises(TypeError, match="sampler must be an Optuna sampler"):
        sampler_of(7, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torch"):
        sampler_of("gp", 0)


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "qmc", optuna.samplers.TPESampler(seed=3, multivariate=False)])
def test_tune_searches_a_recording_by_any_sampler_and_optuna_reads_the_trials(store, path, sampler):
    record = tune(MATMUL, PROBLEM, runner=Replay(RECORDING), budget=24, store=store, sampler=sampler)
    assert record.tried == 24
    tried = store.trials(record.key)
    (study,) = studies(path)
    assert len(study.trials) == len(tried) == 24
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert study.metric_names == ["median time in us"]
    assert study.user_attrs["operation"] == "matmul"
    assert study.user_attrs["hardware"] == find("NVIDIA H200").id
    for shown, trial in zip(study.trials, tried, strict=True):
        assert shown.params["backend"] == trial.backend
        assert {**shown.params, **trial.schedule} == shown.params  # fields at their defaults are shown, too
        assert shown.user_attrs["predicted_us"] == pytest.approx(1e6 * trial.predicted_s, abs=1e-3)
        assert shown.value == pytest.approx(1e6 * trial.outcome.median_s, abs=1e-3)
    fastest = min(tried, key=lambda trial: trial.outcome.median_s)
    assert study.best_trial.params["backend"] == fastest.backend


def test_the_command_line_searches_by_three_samplers_and_stores_what_it_tried(path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(path))
    for name in ("tpe", "random", "nsgaii"):
        run("replay", RECORDING, "--store", "--sampler", name, "--budget", 12)
    assert [len(study.trials) for study in studies(path)] == [12, 12, 12]
    refused = CliRunner().invoke(app, ["replay", str(RECORDING), "--sampler", "tpee"])
    assert refused.exit_code == 2
    assert "use model, tpe" in " ".join(refused.output.split())


def test_a_job_searches_by_the_sampler_that_it_is_given(store):
    job = jobs.parse(
        'operation = "matmul"\nbudget = "quick"\n[fields]\nk = 512\n[[problem]]\nm = 512\nn = 512\n'
        "[[problem]]\nm = 512\nn = 512\nbudget = 12\n",
        options=SearchOptions(sampler="random"),
    )
    assert [task.options.budget for task in job] == [8, 12]
    (result, *_) = jobs.run(job[:1], [DeviceExecutor.of(Replay(RECORDING))], store=store)
    assert result.record.tried == 8


def test_a_budget_is_a_number_or_a_word():
    assert [SearchOptions(budget).budget for budget in ("quick", "default", "full", 5)] == [8, 64, 4096, 5]
    assert SearchOptions("default") == SearchOptions()
    with pytest.raises(TypeError, match="or quick, default, full"):
        SearchOptions("much")


def test_a_full_search_ends_where_nothing_improves(store):
    record = tune(MATMUL, PROBLEM, runner=Replay(RECORDING), budget="full", store=store)
    assert 64 < record.tried < record.space
    assert "brought nothing" in record.stopped or "nothing untried can beat" in record.stopped


class Behaving(Double):
    def space(self, problem, target):
        return dataclasses.replace(
            super().space(problem, target), choices={"tile": (1, 2, 4, 8), "behave": ("ok", "wrong")}
        )


def test_what_failed_is_a_failed_trial_with_its_reason(store, path):
    operation = Operation("double", DoubleProblem, (Behaving(), DoubleLibrary()))
    record = tune(operation, DoubleProblem(n=8), budget=64, store=store)
    (study,) = studies(path)
    outcomes = [trial.outcome for trial in store.trials(record.key)]
    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE" if isinstance(outcome, Measurement) else "FAIL" for outcome in outcomes
    ]
    assert [trial.user_attrs.get("failure") for trial in study.trials] == [
        str(outcome) if isinstance(outcome, Failure) else None for outcome in outcomes
    ]
    assert study.trials[0].params["backend"] == "xla"


def test_a_trial_that_was_refuted_has_failed_and_has_no_value(store, path):
    for number in range(2):
        store.save_trials(values.KEY, [values.trial(number)], values.ENVIRONMENT)
    refuted = dataclasses.replace(values.trial(1), outcome=Failure("verify", "off by 3"))
    store.save_trials(values.KEY, [refuted], values.ENVIRONMENT)
    assert store.trials(values.KEY) == [values.trial(0), refuted]
    (study,) = studies(path)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]
    assert [trial.value is None for trial in study.trials] == [False, True]
    assert study.trials[1].user_attrs["failure"] == "verify: off by 3"


def test_each_search_is_a_study_and_forgetting_deletes_them(store, path):
    for _ in range(2):
        store.save_trials(values.KEY, [values.trial()], values.ENVIRONMENT)
        store.finish(values.KEY)
    assert len(studies(path)) == 2
    assert store.forget(values.KEY) == 2
    assert (studies(path), store.trials(values.KEY), store.keys()) == ([], [], [])


@pytest.mark.parametrize("again", [False, True], ids=["in this process", "in the next"])
def test_a_search_goes_on_though_a_dashboard_deleted_its_study(store, path, again):
    store.save_trials(values.KEY, [values.trial(0)], values.ENVIRONMENT)
    (study,) = studies(path)
    optuna.delete_study(study_name=study.study_name, storage=f"sqlite:///{path}")
    with contextlib.closing(Store(path)) as other:
        (other if again else store).save_trials(values.KEY, [values.trial(1)], values.ENVIRONMENT)
    assert store.trials(values.KEY) == [values.trial(1)]


def test_a_search_whose_kernel_changed_while_it_was_cut_short_goes_on_in_a_study_of_its_own(store, path):
    def described(orders):
        return lambda _: ({"order": orders[0]}, {"order": optuna.distributions.CategoricalDistribution([*orders])})

    for number, orders in enumerate(["mn", "mn", "mnk"]):
        store.save_trials(values.KEY, [values.trial(number)], values.ENVIRONMENT, described(orders))
    assert [len(study.trials) for study in studies(path)] == [2, 1]
    assert store.trials(values.KEY, unfinished=True) == [values.trial(number) for number in range(3)]


def test_optunas_dashboard_opens_the_cache_as_it_is(store, path):
    import optuna_dashboard

    record = tune(MATMUL, PROBLEM, runner=Replay(RECORDING), budget=8, store=store)
    serve = optuna_dashboard.wsgi(f"sqlite:///{path}")

    def get(place):
        request = {"REQUEST_METHOD": "GET", "PATH_INFO": place, "QUERY_STRING": "", "wsgi.input": io.BytesIO()}
        return json.loads(b"".join(serve(request, lambda *_: None)))

    (summary,) = get("/api/studies")["study_summaries"]
    assert summary["study_name"].startswith(str(record.key))
    shown = get(f"/api/studies/{summary['study_id']}")
    assert len(shown["trials"]) == 8
    assert {parameter["name"] for parameter in shown["trials"][-1]["params"]} > {"backend", "tile_m", "stages"}


def test_reading_trials_imports_no_optuna(path):
    with contextlib.closing(Store(path)) as store:
        store.save_trials(values.KEY, [values.trial()], values.ENVIRONMENT)
    program = (
        "import sys; from scheduler.store.store import Store; "
        f"found = Store({str(path)!r}).unfinished(); assert len(found) == 1; sys.exit('optuna' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_file_without_a_search_has_no_table_of_optuna(path):
    with contextlib.closing(Store(path)) as store:
        store.put(values.record())
        assert store.trials(values.KEY) == []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert "searches" in tables
    assert "studies" not in tables
