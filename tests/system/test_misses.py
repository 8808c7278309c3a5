"""What calls missed: what no record answered is noted each time, with its line, and no call waits or fails by it."""

import contextlib
import os
import py_compile
import runpy
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import values
from modes import frozen
from operations import DOUBLE
from processes import gone
from test_waits import locked_file, silent_server

import scheduler
from scheduler import tuned, tuned_matmul
from scheduler.core.errors import CacheMiss
from scheduler.core.frames import Call, asked_by
from scheduler.core.records import Key, Miss
from scheduler.dispatch import dispatch
from scheduler.store import misses
from scheduler.store.misses import KEPT, MOST
from scheduler.store.store import Store, default_url
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
A = jnp.ones((8, 8))
P8 = MatmulProblem(8, 8, 8, dtype="float32").canonical()


@pytest.fixture(autouse=True)
def _noting(_own_cache, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    monkeypatch.setattr(misses, "_writer", misses._Writer())
    monkeypatch.setattr(misses, "BATCH_S", 0.05)
    scheduler.reload()
    yield
    assert misses.flush_misses(600)


def noted(url=None):
    """Every miss, once what was noted is written."""
    assert misses.flush_misses(600)
    with contextlib.closing(Store(url or default_url())) as store:
        return store.misses.all()


def here():
    """The line that asks, as a miss has it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def layer(x, **how):
    return tuned_matmul(x, x, **how)


LAYER = f"{__file__}:{layer.__code__.co_firstlineno + 1}"


def miss(problem=values.KEY.problem, lowered=1, last="2026-03-01T12:00:00Z", operation="matmul", line="model.py:41"):
    return Miss(Key(operation, values.KEY.hardware, problem), lowered, "2026-03-01T12:00:00Z", last, line)


# What is noted


@pytest.mark.parametrize("on_miss", ["model", "xla"])
def test_each_lowering_without_a_record_is_noted_with_the_line_that_asked(on_miss):
    for number in range(3):  # the first decides, the others are answered from memory
        jax.jit(lambda x, number=number: layer(x, on_miss=on_miss) + number)(A)
    (found,) = noted()
    assert (found.key.operation, found.key.problem, found.lowered, found.line) == ("matmul", P8, 3, LAYER)
    assert found.first <= found.last
    assert found.key.hardware.startswith("cpu")


def test_an_error_is_a_miss_too_and_stays_the_error_it_is():
    for _ in range(2):
        with pytest.raises(CacheMiss, match="tile-scheduler tune matmul m=8 n=8 k=8"):
            layer(A, on_miss="error")
    assert [(one.lowered, one.line) for one in noted()] == [(2, LAYER)]


def test_a_call_that_is_compiled_already_notes_nothing():
    jitted = jax.jit(layer)
    for _ in range(5):
        layer(A)
        jitted(A)
    assert [one.lowered for one in noted()] == [2]


def test_what_a_record_answers_and_what_asks_for_none_is_no_miss():
    scheduler.tune("matmul", {"m": 8, "n": 8, "k": 8, "dtype": "float32"}, budget=1)
    layer(A)
    layer(A, backends="xla")
    tuned_matmul(A[:4], A, on_miss="tune")
    jax.jit(lambda x: tuned_matmul(x, x.astype("bfloat16")))(A)
    assert noted() == []


def test_the_line_is_the_users_however_a_call_is_transformed():
    layer(A)
    jax.grad(lambda x: layer(x).sum())(A)
    jax.jit(lambda x: jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=3))(A)
    jax.vmap(layer)(jnp.ones((3, 8, 8)))
    found = noted()
    assert len(found) == 4  # the product, both of its backward pass, and that of a batch
    assert {one.line for one in found} == {LAYER}


def test_an_eager_call_has_the_line_that_made_it_in_whatever_thread():
    lines = []

    def call():
        lines.append(here()), tuned_matmul(A[:3], A)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [one.line for one in noted()] == lines


def test_the_line_of_code_without_sources_is_where_they_were(tmp_path):
    source = tmp_path / "model.py"
    source.write_text("from scheduler import tuned_matmul\n\n\ndef forward(x):\n    return tuned_matmul(x, x)\n")
    compiled = py_compile.compile(str(source), cfile=str(tmp_path / "bare.pyc"))
    source.unlink()
    jax.jit(runpy.run_path(compiled)["forward"])(A)
    assert [one.line for one in noted()] == [f"{source}:5"]


def test_a_users_own_line_comes_before_that_of_an_installed_library():
    installed = next(path for path in sys.path if path.endswith("site-packages"))
    model, jax_own = (f"{installed}/models/linear.py", 7, "call"), (f"{installed}/jax/_src/api.py", 1, "jit")
    ours, users = (str(ROOT / "scheduler" / "api.py"), 100, "tuned"), ("/home/me/train.py", 3, "step")
    assert asked_by([jax_own, ours, model, users]) == Call(*users, "user")
    assert asked_by([jax_own, ours, model]) == Call(*model, "user")
    assert asked_by([jax_own, ours, ("<stdin>", 1, "<module>")]) is None


def test_an_operation_of_ones_own_is_noted_with_the_name_to_load_it_by():
    tuned(DOUBLE)(jnp.ones(8))
    assert [(one.key.operation, one.place) for one in noted()] == [("double", "operations:DOUBLE")]


def test_a_chip_that_is_not_here_has_misses_of_its_own():
    shape = jax.ShapeDtypeStruct((3001, 3001), jnp.bfloat16)
    with scheduler.target("NVIDIA H200"):
        jax.jit(layer).trace(shape).lower(lowering_platforms=("cuda",))
    assert [one.key.hardware for one in noted()] == ["NVIDIA H200 (132 cores, 140 GiB)"]


@pytest.mark.parametrize("word", ["off", "OFF", "0"])
def test_the_environment_turns_it_off(word, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", word)
    layer(A)
    assert misses.flush_misses(600)
    assert not Path(default_url()).exists()


# What a store keeps


@pytest.mark.parametrize("kind", ["file", "memory", "postgres"])
def test_misses_are_counted_and_forgotten_by_their_keys(kind, tmp_path, request):
    url = {"file": tmp_path / "own.db", "memory": ":memory:"}.get(kind) or request.getfixturevalue("postgres")
    with contextlib.closing(Store(url)) as store:
        assert store.misses.all() == []
        store.misses.note([miss("b", 2), miss("a", last="2026-03-02T00:00:00Z", line="")])
        store.misses.note([miss("a", 5, line="new.py:1")])
        assert store.misses.all() == [miss("a", 6, "2026-03-02T00:00:00Z", line="new.py:1"), miss("b", 2)]
        store.misses.note([miss("a", line="")])
        assert store.misses.all()[0].line == "new.py:1"
        assert store.misses.forget([miss("a").key, miss("c").key]) == 1
        assert store.misses.all() == [miss("b", 2)]
        assert store.misses.forget([miss("b").key]) == 1


def test_of_ten_thousand_problems_the_rarest_and_oldest_go():
    with contextlib.closing(Store(":memory:")) as store:
        store.misses.note([miss("often", 7, "2020-01-01T00:00:00Z")])
        for batch in range(3):
            store.misses.note(miss(f"{batch} {i}", 1, f"2026-03-0{batch + 1}T00:00:00Z") for i in range(4000))
        kept = {one.key.problem for one in store.misses.all()}
    assert len(kept) == KEPT < MOST
    assert "often" in kept
    assert {name[0] for name in kept - {"often"}} == {"0", "1", "2"}
    assert sum(name[0] == "0" for name in kept) == KEPT - 1 - 8000


def test_ten_thousand_distinct_problems_are_noted_without_a_call_that_waits(monkeypatch):
    written, write, writer = threading.Event(), misses._Writer._write, misses._writer

    def write_later(self, store):
        written.wait()
        write(self, store)

    monkeypatch.setattr(misses._Writer, "_write", write_later)
    cache = dispatch.user_cache()
    for number in range(MOST):
        cache.note(miss(str(number)))  # none of which is written before all have returned
    assert writer.started
    written.set()
    assert len(noted()) == MOST


def test_a_name_of_a_file_may_be_any_bytes():
    with contextlib.closing(Store(":memory:")) as store:
        store.misses.note([miss(line="a\udcff\0.py:1")])
        assert [one.line for one in store.misses.all()] == ["a?.py:1"]


def test_rows_that_mean_nothing_are_skipped(tmp_path, caplog):
    path = tmp_path / "own.db"
    with contextlib.closing(Store(path)) as store:
        store.misses.note([miss("a"), miss("b"), miss("c")])
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE misses SET lowered = 'many' WHERE problem = 'a'")
            connection.execute("UPDATE misses SET problem = x'ff' WHERE problem = 'b'")
        assert store.misses.all() == [miss("c")]
    assert "is skipped, expected a number and four texts" in caplog.text


# What goes wrong


@pytest.fixture
def silent():
    """Nothing is said of what nobody asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_store_that_may_only_be_read_costs_nothing(open_path, monkeypatch, silent):
    Store(open_path).put(values.record())
    before = open_path.read_bytes()
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(open_path))
    scheduler.reload()
    with frozen(open_path):
        assert (layer(A) == 8).all()
        assert misses.flush_misses(600)
    assert open_path.read_bytes() == before


def test_a_place_that_cannot_be_made_costs_nothing(tmp_path, monkeypatch, silent):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "file" / "cache.db"))
    scheduler.reload()
    assert (layer(A) == 8).all()
    assert misses.flush_misses(600)


def test_a_store_that_is_full_costs_nothing(silent):
    with contextlib.closing(Store(":memory:")) as store:
        store.put(values.record())
        with store._database._engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        for number in range(100):
            misses.queue_misses(store, miss(str(number), line="x" * 1000))
        assert misses.flush_misses(600)
        assert store.get(values.KEY) == values.record()


def test_a_store_that_refuses_is_asked_a_few_times_and_then_nothing_is_kept_for_it(monkeypatch):
    monkeypatch.setattr(misses, "RETRY_S", 0.01)
    asked = []

    class Refusing:
        location = "nowhere"

        class misses:  # noqa: N801
            @staticmethod
            def note(batch):
                asked.append(len(batch))
                raise scheduler.StoreError("no")

    store, writer = Refusing(), misses._writer
    while len(asked) < misses.WRITE_ATTEMPTS:
        misses.queue_misses(store, miss(str(len(asked))))
        time.sleep(0.01)
    assert misses.flush_misses(600)
    assert writer._waiting == {}
    misses.queue_misses(store, miss())
    assert writer._came.empty()
    assert asked[-1] >= 1


def test_what_a_locked_store_was_to_be_told_it_is_told_later(tmp_path):
    with locked_file(tmp_path / "own.db"):
        store = Store(tmp_path / "own.db")
        for _ in range(5):
            misses.queue_misses(store, miss())  # which, if it waited, would do so for longer than this file is locked
        assert not misses.flush_misses(0.3)
    assert misses.flush_misses(600)
    assert [one.lowered for one in store.misses.all()] == [5]


CALL = """
import os, sys, time
import jax.numpy as jnp
from scheduler import tuned_matmul
a = jnp.ones((8, 8))
for m in map(int, sys.argv[1:]):
    assert (tuned_matmul(a[:m], a, on_miss="xla") == 8).all()
"""


def script(tmp_path, text=CALL):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more


def started(path, *arguments, **more):
    command = [sys.executable, "-W", "error::RuntimeWarning", str(path), *map(str, arguments)]
    return subprocess.Popen(command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_note_at_once_and_what_they_noted_is_there_when_they_end(tmp_path):
    path = script(tmp_path)
    processes = [started(path, 1, 2, own) for own in (3, 4)]
    for process in processes:
        _, err = process.communicate()
        assert (process.returncode, err) == (0, "")
    counts = {MATMUL.problem.from_canonical(one.key.problem).m: one.lowered for one in noted()}
    assert counts == {1: 2, 2: 2, 3: 1, 4: 1}
    assert {one.line for one in noted()} == {f"{path}:7"}


@pytest.mark.parametrize("what", ["a server that never answers", "a file that another process has locked"])
def test_a_process_ends_in_time_though_its_store_does_not_answer(what, tmp_path):
    if what == "a server that never answers":
        pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")
    path = script(
        tmp_path, "import warnings\nwarnings.simplefilter('ignore')\n"
        "from scheduler.store import database\ndatabase.BUSY_TIMEOUT_S = 3600\n" + CALL
    )  # fmt: skip
    with silent_server() if "server" in what else locked_file(tmp_path / "own.db") as url:
        process = started(path, 1, TILE_SCHEDULER_CACHE=str(url))
        _, err = process.communicate()  # where the process waited for its store, the test's own limit ends it
    assert process.returncode == 0, err


def test_a_process_that_is_killed_leaves_what_it_had_written(tmp_path):
    text = CALL + "from scheduler.store import misses\nassert misses.flush_misses(600)\n"
    text += "print(os.getpid(), flush=True)\n"
    process = started(script(tmp_path, text + "time.sleep(600)\n"), 1, 2)
    pid = int(process.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    process.communicate()
    assert [one.lowered for one in noted()] == [1, 1]


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # of JAX, which is multithreaded
import misses_of_a_fork as shared
from scheduler.store import misses
from scheduler.store.store import Store, default_url
store = Store(default_url())
misses.queue_misses(store, shared.miss("before"))
if not (pid := os.fork()):
    misses.queue_misses(store, shared.miss("child"))
    os._exit(not misses.flush_misses(600))
misses.queue_misses(store, shared.miss("parent"))
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_fork_notes_what_it_misses_itself_and_no_more(tmp_path):
    (tmp_path / "misses_of_a_fork.py").write_text(
        "from scheduler.core.records import Key, Miss\n"
        "def miss(problem):\n    return Miss(Key('matmul', 'cpu', problem), 1, 'now', 'now')\n"
    )
    process = started(script(tmp_path, FORK))
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert {one.key.problem: one.lowered for one in noted()} == {"before": 1, "child": 1, "parent": 1}


FORK_OF_A_WRITER = """
import os, time, warnings
warnings.simplefilter("ignore")
from scheduler.core.records import Key, Miss
from scheduler.store import misses
from scheduler.store import database
from scheduler.store.store import Store, default_url
database.BUSY_TIMEOUT_S = 3600  # who waits for the end of the write waits for ever
misses.queue_misses(Store(default_url()), Miss(Key("matmul", "cpu", "{}"), 1, "now", "now"))
while not misses._writer.writing.locked():
    time.sleep(0.01)
if not (pid := os.fork()):
    os._exit(misses._writer.writing.locked())
assert os.waitpid(pid, 0)[1] == 0
assert misses._writer.writing.locked()  # by its thread still
"""


def test_a_fork_does_not_wait_for_a_write_that_does_not_end(tmp_path):
    with locked_file(tmp_path / "own.db") as url:
        process = started(script(tmp_path, FORK_OF_A_WRITER), TILE_SCHEDULER_CACHE=str(url))
        _, err = process.communicate()
    assert process.returncode == 0, err
