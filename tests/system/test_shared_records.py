"""Records travel as files with digests, are not trusted before they were verified, and are checked before that."""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from operations import DoubleProblem
from paced import PACED
from typer.testing import CliRunner
from values import ENVIRONMENT, KEY, record, trial

import scheduler
from scheduler.cli.app import app
from scheduler.core import codec
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Failure, Imported, Measurement, key_of
from scheduler.dispatch import dispatch
from scheduler.measure.runner import InProcess
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import recheck
from scheduler.search.baseline import is_current
from scheduler.search.reverify import reverify
from scheduler.search.task import Task
from scheduler.search.tuner import tune
from scheduler.store import sources, text_files
from scheduler.store.store import Store, shipped
from search_spaces.jax_compat import HAS_GPU_INTERPRETER
from search_spaces.matmul import MATMUL, MatmulProblem

ROOT = Path(__file__).parents[2]
H200 = find("NVIDIA H200")
MARK = Imported("https://example.com/m.jsonl", "0" * 64)
HERE = dataclasses.replace(KEY, hardware=CPU.id)


def run(*arguments, status=0):
    """Standard output and standard error in one line each."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stdout.split()), " ".join(result.stderr.split())


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        yield store


@pytest.fixture
def hosted(tmp_path):
    """A directory of files: records of this machine's chip, of another operation on it, and of an H200; an index."""
    directory = tmp_path / "hosted"
    directory.mkdir()
    other = dataclasses.replace(HERE, operation="softmax")
    text_files.add_records(directory, [record(HERE), record(other), record(KEY)])
    sources.write_index(directory)
    return directory


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and notes what was read; `/cut/` ends early, `/slow/` never answers, `/plain/` has no length."""

    ended = threading.Event()
    asked = ()

    def do_GET(self):
        Handler.asked += (self.path,)
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if kind not in ("cut", "slow", "plain"):
            return super().do_GET()
        if kind == "slow":
            self.ended.wait(60)
            return None
        content = (Path(self.directory) / rest).read_bytes()
        self.send_response(200)
        if kind == "cut":
            self.send_header("Content-Length", str(len(content)))
            content = content[: content.index(b"\n") + 1]  # whole lines, so that only the length tells
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def url(hosted):
    """The URL of a server of `hosted`."""
    Handler.asked, Handler.ended = (), threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(hosted)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def keys(store):
    return {one.key for one in store.records()}


# What is read, and from where


def test_a_file_with_another_digest_is_not_imported_and_both_digests_are_said(hosted, url, store):
    (file,) = hosted.glob("nvidia*/matmul.jsonl")
    digest, wrong = hashlib.sha256(file.read_bytes()).hexdigest(), "ab" * 32
    place = f"{url}/{file.relative_to(hosted)}"
    for source in (file, file.as_uri(), place):
        _, err = run("import", source, "--sha256", wrong, status=1)
        assert digest in err
        assert wrong in err
        assert keys(store) == set()
    assert "64 hexadecimal digits" in run("import", file, "--sha256", "abc", status=2)[1]
    run("import", f"{place}?signature=secret", "--sha256", f"sha256:{digest.upper()}")
    assert [one.imported for one in store.records()] == [Imported(place, digest)]
    assert dataclasses.replace(store.get(KEY), imported=None) == record()
    assert digest in run("import", file.as_uri())[1]


def test_an_index_imports_the_files_of_this_chip_alone_or_of_the_named_one(hosted, url, store):
    run("import", f"{url}/index.json")
    assert keys(store) == {HERE, dataclasses.replace(HERE, operation="softmax")}
    assert len(Handler.asked) == 3
    assert not any("nvidia" in path for path in Handler.asked)
    run("import", hosted / "index.json", "--hardware", "h200")
    assert KEY in keys(store)
    err = run("import", hosted / "index.json", "--hardware", "A100", status=1)[1]
    assert f"has no records of A100; --hardware selects one of its chips: {H200.id}, {CPU.id}" in err


def test_an_index_says_of_each_file_what_is_in_it(hosted):
    index = json.loads((hosted / "index.json").read_text())
    assert (index["format"], index["package"]) == (1, scheduler.__version__)
    assert [file["name"].partition("/")[2] for file in index["files"]] == [
        "matmul.jsonl",
        "softmax.jsonl",
        "matmul.jsonl",
    ]
    for file in index["files"]:
        assert file["sha256"] == hashlib.sha256((hosted / file["name"]).read_bytes()).hexdigest()
        assert file["records"] == 1
        assert (file["date"], file["jax"]) == (ENVIRONMENT.date, [ENVIRONMENT.jax])
    assert {file["hardware"] for file in index["files"]} == {CPU.id, H200.id}


def test_a_file_that_was_changed_after_its_index_imports_nothing_of_the_others(hosted, url, store):
    (file,) = hosted.glob("cpu*/softmax.jsonl")
    file.write_text(file.read_text().replace('"tried": 60', '"tried": 61'))
    assert "SHA-256" in run("import", f"{url}/index.json", status=1)[1]
    assert keys(store) == set()
    digest = hashlib.sha256((hosted / "index.json").read_bytes()).hexdigest()
    run("export", hosted, "--index")
    assert "SHA-256" in run("import", f"{url}/index.json", "--sha256", digest, status=1)[1]
    run("import", f"{url}/index.json")
    assert len(keys(store)) == 2


@pytest.mark.parametrize("name", ["../m.jsonl", "/etc/m.jsonl", "https://other/m.jsonl", "a/../../m", "a//b", "", ".x"])
def test_an_index_that_leads_out_of_its_directory_is_refused(name, hosted, store):
    index = json.loads((hosted / "index.json").read_text())
    index["files"][0]["name"] = name
    (hosted / "index.json").write_text(json.dumps(index))
    assert "must be a path below the index" in run("import", hosted / "index.json", status=1)[1]
    assert keys(store) == set()


def test_an_index_that_gives_a_file_to_another_chip_is_refused(hosted, store):
    index = (hosted / "index.json").read_text()
    (hosted / "index.json").write_text(index.replace(H200.id, CPU.id))
    assert f"has records of {H200.id}, unlike its index says" in run("import", hosted / "index.json", status=1)[1]
    assert keys(store) == set()


def test_an_incomplete_download_imports_nothing(hosted, url, store, monkeypatch):
    two = hosted / "two.jsonl"
    two.write_text(text_files.export_text([record(HERE), record(KEY)]))
    assert "is incomplete" in run("import", f"{url}/cut/two.jsonl", status=1)[1]
    monkeypatch.setattr(sources, "RESPONSE_S", 0.05)
    assert "cannot be read: timed out" in run("import", f"{url}/slow/two.jsonl", status=1)[1]
    monkeypatch.setattr(sources, "RESPONSE_S", 30.0)
    with pytest.raises(scheduler.SchedulerError, match="is larger than 100 bytes"):
        sources.read(f"{url}/plain/two.jsonl", 100)
    assert keys(store) == set()
    run("import", f"{url}/plain/two.jsonl")
    assert keys(store) == {HERE, KEY}


def test_a_place_that_cannot_be_read_is_a_sentence(hosted, url):
    for place, complaint in [
        (f"{url}/nothing.jsonl", "the server answered HTTP 404"),
        ("http://127.0.0.1:1/m.jsonl", "Connection refused"),
        ("s3://bucket/m.jsonl", "https://, http:// or file://, not s3://"),
        ("file://host/m.jsonl", "write file:///path"),
        ("https://me:secret@example.com/m.jsonl", "must not contain a user or a password"),
        (hosted / "nothing.jsonl", "No such file or directory"),
    ]:
        _, err = run("import", place, status=1)
        assert complaint in err
        assert "secret" not in err
    (hosted / "index.json").write_text("{}")
    assert "is not an index of records: format is missing" in run("import", f"{url}/index.json", status=1)[1]


def test_a_redirect_does_not_lead_from_https_to_http_or_to_a_file():
    for start, to in [("https://a/x", "http://a/x"), ("http://a/x", "ftp://a/x"), ("https://a/x", "file:///etc/x")]:
        with pytest.raises(urllib.error.URLError, match="it redirects to"):
            sources._SafeRedirects().redirect_request(urllib.request.Request(start), None, 302, "", {}, to)
    followed = sources._SafeRedirects().redirect_request(
        urllib.request.Request("http://a/x"), None, 302, "", {}, "https://b/x"
    )
    assert followed.full_url == "https://b/x"


# What an imported record is worth


def test_an_import_replaces_an_earlier_import_and_nothing_that_was_measured_here(hosted, store):
    own = dataclasses.replace(record(HERE), tried=5)
    store.put(own)
    assert "2 are left out" not in run("import", hosted / "index.json")[1]
    assert store.get(HERE) == own
    store.put_all([dataclasses.replace(record(KEY), tried=1, imported=MARK)])
    (file,) = hosted.glob("nvidia*/matmul.jsonl")
    run("import", file)
    assert store.get(KEY).tried == record().tried
    assert store.get(KEY).imported.source == str(file)


def test_what_shows_an_imported_record_says_that_it_is_not_verified(store):
    given = record(key_of(MATMUL, MatmulProblem(256, 256, 512), H200))
    store.put(dataclasses.replace(given, imported=MARK))
    fields = ["m=256", "n=256", "k=512", "dtype=bfloat16"]
    for command in (["list"], ["show", "matmul", *fields]):
        out, _ = run(*command)
        assert "not verified here" in out
        (row,) = [row for row in json.loads(run_json(*command)) if row["where"] != "shipped"]
        assert row["imported"] == dataclasses.asdict(MARK)
    assert MARK.source in run("show", "matmul", *fields)[0]
    assert "not verified here" in str(store.get(given.key))
    out, err = run("export")
    assert out == " ".join(text_files.export_text([given]).split())
    assert "1 of 1 records were imported, and not verified here" in err


def run_json(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout


WINNER = {"tile": 2, "copy": 3}


class Told(InProcess):
    """One millisecond for the imported winner, and more for others; notes what is measured."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def measure(self, task, *, again=False):
        self.asked += [dict(task.schedule)]
        time_s = 1e-3 if dict(task.schedule) == WINNER else 2e-3
        return Measurement(time_s, (time_s,) * task.repetitions, "wall", "warm")

    def confirm(self, task):
        return None


def imported_paced():
    made = record(key_of(PACED, DoubleProblem(n=8), CPU), Measurement(1.0, (1.0,), "wall", "warm"))
    winner, library = made.entries
    winner = dataclasses.replace(winner, backend="scripted", version=1, schedule=WINNER)
    return dataclasses.replace(
        made, entries=(winner, library), versions={"scripted": 1, "xla": 1}, space=20, imported=MARK
    )


def test_a_search_measures_an_imported_schedule_first_and_stores_its_own_record(store):
    given, runner = imported_paced(), Told()
    store.put(given)
    assert is_current(Task(PACED, DoubleProblem(n=8)), CPU, store) == "it was imported, and not verified here"
    made = tune(PACED, DoubleProblem(n=8), budget=4, store=store, runner=runner)
    assert runner.asked[:2] == [{}, WINNER]
    assert (made.winner.schedule, made.imported) == (WINNER, None)
    assert store.get(given.key) == made


def test_verify_times_an_imported_record_that_no_call_may_use_yet():
    given = imported_paced()
    assert "paced" not in (reason := recheck(PACED, DoubleProblem(n=8), CPU, given))
    assert f"imported from {MARK.source}" in reason
    (verdict,) = reverify([given], operation=PACED, runner=Told())
    assert (verdict.state, verdict.refreshed.imported) == ("holds", None)
    assert verdict.refreshed.winner.measurement.median_s == 1e-3
    assert recheck(PACED, DoubleProblem(n=8), CPU, verdict.refreshed) == verdict.refreshed.winner


def test_an_imported_winner_with_wrong_results_here_is_not_in_the_record_that_verify_stores():
    class Wrong(Told):
        def confirm(self, task):
            return Failure("verify", "1 of 8 is off") if dict(task.schedule) == WINNER else None

    (verdict,) = reverify([imported_paced()], operation=PACED, runner=Wrong())
    assert (verdict.state, verdict.refreshed.imported) == ("broken", None)
    assert WINNER not in [dict(entry.schedule) for entry in verdict.refreshed.entries]


def test_an_interrupted_search_resumes_after_an_import(store, hosted):
    store.save_trials(HERE, [trial()], ENVIRONMENT)
    run("import", hosted / "index.json")
    assert len(store.trials(HERE, ENVIRONMENT, unfinished=True)) == 1
    store.put(record(HERE))
    assert store.trials(HERE, ENVIRONMENT, unfinished=True) == []


@pytest.mark.slow
def test_the_command_verify_stores_its_times_in_place_of_an_import(store):
    problem = MatmulProblem(32, 32, 32, "float32")
    choice = predict(MATMUL, problem, CPU, backends=frozenset({"interpret"}))
    given = record(key_of(MATMUL, problem, CPU), Measurement(9.0, (9.0,), "wall", "warm"))
    winner, library = given.entries
    winner = dataclasses.replace(winner, backend="interpret", version=1, schedule=choice.schedule)
    versions = {kernel.backend: kernel.version for kernel in MATMUL.kernels}
    store.put(dataclasses.replace(given, entries=(winner, library), versions=versions, imported=MARK))
    fields = ["m=32", "n=32", "k=32", "dtype=float32"]
    assert "run tile-scheduler verify" in run("explain", "matmul", *fields)[0]
    assert "1 records with today's times are stored" in run("verify", "--within", 10000)[0]
    assert store.get(given.key).imported is None
    assert 0 < store.get(given.key).winner.measurement.median_s < 1
    assert "imported" not in run("explain", "matmul", *fields)[0]


def test_a_call_prefers_verified_records_and_then_imported_ones_of_verified_kernels(store, monkeypatch):
    measured = next(
        one for one in shipped().records(operation="matmul", hardware=H200.id) if one.winner.backend == "mosaic_gpu"
    )
    runner_up = next(entry for entry in measured.entries[1:] if entry.backend == "mosaic_gpu")
    problem = MatmulProblem.from_canonical(measured.key.problem)
    claimed = dataclasses.replace(measured, entries=(runner_up, measured.winner), imported=MARK)
    store.put(claimed)

    def decided(of):
        scheduler.reload()
        return dispatch.decide(MATMUL, of, "cuda", dispatch.options(MATMUL, target=H200.kind))

    assert decided(problem).reason == "measured, from the shipped cache.db"
    new = dataclasses.replace(problem, n=problem.n + 8 * 131)
    store.put(dataclasses.replace(claimed, key=key_of(MATMUL, new, H200)))
    assert decided(new).reason == "measured elsewhere, not verified here, from the user's cache"
    assert decided(new).missed is None
    monkeypatch.setattr(type(MATMUL.kernel("mosaic_gpu")), "verified_on", frozenset())
    assert decided(new).missed is not None
    assert decided(new).reason.startswith(f"measured at {problem}")  # not the claim
    assert decided(problem).kernel.backend == "mosaic_gpu"


def test_an_imported_estimate_has_the_last_precedence():
    estimate = record(measurement=Measurement(1e-4, (1e-4,), "static", "cold"))
    order = [record(), dataclasses.replace(record(), imported=MARK), estimate]
    order += [dataclasses.replace(estimate, imported=MARK)]
    assert [one.precedence for one in order] == [0, 1, 2, 3]
    for place, one in enumerate(order):
        with contextlib.closing(Store(":memory:")) as store:
            store.put(one)
            store.put_all(order[place + 1 :])
            assert store.get(KEY) == one
            store.put_all(order[place::-1])
            assert store.get(KEY) == order[0]


# What is checked before records are shared


def shared(tmp_path, change=lambda line: line):
    """A file with one shipped record, its text changed; measured by a JAX that is older than all that run tests."""
    one = next(shipped().records(operation="matmul", hardware=H200.id))
    old = dataclasses.replace(one, environment=dataclasses.replace(one.environment, jax="0.10.0"))
    file = tmp_path / "shared.jsonl"
    file.write_text(change(codec.record_to_text(old)) + "\n")
    return file


def changed(line, change):
    fields = json.loads(line)
    change(fields)
    return json.dumps(fields)


def slower(fields):
    for entry in fields["entries"]:
        entry["measurement"]["samples_s"] = [20 * s for s in entry["measurement"]["samples_s"]]
        entry["measurement"]["median_s"] *= 20


def faster(fields):
    measurement = fields["entries"][0]["measurement"]
    measurement["samples_s"] = [s / 100 for s in measurement["samples_s"]]
    measurement["median_s"] = sorted(measurement["samples_s"])[0]
    measurement["samples_s"] = [measurement["median_s"]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda line: line[:-20], "line 1: schema: invalid JSON"),
        (lambda line: line.replace('"m": ', '"m":  '), "schema: the text differs from what export writes"),
        (lambda line: changed(line, lambda f: f["problem"].update(q=1)), "schema: "),
        (
            lambda line: changed(line, lambda f: f.update(operation="os:system")),
            "operation 'os:system' is code",
        ),
        (lambda line: changed(line, lambda f: f.update(hardware="Toaster")), "schema: Toaster is not in the table"),
        (lambda line: changed(line, lambda f: f.update(imported=vars(MARK))), "schema: it has the mark of an import"),
        (
            lambda line: changed(line, lambda f: f["entries"][0]["measurement"].update(median_s=1e-9)),
            "schema: median_s of",
        ),
        (lambda line: f"{line}\n{line}", "line 2: schema: a second record of"),
        (lambda line: changed(line, lambda f: f["entries"][0]["schedule"].update(tile_k=7)), "legality: "),
        (lambda line: changed(line, lambda f: f["versions"].update(xla=99)), "version 99 was measured"),
        (lambda line: changed(line, slower), "is predicted: the limit is a factor of"),
        (lambda line: changed(line, faster), "no kernel can take under"),
    ],
)
def test_a_record_that_should_not_be_shared_is_named_with_the_reason(change, reason, tmp_path):
    assert "1 records pass" in run("check-records", shared(tmp_path))[1]
    out, err = run("check-records", shared(tmp_path, change), status=1)
    assert reason in out
    assert "records should not be shared" in err


def test_a_directory_is_checked_with_its_index(hosted):
    for file in hosted.glob("*/*.jsonl"):
        file.unlink()
    (line,) = shared(hosted).read_text().splitlines()
    text_files.add_records(hosted, [codec.record_from_text(line)])
    assert "does not describe the files" in run("check-records", hosted, status=1)[1]
    run("export", hosted, "--index")
    assert "1 records pass" in run("check-records", hosted)[1]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="some shipped kernels need JAX 0.11")
def test_the_shipped_records_pass():
    count = len(text_files.read_records(ROOT / "records"))
    assert f"{count} records pass" in run("check-records", ROOT / "records")[1]
