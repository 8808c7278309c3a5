"""A job that several processes run, and the devices that a command line spreads it over."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import run

import scheduler
from scheduler.measure.gpu import Gpu
from scheduler.search import jobs
from scheduler.store.store import Store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACED = f"{Path(__file__).parents[1] / 'paced.py'}:PACED"
BUDGET = 12


@pytest.fixture
def store(_own_cache):
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    yield store
    store.close()


@pytest.fixture
def job(tmp_path):
    """Three products that take a moment on a CPU."""
    file = tmp_path / "job.toml"
    problems = "".join(f"[[problem]]\nm = {m}\n" for m in (8, 32, 16))
    file.write_text(f'operation = "matmul"\nbudget = 2\n[fields]\nn = 8\nk = 8\ndtype = "float32"\n{problems}')
    return file


def owners(store):
    """Who tunes something now."""
    try:
        with sqlite3.connect(store.location, timeout=30) as connection:
            return {owner.rpartition(".")[0] for (owner,) in connection.execute("SELECT owner FROM leases")}
    except sqlite3.OperationalError:  # there is no table yet
        return set()


def test_processes_that_share_a_job_tune_each_problem_once_though_one_is_killed(store, tmp_path):
    problems = "".join(f"[[problem]]\nn = {8 * n}\n" for n in range(1, 10))
    (tmp_path / "job.toml").write_text(f'operation = "{PACED}"\nbudget = {BUDGET}\n{problems}')
    command = [sys.executable, "-m", "scheduler", "tune-job", tmp_path / "job.toml", "--own", PACED, "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    three = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    killed, *others = three
    while len(owners(store)) < 3 and all(process.poll() is None for process in three):
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    stored = {record.key.problem for record in store.records()}
    ended = [process.communicate() for process in others]
    assert killed.returncode == -signal.SIGKILL
    assert [process.returncode for process in others] == [0, 0], ended
    told = [json.loads(out)["results"] for out, _ in ended]
    records = list(store.records())
    assert len(records) == 9
    assert all(len(store.trials(record.key)) == record.tried == BUDGET for record in records)
    for results in told:
        assert [result["record"]["problem"]["n"] for result in results] == [8 * n for n in range(1, 10)]
    tuned = [result["task"] for results in told for result in results if result["state"] == "tuned"]
    assert len(set(tuned)) == len(tuned)
    assert sum(result["resumed"] > 0 for results in told for result in results) <= 1  # what the killed one was at
    by_the_killed = {record.key.problem for record in records} - {
        f'{{"n":{task.partition("n=")[2]}}}' for task in tuned
    }
    assert by_the_killed <= stored


def test_ctrl_c_ends_a_job_at_its_worker_processes_and_says_what_is_done(store, tmp_path):
    own = f"{Path(__file__).parents[1] / 'operations.py'}:FAULTY"
    problems = '[[problem]]\nn = 8\n[[problem]]\nn = 16\nscript = "stuck stuck stuck"\n'
    (tmp_path / "job.toml").write_text(f'operation = "{own}"\n{problems}')
    words = ["tune-job", tmp_path / "job.toml", "--own", own, "--devices", "all", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "1/4 trials" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted; finished measurements are kept" in err
    assert "tuned" in out
    assert [json.loads(record.key.problem)["n"] for record in store.records()] == [8]


def test_all_devices_are_this_cpu_where_there_is_no_gpu_and_the_table_has_the_order_of_the_job(job):
    results = json.loads(run("tune-job", job, "--devices", "all", "--json")[0])["results"]
    assert [(result["record"]["problem"]["m"], result["state"]) for result in results] == [
        (8, "tuned"), (32, "tuned"), (16, "tuned")
    ]  # fmt: skip
    assert "already" not in run("tune-job", job, "--devices", "all")[1]


def test_progress_says_how_far_the_job_is(job):
    _, err = run("tune-job", job)
    assert "3 problems: 0 done" in err
    assert "3 problems: 2 done" in err


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A host of as many GPUs as the driver is told to list, of which none can be used."""

    def install(*names):
        rows = "\n".join(f"{index}, {name}" for index, name in enumerate(names))
        cases = "\n".join(f"*--id={index}\\ *) echo '{name}';;" for index, name in enumerate(names))
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\ncase \"$*\" in\n{cases}\n*--id=*) exit 6;;\n*) echo '{rows}';;\nesac\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("scheduler.measure.gpu.cuda_wanted", lambda: True)

    return install


def test_the_gpus_of_a_host_are_those_that_are_visible(gpus, monkeypatch):
    gpus("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")
    assert Gpu.chips() == {0: "NVIDIA H200", 1: "NVIDIA H200", 2: "NVIDIA L4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0,7")
    assert Gpu.chips() == {0: "NVIDIA L4", 1: "NVIDIA H200"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert Gpu.chips() == {0: "NVIDIA H200"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpu.chips() == {}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("0,2", "run the job once for each kind (NVIDIA H200: --devices 0; NVIDIA L4: --devices 2)"),
        ("all", "(NVIDIA H200: --devices 0,1; NVIDIA L4: --devices 2)"),
        ("0,3,4", "--devices wants visible GPUs, found 3, 4 (visible: 0, 1, 2)"),
        ("0,1,0", "contains a GPU twice"),
        ("", "--devices must be all, indices such as 0,2,3, or ray"),
        ("0;1", "--devices must be all, indices such as 0,2,3, or ray"),
        ("-1", "--devices must be all, indices such as 0,2,3, or ray"),
    ],
)
def test_devices_that_are_none_are_an_error(devices, said, job, gpus):
    gpus("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")
    _, err = run("tune-job", job, f"--devices={devices}", status=2)
    assert said in " ".join(err.replace("│", " ").split())


def test_a_gpu_by_its_index_is_an_error_where_there_is_none(job):
    _, err = run("tune-job", job, "--devices", "0", status=2)
    assert "--devices wants visible GPUs, found 0 (none is visible)" in " ".join(err.replace("│", " ").split())


def test_a_job_of_nothing_that_can_be_read_needs_no_device(tmp_path, gpus):
    (tmp_path / "job.toml").write_text('operation = "matmul"\n[[problem]]\nm = "x"\n')
    out, err = run("tune-job", tmp_path / "job.toml", "--devices", "all", status=1)
    assert "failed" in out
    assert "1 of 1 problems failed" in err


def test_a_job_of_no_tasks_has_no_results():
    assert list(jobs.run([], store=Store(":memory:"))) == []


def test_a_search_in_python_says_how_far_it_is_unless_told_not_to(capsys):
    problem = {"m": 8, "n": 8, "k": 8, "dtype": "float32"}
    scheduler.tune("matmul", problem, budget=2)
    name = "matmul m=8 n=8 k=8 dtype=float32: "
    said = capsys.readouterr().err.splitlines()
    assert (said[0], said[1]) == (f"{name}starting", f"{name}0/2 trials, compiling the first candidate")
    assert said[-1].startswith(f"{name}2/2 trials, comparing the fastest, best ")
    scheduler.tune("matmul", problem, budget=2, force=True, progress=False)
    assert capsys.readouterr().err == ""
