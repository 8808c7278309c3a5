"""Stored winners timed again: which hold, which are no longer the fastest, which cannot be served."""

import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from operations import Double, DoubleLibrary, DoubleProblem
from paced import PACED
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.hardware import CPU
from scheduler.core.records import Entry, Environment, Failure, Measurement, Record, key_of
from scheduler.inspect import provenance
from scheduler.measure.runner import InProcess
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import recheck
from scheduler.search.reverify import reverify
from scheduler.store.store import Store
from search_spaces import Operation
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

PROBLEM = DoubleProblem(n=8)
OLD = Environment("0.9.9", "0.9.9", "", "2025-01-01T00:00:00Z")
OPERATION = f"{Path(__file__).parents[1] / 'paced.py'}:PACED"
WINNER, RUNNER_UP = {"tile": 2, "copy": 3}, {"tile": 4, "copy": 1}


class Told(InProcess):
    """Times by schedule in place of measured ones; what is not among them is slow."""

    def __init__(self, **times_s):
        super().__init__()
        self.times_s, self.order = times_s, []

    def measure(self, task, *, again=False):
        name = "xla" if task.backend == "xla" else f"t{task.schedule['tile']}c{task.schedule['copy']}"
        self.order += [name] * again
        time_s = self.times_s.get(name, 9e-3)
        if isinstance(time_s, Failure):
            return time_s
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")

    def confirm(self, task):
        return None


def entry(backend, schedule, time_s):
    return Entry(backend, 1, schedule, Measurement(time_s, (time_s,), "wall", "warm"), 1e-3)


def record(operation=PACED, problem=PROBLEM, **changed):
    entries = (
        entry("scripted", WINNER, 1e-3),
        entry("scripted", RUNNER_UP, 2e-3),
        entry("xla", {}, 3e-3),
    )
    made = Record(
        key_of(operation, problem, CPU), entries, {"scripted": 1, "xla": 1}, OLD, budget=12, tried=12, space=21
    )
    return dataclasses.replace(made, **changed)


def verdict(runner, operation=PACED, kept=None, **how):
    (found,) = reverify([kept or record()], operation=operation, runner=runner, **how)
    return found


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def test_a_winner_that_is_still_the_fastest_holds():
    found = verdict(Told(t2c3=1.1e-3, t4c1=2e-3, xla=3e-3))
    assert (found.state, found.reason) == ("holds", "")
    assert found.now.median_s == 1.1e-3


@pytest.mark.parametrize(("within", "state"), [(0.03, "holds"), (0.01, "slower")])
def test_a_winner_may_be_behind_by_as_much_as_is_allowed(within, state):
    assert verdict(Told(t2c3=1.02e-3, t4c1=1e-3), within=within).state == state


def test_what_is_faster_now_is_named_with_how_much():
    found = verdict(Told(t2c3=1.2e-3, t4c1=1e-3, xla=3e-3))
    assert found.state == "slower"
    assert found.reason == "runner-up, scripted copy=1 tile=4, is 20% faster"


def test_the_rivals_are_the_entries_the_library_and_the_models_choice_each_once():
    found = verdict(Told())
    model = predict(PACED, PROBLEM, CPU, backends=frozenset({"scripted"}))
    assert [rival.role for rival in found.rivals] == [
        "winner",
        "runner-up",
        "best of its backend",
        "the model's choice",
    ]
    assert found.rivals[-1].schedule == model.schedule
    without_library = record(entries=record().entries[:2])
    assert "library" in [rival.role for rival in verdict(Told(), kept=without_library).rivals]
    same = record(entries=(entry("scripted", dict(model.schedule), 1e-3), *record().entries[1:]))
    assert [rival.role for rival in verdict(Told(), kept=same).rivals][-1] == "best of its backend"


def test_the_models_choice_can_win_and_is_then_in_the_refreshed_record():
    model = predict(PACED, PROBLEM, CPU, backends=frozenset({"scripted"}))
    name = f"t{model.schedule['tile']}c{model.schedule['copy']}"
    found = verdict(Told(**{name: 1e-4}))
    assert found.reason.startswith("the model's choice, ")
    assert found.refreshed.winner.schedule == model.schedule


def test_all_are_timed_in_turns_whose_order_changes():
    runner = Told()
    verdict(runner)
    rounds = [runner.order[i : i + 4] for i in range(0, len(runner.order), 4)]
    assert len({tuple(sorted(names)) for names in rounds}) == 1
    assert len({tuple(names) for names in rounds}) > 1


def test_a_winner_that_no_longer_runs_is_broken_and_the_rest_is_its_new_record():
    found = verdict(Told(t2c3=Failure("compile", "no such instruction"), t4c1=2e-3, xla=3e-3))
    assert (found.state, found.reason) == ("broken", "compile: no such instruction")
    assert found.now is None
    assert found.refreshed.winner.schedule == RUNNER_UP


def test_a_refreshed_record_has_todays_order_times_and_environment_and_keeps_what_was_searched():
    runner = Told(t2c3=1.2e-3, t4c1=1e-3, xla=1.1e-3)
    fresh = verdict(runner).refreshed
    assert [(e.backend, e.measurement.median_s) for e in fresh.entries] == [("scripted", 1e-3), ("xla", 1.1e-3)]
    assert fresh.environment == runner.environment
    assert provenance.stale(record())
    assert not provenance.stale(fresh)
    old = record()
    assert (fresh.key, fresh.versions, fresh.budget, fresh.tried, fresh.space) == (
        old.key,
        old.versions,
        old.budget,
        old.tried,
        old.space,
    )
    assert recheck(PACED, PROBLEM, CPU, fresh) == fresh.winner


def test_a_refreshed_record_says_how_sure_it_is_and_a_tie_goes_to_the_library():
    found = verdict(Told(t2c3=1e-3, t4c1=2e-3, xla=1e-3))
    assert found.state == "holds"
    assert found.refreshed.winner.backend == "xla"
    assert found.refreshed.confidence.rounds > 0


def test_a_winner_that_is_wrong_for_other_inputs_is_broken():
    class Doubted(Told):
        def confirm(self, task):
            return Failure("verify", "with other inputs 1 of 8 is off") if task.schedule == WINNER else None

    found = verdict(Doubted(t2c3=1e-3))
    assert (found.state, found.reason) == ("broken", "verify: with other inputs 1 of 8 is off")


def test_a_record_of_an_older_kernel_is_not_timed_but_to_be_tuned_again():
    class Newer(Double):
        version = 2

    newer = Operation("double", DoubleProblem, (Newer(), DoubleLibrary()))
    runner = Told()
    found = verdict(runner, newer, record(newer))
    assert found.state == "broken"
    assert found.reason == "the scripted kernel is now version 2, and version 1 was measured; tune it again"
    assert (found.rivals, found.refreshed, runner.order) == ((), None, [])


def test_a_schedule_that_is_legal_no_more_is_broken():
    illegal = record(entries=(entry("scripted", {"tile": 3, "copy": 1}, 1e-3), *record().entries[1:]))
    found = verdict(Told(), kept=illegal)
    assert found.state == "broken"
    assert "tile=3 is not among" in found.reason


def test_records_of_other_chips_and_unknown_operations_are_told_apart():
    other = record(key=dataclasses.replace(record().key, hardware="NVIDIA H200 (132 cores, 140 GiB)"))
    found = {
        verdict.record.key: verdict.state for verdict in reverify([record(), other], operation=PACED, runner=Told())
    }
    assert found == {record().key: "holds", other.key: "elsewhere"}
    foreign = record(key=dataclasses.replace(record().key, operation="never_loaded"))
    (unknown,) = reverify([foreign], runner=Told())
    assert unknown.state == "elsewhere"
    assert "no operation 'never_loaded'" in unknown.reason
    assert "--operation file.py:NAME" in unknown.reason


def test_the_command_settles_a_stale_record_on_a_cpu():
    problem = MatmulProblem(32, 32, 32, "float32")
    answer = predict(MATMUL, problem, CPU, backends=frozenset({"interpret"}))
    slow = Measurement(9.0, (9.0,), "wall", "warm")
    stale = Record(
        key_of(MATMUL, problem, CPU),
        (Entry("interpret", 1, answer.schedule, slow, 1e-3), Entry("xla", 1, {}, slow, 1e-3)),
        {kernel.backend: kernel.version for kernel in MATMUL.kernels},
        OLD,
        budget=2,
        tried=2,
        space=17,
    )
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    store.put(stale)
    out, _ = run("verify", "--within", 10000)
    assert "valid" in out
    assert store.get(stale.key) == stale
    (said,) = json.loads(run("verify", "--within", 10000, "--update", "--json", "m=32", "dtype=float32")[0])
    assert (said["state"], said["then_s"]) == ("holds", 9.0)
    assert 0 < said["now_s"] < 1
    assert store.get(stale.key).environment.jax == importlib.metadata.version("jax")
    assert {entry.backend for entry in store.get(stale.key).entries} == {"interpret", "xla"}


def test_the_command_ends_with_status_1_where_a_record_does_not_hold():
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    store.put(record(versions={"scripted": 0, "xla": 1}))
    out, err = run("verify", "--operation", OPERATION, status=1)
    assert "cannot be used" in out
    assert "tune it again" in " ".join(out.split())
    assert "1 of 1 records are no longer valid" in err
    said = json.loads(run("verify", "--operation", OPERATION, "--json", status=1)[0])
    assert [row["state"] for row in said] == ["broken"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["verify"], "no such record is in"),
        (["verify", "m=3"], "no such record is in"),
        (["verify", "--shipped", "--hardware", "A100"], "no such record is shipped"),
        (["verify", "--shipped", "--hardware", "H200", "m=4096", "n=4096", "k=4096"], "records could be timed"),
    ],
)
def test_nothing_to_time_is_a_sentence(arguments, complaint):
    assert complaint in run(*arguments, status=1)[1]
