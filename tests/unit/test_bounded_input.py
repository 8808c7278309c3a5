"""Every file that is read is read within limits: devices, pipes, bombs and nested text end in one sentence."""

import errno
import gzip
import json
import os
import threading
import zlib

import pytest
import typer.testing
from values import record

from scheduler import Plan, PlanError, Replay
from scheduler.cli.app import app
from scheduler.core import codec, files
from scheduler.core.codec import DEEPEST
from scheduler.core.errors import RecordingError
from scheduler.core.files import read_bytes, unzipped
from scheduler.measure.protocol import decode
from scheduler.search import jobs
from scheduler.store import sources
from search_spaces.matmul import MatmulProblem

COMMANDS = [
    "replay FILE",
    "tune-job FILE",
    "sweep --job FILE --out sweeps",
    "calibrate matmul FILE --hardware h200",
    "import FILE",
    "plot best-so-far --recording FILE",
]


def run(command, *, stdin=None):
    ended = typer.testing.CliRunner().invoke(app, command.split(), input=stdin)
    assert ended.exit_code in (1, 2), (ended.exit_code, ended.output, ended.exception)
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert "Traceback" not in ended.stderr
    return " ".join(ended.stderr.split())


@pytest.fixture
def small_limit(monkeypatch):
    """So that what has no end costs little."""
    for function in (files.read_bytes, files.read_stream, files.unzipped, sources.read):
        monkeypatch.setattr(function, "__defaults__", (10_000,))


@pytest.mark.parametrize("command", COMMANDS)
def test_what_has_no_end_or_is_no_file_is_refused(command, small_limit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb").write_bytes(gzip.compress(b"\0" * 10_000_000))
    (tmp_path / "long").write_bytes(b"0" * 10_001)
    for file, why in [
        ("/dev/zero", "it is larger than 10000 bytes"),
        ("long", "it is larger than 10000 bytes"),
        ("bomb", "it is larger than 10000 bytes"),
        (".", "directory"),
        ("nothing", "No such file"),
    ]:
        said = run(command.replace("FILE", file))
        unzips = any(word in command for word in ("replay", "calibrate"))
        assert why.lower() in said.lower() or (file == "bomb" and not unzips)


def test_standard_input_is_bounded(small_limit):
    assert "it is larger than 10000 bytes" in run("import -", stdin=b"0" * 20_000)


def test_a_pipe_is_read_to_its_end_and_given_up_where_nothing_comes(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no data arrived for 0 s"):
        read_bytes(pipe, longest_wait_s=0)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"text" * 100_000,))
    writer.start()
    assert read_bytes(pipe) == b"text" * 100_000
    writer.join()
    endless = threading.Thread(target=_write_until_closed, args=(pipe,))
    endless.start()
    with pytest.raises(OSError, match="it is larger than 1 MiB") as refused:
        read_bytes(pipe, 2**20)
    endless.join()
    assert refused.value.errno == errno.EFBIG


def _write_until_closed(pipe):
    with pytest.raises(BrokenPipeError), pipe.open("wb", buffering=0) as file:  # noqa: PT012
        while True:
            file.write(b"0" * 65536)


def test_as_much_as_is_allowed_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "file", 4)
    assert unzipped(gzip.compress(b"12345") + gzip.compress(b"6"), 6) == b"123456"
    assert unzipped(gzip.compress(b"12345" * 1000)[:-4]) == b"12345" * 1000, "as far as it goes"
    with pytest.raises(OSError, match="larger than 5 bytes"):
        unzipped(gzip.compress(b"12345") + gzip.compress(b"6"), 5)
    with pytest.raises(zlib.error):
        unzipped(b"text")


@pytest.mark.parametrize("depth", [DEEPEST + 1, 500, 990, 5000, 100_000])
def test_text_that_is_nested_deeply_is_refused_wherever_it_comes_from(depth, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
    for toml in (f"budget = {lists}", f"fields = {'{a=' * depth}1{'}' * depth}", f"{'a.' * min(depth, 5000)}a = 1"):
        with pytest.raises(ValueError, match=r"a job must be|a job has no"):
            jobs.parse(f'operation = "matmul"\n{toml}\n[[problem]]\nm = 1\n')
    line = codec.record_to_text(record())
    fields = json.loads(line)
    for name in fields:
        for nested in (lists, objects):
            hostile = json.dumps(fields | {name: "HERE"}).replace('"HERE"', nested)
            with pytest.raises(ValueError, match=r"nested|wanted"):
                codec.record_from_text(hostile)
    for nested in (lists, objects):
        for read in (codec.trial_from_text, codec.sweep_from_text, codec.calibrations_from_text, codec.is_again):
            with pytest.raises(ValueError, match="nested"):
                read(nested)
        assert codec.problem_to_json(nested) == nested or depth < 5000
        with pytest.raises(ValueError, match=r"nested|problem|no field"):
            MatmulProblem.from_canonical(nested)
        (tmp_path / "plan.json").write_text(nested)
        with pytest.raises(PlanError, match="nested"):
            Plan.load(tmp_path / "plan.json")
        (tmp_path / "sweep.gz").write_bytes(gzip.compress(nested.encode() + b"\n"))
        with pytest.raises(RecordingError, match="nested"):
            Replay(tmp_path / "sweep.gz")
    with pytest.raises(ValueError, match="no message"):
        decode(lists)
    (tmp_path / "job.toml").write_text(f"budget = {lists}")
    assert "a job must be" in run("tune-job job.toml")
    (tmp_path / "records.jsonl").write_text(f"{lists}\n{objects}\n")
    assert "nested" in run("import records.jsonl")
