"""The command line as a shell and a program meet it: what it prints where, and how it ends."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from modes import frozen
from processes import gone
from typer.testing import CliRunner
from values import ENVIRONMENT, KEY, record, trial

from scheduler.cli.app import _user_location, app
from scheduler.cli.terminal import console_here
from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.hardware import CPU
from scheduler.core.records import Key
from scheduler.inspect import doctor, provenance
from scheduler.inspect.doctor import coverage
from scheduler.store.store import Store, shipped
from search_spaces import jax_compat, load
from search_spaces.mma import fragments

ROOT = Path(__file__).parents[2]
SMALL = ["m=32", "n=32", "k=32", "dtype=float32"]


def run(*arguments, status=0, stdin=None):
    """Standard output, standard error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler", input=stdin)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.stdout, result.stderr


# The status of doctor where nothing is wrong but what the installed JAX makes of the shipped records.
DOCTOR = 3 if any(provenance.stale(record) for record in shipped().records()) else 0


def own_list():
    """What `list` tells of the user's own records: the shipped ones, real ones, come and go."""
    return [row for row in json.loads(run("list", "--json")[0]) if row["where"] != "shipped"]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "cache.db")
    yield store
    store.close()


def test_what_is_tuned_is_listed_shown_explained_and_not_tuned_again(store):
    out, err = run("tune", "matmul", *SMALL, "--budget", 3)
    assert "3 trials of" in out
    assert "winner" in out
    assert f"Stored in {store.location}" in " ".join(out.split())
    assert "3/3 trials" in err
    out, _ = run("tune", "matmul", *SMALL)
    assert "Already tuned" in out
    out, _ = run("tune", "matmul", *SMALL, "--budget", 2, "--force")
    assert "2 trials of" in out
    (listed,) = own_list()
    assert (listed["operation"], listed["tried"], listed["stale"]) == ("matmul", 2, False)
    (shown,) = json.loads(run("show", "matmul", *SMALL, "--json")[0])
    assert shown["winner"] == shown["entries"][0]
    assert shown["winner"]["share_of_roofline"] > 0
    assert len(shown["trials"]) == 2
    assert shown["confidence"]["rounds"] == 8
    out, _ = run("show", "matmul", *SMALL)
    assert "2 trials (budget 2)" in out
    assert "Run-off: 8 rounds, 16 samples of the winner, L2 warm" in " ".join(out.split())
    explained = json.loads(run("explain", "matmul", *SMALL, "--json")[0])
    assert explained["holds"]
    assert sum(kernel["tried"] for kernel in explained["kernels"]) >= 2
    out, _ = run("explain", "matmul", *SMALL)
    assert "Winner, from" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_record_that_cannot_be_stored_is_printed_and_ends_with_status_1(as_json, monkeypatch):
    def refuse(*_):
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "put", refuse)
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        out, err = run("tune", "matmul", *SMALL, "--budget", 1, *(["--json"] if as_json else []), status=1)
    assert "winner" in out
    assert "Stored in" not in out
    assert "tile-scheduler: results could not be stored in " in err


@pytest.mark.parametrize(("own", "told"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")])
def test_the_commands_numpy_has_one_thread_unless_the_user_says_otherwise(own, told):
    code = "import os, sys, scheduler; early = 'numpy' in sys.modules; import scheduler.cli.app"
    code += "; print(early, 'numpy' in sys.modules, os.environ['OPENBLAS_NUM_THREADS'])"
    inherited = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    ran = subprocess.run([sys.executable, "-c", code], env=inherited | own, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.split() == ["False", "True", told], ran.stderr


def test_the_state_of_the_cache_is_cold_or_warm():
    _, err = run("tune", "matmul", *SMALL, "--l2", "tepid", status=2)
    assert "l2='tepid' is not one of cold, warm" in " ".join(err.split())


def test_json_of_a_search_has_its_figures_and_nothing_else_is_on_standard_output(store):
    result = json.loads(run("tune", "matmul", *SMALL, "--budget", 2, "--json")[0])
    assert (result["state"], result["task"]) == ("tuned", "matmul m=32 n=32 k=32 dtype=float32")
    assert result["answer"] == result["record"]["winner"]
    assert {"backend", "schedule", "median_s", "predicted_s", "flops_per_s", "share_of_roofline"} <= set(
        result["answer"]
    )
    assert result["before"]["backend"] == "xla"
    assert result["cache"] == store.location
    assert json.loads(run("tune", "matmul", *SMALL, "--json")[0])["state"] == "known"


def test_explain_answers_for_a_chip_that_is_not_here_and_its_counts_add_up():
    fields = ["m=4096", "n=4096", "k=3776"]
    explained = json.loads(run("explain", "matmul", *fields, "--hardware", "NVIDIA H200", "--json")[0])
    assert explained["hardware"].startswith("NVIDIA H200")
    for kernel in explained["kernels"]:
        assert kernel["size"] == sum(kernel["dropped"].values()) + kernel["tried"] + kernel["untried"]
    out, _ = run("explain", "matmul", *fields, "--hardware", "NVIDIA H200")
    assert "on-chip memory" in out
    assert "Nothing is stored; run:\n  tile-scheduler tune matmul m=4096 n=4096 k=3776\n" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tune", "matmul", "mm=3"], "did you mean 'm'?"),
        (["tune", "matmul", "m=3"], "missing n, k"),
        (["tune", "matmul", "m"], "a field must be name=value, found 'm'"),
        (["tune", "matmul", "m=3", "m=4"], "m is given twice"),
        (["tune", "matmull", "m=3"], "no operation 'matmull'; did you mean 'matmul'? (there are: matmul"),
        (["tune"], "Missing argument"),
        (["tune-job"], "Missing argument"),
        (["replay"], "Missing argument"),
        (["tune-job", "job.toml", "--budget", "3"], "No such option"),
        (["tune", "matmul", *SMALL, "--budget", "0"], "--budget"),
        (["tune", "matmul", *SMALL, "--backends", "cuda"], "no backend 'cuda' (it has: "),
        (
            ["explain", "matmul", *SMALL, "--hardware", "H2000"],
            "no hardware 'H2000'; did you mean 'NVIDIA H200'? (known: NVIDIA H200",
        ),
        (
            ["tune", "mine.f", "m=3"],
            "no operation 'mine.f' in this package; your own: package.module:NAME or file.py:NAME",
        ),
        (["forget"], "name a problem, or give --all"),
        (["forget", "matmul", *SMALL, "--all"], "exclude each other"),
        (["lst"], "No such command 'lst'"),
        (["list", "--operation", "matmull"], "no operation 'matmull'; did you mean 'matmul'?"),
        (["export", "--operation", "matmull"], "no operation 'matmull'; did you mean 'matmul'?"),
        (["forget", "matmull", "--all"], "no operation 'matmull'; did you mean 'matmul'?"),
        (["list", "--hardware", "H2000"], "no hardware 'H2000'; did you mean 'NVIDIA H200'? (known: NVIDIA H200"),
        (
            ["show", "matmul", *SMALL, "--hardware", "H2000"],
            "no hardware 'H2000'; did you mean 'NVIDIA H200'? (known: NVIDIA H200",
        ),
        (["explain", "matmul", *SMALL, "--hardware", "nvidia"], "matches several chips: NVIDIA H200, NVIDIA H100"),
    ],
)
def test_wrong_words_end_with_status_2_and_name_the_right_ones(arguments, complaint):
    out, err = run(*arguments, status=2)
    assert out == ""
    assert complaint in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["show", "matmul", *SMALL], "run: tile-scheduler tune matmul m=32"),
        (["forget", "matmul", *SMALL], "nothing matches in"),
        (["import", "not-there"], "not-there: No such file or directory"),
        (["tune-job", "not-there"], "not-there: No such file or directory"),
        (["build-cache", "not-there"], "the directory of records not-there does not exist"),
    ],
)
def test_what_cannot_be_done_ends_with_status_1_and_a_sentence(arguments, complaint):
    out, err = run(*arguments, status=1)
    assert out == ""
    assert err.startswith("tile-scheduler: ")
    assert complaint in err


def spoil(path):
    path.write_bytes(b"no database" * 500)


def age(path):
    Store(path).put(record())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 99")


@pytest.mark.parametrize("harm", [spoil, age])
def test_a_cache_that_cannot_be_read_is_a_sentence_and_reading_goes_on_without_it(harm, tmp_path):
    harm(tmp_path / "cache.db")
    for command, answers in (
        (["list"], True),
        (["explain", "matmul", *SMALL], True),
        (["show", "matmul", *SMALL], False),
    ):
        out, err = run(*command, status=1)
        assert "cache.db" in err
        assert err.count("(continuing without it)") == 1
        assert bool(out) == answers
    for command in (["tune", "matmul", *SMALL], ["export"]):
        _, err = run(*command, status=1)
        assert "cache.db" in err
    out, _ = run("doctor", status=1)
    assert "broken" in out


@pytest.mark.parametrize(
    "command", [["list"], ["list", "--json"], ["explain", "matmul", *SMALL], ["show", "matmul", *SMALL]]
)
def test_a_server_that_has_stopped_is_named_and_the_status_is_1(command, monkeypatch):
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", f"postgresql://someone@127.0.0.1:{port}/base")
    _, err = run(*command, status=1)
    assert "check that its server runs and is reachable" in err


def test_records_travel_by_export_and_import_and_are_forgotten(store, tmp_path):
    store.put(record())
    text, _ = run("export")
    _, err = run("export", tmp_path / "records.jsonl", "--hardware", "h200")
    assert "1 records" in err
    assert (tmp_path / "records.jsonl").read_text() == text
    assert run("export", "--hardware", "A100")[0] == ""
    run("forget", "--all", "--hardware", "A100", status=1)
    run("forget", "matmul", "--all")
    assert store.get(KEY) is None
    run("import", "-", stdin=text)
    assert dataclasses.replace(store.get(KEY), imported=None) == record()
    assert run("export")[0] == text


def test_a_directory_of_exported_records_becomes_a_shipped_cache(store, tmp_path):
    (tmp_path / "records").mkdir()
    store.put(record())
    run("export", tmp_path / "records")
    _, err = run("build-cache", tmp_path / "records", tmp_path / "shipped.db")
    assert "1 records" in err
    assert Store(tmp_path / "shipped.db", readonly=True).get(KEY) == record()


def test_a_record_of_another_minor_version_of_jax_is_listed_as_stale_and_what_that_means_is_said(store):
    here = importlib.metadata.version("jax")
    old, same = (dataclasses.replace(KEY, operation=name) for name in ("old", "same"))
    store.put(record(key=old, environment=dataclasses.replace(ENVIRONMENT, jax="0.9.1")))
    store.put(record(key=same, environment=dataclasses.replace(ENVIRONMENT, jax=here)))
    assert {row["operation"]: row["stale"] for row in own_list()} == {"old": True, "same": False}
    told = " ".join(run("list", "--operation", "old")[0].split())
    assert "stale (tuned with jax 0.9.1)" in told
    assert "stale: measured with another minor version of jax" in told
    assert "served all the same" in told
    assert "stale" not in run("list", "--operation", "same")[0]


def test_a_job_tells_before_and_after_and_fails_where_one_problem_did(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('operation="matmul"\nbudget=2\n[[problem]]\nm=8\nn=8\nk=8\n[[problem]]\nm=8\nq=1\n')
    out, err = run("tune-job", job, status=1)
    assert "before" in out
    assert "matmul m=8 n=8 k=8" in out
    assert "no field 'q'" in out
    assert "1 of 2 problems failed" in err
    job.write_text(job.read_text().rpartition("[[problem]]")[0])
    results = json.loads(run("tune-job", job, "--json")[0])["results"]
    assert [result["state"] for result in results] == ["known"]


def test_hosts_that_share_a_job_each_take_their_part(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('operation="matmul"\nbudget=2\n[[problem]]\nm=8\nn=8\nk=8\n[[problem]]\nm=8\nn=8\nk=16\n')
    told = [json.loads(run("tune-job", job, "--part", part, "--json")[0])["results"] for part in ("1/2", "2/2")]
    assert [[result["task"] for result in results] for results in told] == [
        ["matmul m=8 n=8 k=8 dtype=bfloat16"],
        ["matmul m=8 n=8 k=16 dtype=bfloat16"],
    ]
    assert "a part i/n must have 1 <= i <= n, found 3/2" in run("tune-job", job, "--part", "3/2", status=2)[1]


def test_the_version_is_the_one_that_is_installed():
    assert run("--version")[0].strip() == importlib.metadata.version("tile-scheduler")


def test_doctor_names_versions_caches_and_what_each_backend_can_do_here(store):
    found = {row["what"]: row for row in json.loads(run("doctor", "--json", status=DOCTOR)[0])}
    assert importlib.metadata.version("jax") in found["packages"]["detail"]
    assert store.location in found["cache"]["detail"]
    assert found["matmul: xla"]["state"] == "ok"
    assert "Hopper" in found["matmul: mosaic_gpu"]["detail"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "TILE_SCHEDULER_ON_MISS",
            "modle",
            "TILE_SCHEDULER_ON_MISS='modle' is not one of model, tune,",
        ),
        ("TILE_SCHEDULER_CACHE", "/proc/nowhere/cache.db", "/proc/nowhere/cache.db cannot be written"),
        ("TILE_SCHEDULER_CACHE", f"{__file__}/cache.db", "cannot be written (Not a directory)"),
    ],
)
def test_doctor_finds_what_the_environment_says_wrong(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    broken = [row for row in json.loads(run("doctor", "--json", status=1)[0]) if row["state"] == "broken"]
    assert [said in row["detail"] for row in broken] == [True]


@pytest.mark.parametrize("junk", [b"\xff", 7, "new"])
def test_doctor_counts_records_whose_columns_hold_anything(junk, store):
    store.put(record())
    with contextlib.closing(sqlite3.connect(store.location)) as connection, connection:
        connection.execute("UPDATE schedules SET jax = ?, schedule = ?, date = ?", (junk,) * 3)
    found = {row["what"]: row for row in json.loads(run("doctor", "--json", status=3)[0])}
    assert found["cache"]["state"] == "warning"
    assert "1 records, 1 of them malformed" in found["cache"]["detail"]


MADE = ".".join(next(iter(shipped().records())).environment.jax.split(".")[:2])


@pytest.mark.parametrize("here", ["0.1.0", f"{MADE}.99", "99.0"])
def test_doctor_warns_of_stale_records_and_names_the_jax_that_makes_them_current(here, monkeypatch, store):
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: here if name == "jax" else installed(name))
    monkeypatch.setattr("scheduler.inspect.provenance._jax_here", lambda: here)  # it is asked once a process
    monkeypatch.setattr(fragments, "HAS_MMA", True)  # whatever the JAX here has: only records are out of date
    current = here.startswith(f"{MADE}.")
    store.put(record(environment=dataclasses.replace(ENVIRONMENT, jax=f"{MADE}.0")))
    found = {row["what"]: row for row in json.loads(run("doctor", "--json", status=0 if current else 3)[0])}
    for cache, again in (("cache", "verify --update"), ("shipped cache", "verify --shipped --update")):
        assert found[cache]["state"] == ("ok" if current else "warning")
        told = re.search(
            rf"all of them stale: made with jax ({MADE}\.\d+), and this is {here}.*", found[cache]["detail"]
        )
        assert bool(told) == (not current)
        if told:
            assert f"Install jax {told[1]} (pip install 'jax=={told[1]}')" in told[0]
            assert again in told[0]
    out, _ = run("doctor", status=0 if current else 3)
    untried = "jax, " if here == "99.0" else ""
    last = "ok: nothing is broken or out of date" if current else f"warning: {untried}cache, shipped cache"
    assert out.splitlines()[-1] == last


def test_doctor_names_the_python_that_a_jax_needs(monkeypatch):
    monkeypatch.setattr(doctor, "PYTHON_OF_JAX", (((0, 11), (99, 1)), ((0, 10), (3, 11))))
    here = platform.python_version()
    assert doctor.upgrade("0.11.2").endswith(f" under Python 99.1 or newer, which it needs (this is {here})")
    assert doctor.upgrade("0.10.2") == "Install jax 0.10.2 (pip install 'jax==0.10.2')"


def test_the_python_that_the_installed_jax_needs_is_the_one_that_is_written_down():
    needed = next(python for since, python in jax_compat.PYTHON_OF_JAX if since <= jax_compat.JAX_VERSION)
    assert importlib.metadata.metadata("jax")["Requires-Python"] == f">={needed[0]}.{needed[1]}"


def test_a_chip_whose_kernels_want_a_newer_jax_is_a_warning(monkeypatch):
    monkeypatch.setattr(fragments, "HAS_MMA", False)
    rows = [row for row in coverage([]) if row.outdated]
    assert {row.hardware.architecture for row in rows} == fragments.BEFORE_HOPPER
    assert all(re.search(r"XLA alone; a kernel needs jax \S+ or newer", str(row)) for row in rows)
    found = [finding for finding in doctor.examine(lambda: CPU) if finding.what.startswith("chip ")]
    kinds = {f"chip {row.hardware.kind}" for row in rows}
    assert {finding.what for finding in found if finding.state == "warning"} == kinds


def test_doctor_leaves_no_trace_where_the_cache_would_be(tmp_path):
    run("doctor", status=DOCTOR)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_platform_that_is_not_here_is_one_sentence():
    env = os.environ | {"JAX_PLATFORMS": "cuda"}
    for command, status in (["doctor"], 1), (["tune", "matmul", *SMALL], 1), (["explain", "matmul", *SMALL], 1):
        command = [sys.executable, "-m", "scheduler", *command]
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert ended.returncode == status
        assert "Traceback" not in ended.stderr
        assert "JAX finds no device of JAX_PLATFORMS=cuda" in " ".join((ended.stdout + ended.stderr).split())


def test_a_problem_that_no_memory_holds_says_how_much_it_needs(tmp_path):
    fields = ("m=1000000", "n=1000000", "k=100000")
    for command in (["tune"], ["sweep", "--out", tmp_path / "a.jsonl.gz"]):
        _, err = run(*command, "matmul", *fields, status=1)
        assert "its operands and result take 2235 GiB of memory, and the device has" in err


BROKEN = """
from search_spaces import Operation, LibraryKernel
from search_spaces.matmul import MatmulProblem

class Broken(LibraryKernel):
    def supports(self, problem, target):
        return problem.m + problem.dtype
    def run(self, problem, schedule, target, /, a, b):
        return a @ b

BROKEN = Operation("broken", MatmulProblem, (Broken(),))
"""


def test_an_operation_that_raises_is_one_sentence_with_its_file_and_line(tmp_path):
    (tmp_path / "own.py").write_text(BROKEN)
    line = 1 + BROKEN.splitlines().index("        return problem.m + problem.dtype")
    for command in ("explain", "tune"):
        _, err = run(command, f"{tmp_path / 'own.py'}:BROKEN", *SMALL, status=1)
        assert err.endswith(
            f"tile-scheduler: {tmp_path / 'own.py'}:{line}, in supports: "
            "TypeError: unsupported operand type(s) for +: 'int' and 'str'\n"
        )


def test_a_defect_of_this_program_keeps_its_traceback():
    with pytest.raises(AttributeError) as raised:
        load(None)
    assert _user_location(raised.value) is None


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_keeps_what_was_measured(store):
    command = [sys.executable, "-m", "scheduler", "tune", "matmul", "m=128", "n=128", "k=128", "dtype=float32"]
    process = subprocess.Popen([*command, "--budget=500"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr.readline().endswith(": starting\n")
    assert "0/101 trials" in process.stderr.readline()  # said before there is anything to say of them
    assert "1/101 trials" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted; finished measurements are kept" in err
    assert "Traceback" not in err
    key = json.dumps({"dtype": "float32", "k": 128, "m": 128, "n": 128}, separators=(",", ":"))
    assert store.trials(dataclasses.replace(KEY, hardware="cpu (1 cores, 16 GiB)", problem=key))
    fields = ["m=128", "n=128", "k=128", "dtype=float32"]
    command = f"  tile-scheduler tune matmul {' '.join(fields)} --seconds 600\n"
    for told in (run("list")[0], run("show", "matmul", *fields)[0]):
        assert "cut short, or still searched: " in told
        assert command in told
    (shown,) = json.loads(run("show", "matmul", *fields, "--json")[0])
    assert shown["unfinished"] == len(shown["trials"]) > 0


def test_an_operation_that_only_a_store_knows_is_listed_by_its_name(store):
    store.put(record(key=dataclasses.replace(KEY, operation="own")))
    assert "own, NVIDIA H200" in run("list", "--operation", "own")[0]
    assert [row["operation"] for row in json.loads(run("list", "--operation", "own", "--json")[0])] == ["own"]


ROW_FUNCTION = """
import jax.numpy as jnp
import scheduler

@scheduler.rows
def centred(x, *, by="a b"):
    return x - jnp.mean(x)
"""


def test_a_row_function_is_typed_again_as_it_was_and_64_bits_are_refused(store, tmp_path):
    (tmp_path / "functions.py").write_text(ROW_FUNCTION)
    name, of_32, of_64 = f"{tmp_path / 'functions.py'}:centred", "x=float32[8,64]", "x=float64[8,64]"
    assert (
        f"run: tile-scheduler tune {name} 'x=float32[8,64]' 'by=c d'" in run("show", name, of_32, "by=c d", status=1)[1]
    )
    _, err = run("tune", name, of_64, status=2)
    assert "x=float64[8,64] needs types of 64 bits: set JAX_ENABLE_X64=1" in " ".join(err.split())
    for operation, command in (("rows", "file.py:NAME"), (name, name)):
        assert f"tile-scheduler tune {command} 'x=float32[64,128]'" in run("list", "--operation", operation)[0]


def test_a_chip_is_named_alike_everywhere(store):
    store.put(record(key=dataclasses.replace(KEY, problem='{"k":8,"m":8,"n":8}')))
    fields = ("m=8", "n=8", "k=8")
    assert json.loads(run("explain", "matmul", *fields, "--hardware", "h200", "--json")[0])["hardware"] == KEY.hardware
    assert json.loads(run("show", "matmul", *fields, "--hardware", "h200", "--json")[0])[0]["hardware"] == KEY.hardware
    assert KEY.hardware in run("list", "--hardware", "h200")[0]


def test_a_search_of_an_operation_that_is_not_here_is_listed_though_nobody_knows_its_command(store):
    key = dataclasses.replace(KEY, operation="own", problem='{"rows":8}')
    store.save_trials(key, [trial()], ENVIRONMENT)
    out, _ = run("list", "--operation", "own")
    assert "own rows=8 on NVIDIA H200" in out
    assert "1 trial kept, the best 100 us: mosaic_gpu" in " ".join(out.split())
    assert "the original command resumes it" in out


def descendants(pid):
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from descendants(child)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)], ids=str
)
def test_an_end_by_any_signal_waits_for_no_candidate_keeps_the_trials_and_leaves_no_worker(store, number, status):
    script = "script=" + " ".join(["stuck"] * 6)
    command = [sys.executable, "-m", "scheduler", "tune", "tests/operations.py:FAULTY", "n=8", script, "--workers=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr.readline().endswith(": starting\n")
    assert "0/7 trials" in process.stderr.readline()
    assert "1/7 trials" in process.stderr.readline()  # the library's; candidates that never end are compiled
    workers = list(descendants(process.pid))
    assert len(workers) == 4, "two that compile, one that forks these two, and one that measures"
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status
    assert "Traceback" not in err
    assert ("interrupted; finished measurements are kept" in err) == (status > 0)
    assert all(gone(worker) for worker in workers)
    problem = json.dumps({"n": 8, "script": script.removeprefix("script=")}, separators=(",", ":"))
    trials = store.trials(Key("faulty", "cpu (1 cores, 16 GiB)", problem))
    assert [trial.backend for trial in trials] == ["xla"]


@pytest.mark.slow
def test_a_candidate_that_hangs_is_given_up_after_the_time_that_was_allowed(store):
    tune = ["tune", ROOT / "tests" / "operations.py:FAULTY", "n=8", "script=ok hang", "--workers", 2]
    result = json.loads(run(*tune, "--run-timeout", 2, "--json")[0])
    assert result["record"]["tried"] == 3
    (shown,) = json.loads(run("show", *tune[1:4], "--json")[0])
    failures = [trial["failure"] for trial in shown["trials"] if trial["failure"]]
    assert failures == [{"stage": "timeout", "detail": "run did not end within 2 s"}]


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--json"], ["export"]], ids=str)
def test_what_needs_no_device_does_not_import_jax(arguments):
    program = (
        "import sys\nfrom scheduler.cli.app import main\n"
        f"try:\n    main({arguments})\nfinally:\n    sys.exit('jax' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert ended.returncode == 0, ended.stderr


def test_explain_says_which_calls_are_xlas_whatever_is_stored():
    out, _ = run("explain", "softmax", "rows=64", "columns=64")
    assert "Calls outside the operation" in " ".join(out.split())


def test_a_cache_that_may_only_be_read_answers_every_question_and_refuses_every_change(open_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(open_path))
    run("tune", "matmul", *SMALL, "--budget", 2)
    carried, _ = run("export")
    file = open_path.with_name("records.jsonl")
    file.write_text(carried)
    with frozen(open_path):
        assert len(own_list()) == 1
        assert run("export")[0] == carried
        assert len(json.loads(run("show", "matmul", *SMALL, "--json")[0])[0]["trials"]) == 2
        assert json.loads(run("explain", "matmul", *SMALL, "--json")[0])["holds"]
        assert "Already tuned" in run("tune", "matmul", *SMALL)[0]
        cache = next(finding for finding in doctor.examine(lambda: CPU) if finding.what == "cache")
        assert (cache.state, cache.detail.startswith("1 records")) == ("note", True)
        for change in (
            ("tune", "matmul", *SMALL, "--force"),
            ("import", file),
            ("forget", "--all"),
            ("verify", "--update"),
            ("calibrate", "matmul"),
        ):
            out, err = run(*change, status=1)
            assert "may only be read" in out + err
            assert "trials" not in err  # nothing was measured


# What comes from elsewhere, and goes there


def test_an_import_puts_all_of_a_file_or_nothing_of_it(store, tmp_path):
    lines = [codec.record_to_text(record(dataclasses.replace(KEY, operation=f"op{i}"))) for i in range(3)]
    file = tmp_path / "mixed.jsonl"
    for wrong, why in [
        (lines[1].replace('"m": 256', '"m": 1e400'), "line 2: problem: finite numbers are wanted"),
        (lines[1].replace('"op1"', '"\\ud800"'), "line 2: operation: text is wanted"),
    ]:
        assert wrong != lines[1]
        file.write_text("\n".join([lines[0], wrong, lines[2]]))
        assert why in run("import", file, status=1)[1]
        assert list(store.records()) == []
    with pytest.raises(StoreError, match="cannot be written"):
        store.put_all(record(dataclasses.replace(KEY, operation=name)) for name in ("op0", "\ud800"))
    assert list(store.records()) == []
    file.write_text("\n".join(lines))
    assert "put 3 records" in run("import", file)[1]


def test_control_characters_of_an_import_do_not_reach_the_terminal(store, tmp_path):
    key = dataclasses.replace(KEY, hardware="\x1b[31mX\x1b[2J", operation="a\x00b")
    file = tmp_path / "hostile.jsonl"
    file.write_text(codec.record_to_text(record(key)))
    run("import", file)
    for shown in (run("list")[0], run("forget", "--all")[1]):
        assert "\\x1b[31mX" in shown
        assert "\x1b" not in shown
        assert "\x00" not in shown


@pytest.mark.parametrize(("columns", "width"), [("0", 120), ("99999999", 1000), ("x", 120), ("44", 44)])
def test_a_width_of_the_terminal_that_is_none_is_not_believed(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert console_here().width == width


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["doctor", "--json"]])
def test_standard_output_that_cannot_be_written_is_said_in_a_sentence(arguments, tmp_path):
    command = [sys.executable, "-m", "scheduler", *arguments]
    env = os.environ | {"TILE_SCHEDULER_CACHE": str(tmp_path / "cache.db")}
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    assert ran.returncode == 1
    assert ran.stderr == "tile-scheduler: standard output cannot be written: No space left on device\n"


def test_standard_output_may_be_closed(tmp_path):
    ran = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m scheduler list >&-"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TILE_SCHEDULER_CACHE": str(tmp_path / "cache.db")},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
