"""What the command line prints fits the width it is printed in, and tells all of it."""

import json
import os
import re
import subprocess
import sys

import pytest
from failures import failures
from test_cli import DOCTOR, ROOT, run

from scheduler.core.records import schedule_text
from scheduler.store.store import shipped
from search_spaces import format_problem, load

RECORDS = list(shipped().records())
SMALL = ("m=32", "n=32", "k=32", "dtype=float32")
LARGE = ("m=4096", "n=4096", "k=4096")


@pytest.fixture(params=[80, 120, 200])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def widest(text):
    """Of all lines but commands, which are there to be copied, and places, which are one word."""
    return max(len(line.rstrip()) for line in text.splitlines() if not re.search(r"^  tile-scheduler |/", line))


def test_a_list_of_the_shipped_records_takes_few_lines_each_and_cuts_nothing(width):
    out, _ = run("list", "--all", "--most", 0)
    lines = out.splitlines()
    assert widest(out) <= width
    tables = {(record.key.operation, record.key.hardware) for record in RECORDS}
    # Of 80 columns: the schedule, and one or two lines for the problem; of each table, a space and two for the heading.
    assert len(lines) <= 3 * len(RECORDS) + 3 * len(tables)
    assert "\u2026" not in out
    words = set(out.split())
    for record in RECORDS:
        assert set(format_problem(record.key.operation, record.key.problem).split()) <= words
        assert record.winner.backend in words
    assert "unconfirmed" not in out
    headings = {(record.key.operation, record.key.hardware) for record in RECORDS}
    assert len(re.findall("stale", out)) <= len(headings) + 1


def test_a_terminal_without_other_letters_than_ascii_is_printed_to_as_well():
    ran = subprocess.run(
        [sys.executable, "-m", "scheduler", "list", "--all", "--operation", "softmax"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        cwd=ROOT,
        capture_output=True,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"rows=1001 columns=1000 dtype=bfloat16" in ran.stdout


def test_an_account_takes_a_screen_or_two(width):
    out, _ = run("explain", "matmul", *LARGE, "--hardware", "h200")
    assert widest(out) <= width
    assert len(out.splitlines()) <= 102
    assert "\n\nCalls outside the operation" in out
    explained = json.loads(run("explain", "matmul", *LARGE, "--hardware", "h200", "--json")[0])
    words = set(out.split())
    for kernel in explained["kernels"]:
        assert {f"-{count}" for count in kernel["dropped"].values()} <= words
    first = next(kernel["first"] for kernel in explained["kernels"] if kernel["backend"] == "mosaic_gpu")
    assert set(schedule_text(first[0]["schedule"]).split()) <= words
    assert {name for ranked in first for name, seconds in ranked["terms"].items() if seconds} <= words


def test_as_many_first_choices_as_are_asked_for_are_shown_beside_and_below_each_other(width):
    out, _ = run("explain", "matmul", *LARGE, "--hardware", "h200", "--top", "20")
    assert widest(out) <= width
    assert "\n20  " in out


def test_a_winner_whose_trials_were_not_shipped_is_not_said_to_come_of_none():
    out, _ = run("explain", "matmul", *LARGE, "--hardware", "h200")
    assert "of them tried" not in out
    assert re.search(r"48 trials \(budget 48, their times not stored with the record\)", out)


@pytest.mark.slow
def test_every_other_command_keeps_to_the_width(width, tmp_path):
    outs = [
        run("show", "matmul", *LARGE)[0],
        run("tune", "matmul", *SMALL, "--budget", 5)[0],
        run("show", "matmul", *SMALL)[0],
        run("doctor", status=DOCTOR)[0],
        run("sweep", "matmul", *SMALL, "--sample", 3, "--repetitions", 1, "--again", 0, "--out", tmp_path / "a.gz")[0],
    ]
    job = tmp_path / "job.toml"
    job.write_text('operation="matmul"\nbudget=2\n[[problem]]\nm=8\nn=8\nk=8\nbias="float32"\nresidual="float32"\n')
    outs.append(run("tune-job", job)[0])
    for out in outs:
        assert widest(out) <= width, out
        assert "\u2026" not in out


def test_verified_winners_keep_to_the_width_and_are_spelled_as_they_are_typed(width):
    run("tune", "matmul", *SMALL, "--budget", 1)
    out, err = run("verify", "--within", 10000)
    assert widest(out) <= width
    assert "matmul m=32 n=32 k=32 dtype=float32" in out
    assert "matmul m=32 n=32 k=32 dtype=float32 on cpu" in err


def test_a_pipe_without_columns_gets_lines_of_120(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert 80 < widest(run("list", "--all")[0]) <= 120


def test_a_problem_has_one_notation_which_can_be_typed():
    def check(record):
        operation = load(record.key.operation)
        problem = operation.problem.from_canonical(record.key.problem)
        text = str(problem)
        assert format_problem(record.key.operation, record.key.problem) == text
        assert text in str(record.key)
        assert operation.problem.parse(dict(field.split("=") for field in text.split())) == problem
        assert f"dtype={problem.dtype}" in text
        assert problem.canonical() == record.key.problem

    assert failures(check, RECORDS, lambda record: record.key) == []


@pytest.mark.slow
def test_a_problem_is_spelled_alike_in_titles_lists_and_searches():
    text = "m=4096 n=4096 k=4096 dtype=bfloat16"
    for command in (
        ["show", "matmul", *LARGE],
        ["explain", "matmul", *LARGE, "--hardware", "h200"],
        ["list", "--all", "--most", "0"],
    ):
        assert re.search(rf"\b{text}( |\n|$)", run(*command)[0]), command
    ended = subprocess.run(
        [sys.executable, "-m", "scheduler", "show", "matmul", *text.split()], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
