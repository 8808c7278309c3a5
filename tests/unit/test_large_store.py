"""A store of thousands of records: what asks for one problem reads few of them, and finds what reading all would."""

import contextlib
import dataclasses
import itertools
import json
import random
import sqlite3

import jax.numpy as jnp
import pytest
import sqlalchemy as sa
import values
from many_records import fill, record_of
from operations import DOUBLE, DoubleProblem
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core import codec
from scheduler.core.hardware import CPU, identified
from scheduler.core.neighbours import place_of
from scheduler.core.records import Key
from scheduler.inspect.provenance import order_of
from scheduler.prediction.transfer import MOST_SPELLINGS, near, nearest, telling_records
from scheduler.store import cache
from scheduler.store.database import Database
from scheduler.store.store import Store, default_url, shipped
from search_spaces import load
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

MANY = 600


def run(*arguments, status=0):
    """Standard output, standard error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


class Work:
    """What was read of stores: rows, and records made of their text."""

    rows = decoded = 0


@pytest.fixture
def work(monkeypatch):
    work, select, decode = Work(), Database.select, codec.record_from_text

    def counted_select(self, *query):
        found = select(self, *query)
        work.rows += len(found)
        return found

    def counted_decode(line):
        work.decoded += 1
        return decode(line)

    monkeypatch.setattr(Database, "select", counted_select)
    monkeypatch.setattr(codec, "record_from_text", counted_decode)
    return work


@pytest.fixture
def many():
    """The user's own store with many records of one operation on this chip."""
    with contextlib.closing(Store(default_url())) as store:
        fill(store, MATMUL, (MatmulProblem(8, 16, 25 + 2 * i, dtype="float32") for i in range(MANY)), CPU)
        yield store
    scheduler.reload()


# Similar problems


def drawn_matmul(draw):
    extents = (int(2 ** draw.uniform(4, 6)) for _ in range(3))
    more = {"batch": draw.choice((1, 1, 2, 3)), "transpose_b": draw.random() < 0.2}
    return MatmulProblem(*extents, dtype=draw.choice(("float32", "bfloat16")), **more)


def drawn_attention(draw):
    batch, q_len, kv_len = draw.choice((1, 2, 4)), draw.choice((1, 16)), int(2 ** draw.uniform(5, 7))
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 4))
    more = {"head_dim_v": draw.choice((0, 32)), "causal": draw.random() < 0.5}
    return FlashAttentionProblem(batch, q_len, kv_len, heads, kv_heads, 64, **more)


@pytest.mark.parametrize(("operation", "drawn"), [(MATMUL, drawn_matmul), (FLASH_ATTENTION, drawn_attention)])
@pytest.mark.parametrize("within", [0.25, 1, 3])
def test_an_index_finds_the_records_that_a_look_at_all_finds(operation, drawn, within):
    draw = random.Random(f"{operation.name} {within}")
    with contextlib.closing(Store(":memory:")) as store:
        records = fill(store, operation, (drawn(draw) for _ in range(300)), CPU)
        found = 0
        for problem in [drawn(draw) for _ in range(40)]:
            expected = nearest(operation, problem, CPU, records, within=within)
            asked = store.nearest(near(operation, problem, CPU, within=within))
            assert asked == [one.record for one in expected], str(problem)
            found += len(asked)
    assert found


def test_arrays_and_parameters_of_a_function_of_ones_own_are_similar_by_their_numbers():
    @scheduler.autotune(reference=lambda x, *, block=16: x, tile=(8, 16), name="padded")
    def padded(x, *, tile, block=16):
        return x

    operation = padded.operation

    def problem(x, **more):
        return operation.problem.parse({"x": x, **more})

    here = problem("float32[64,128]")
    others = ["float32[64,160]", "float32[96,128]", "float32[64,128,1]", "bfloat16[64,128]", "float32[64,1024]"]
    problems = [problem(x) for x in others] + [problem("float32[64,128]", block=b) for b in ("24", "64", "True")]
    with contextlib.closing(Store(":memory:")) as store:
        records = fill(store, operation, problems, CPU)
        for one in (here, problem("float32[64,128]", block="24")):
            expected = [each.record for each in nearest(operation, one, CPU, records, within=1)]
            assert store.nearest(near(operation, one, CPU, within=1)) == expected
            assert expected


def test_only_the_numbers_of_a_text_are_coordinates():
    def pattern(text):
        return place_of(text).pattern

    assert pattern('{"dtype":"float32","k":8,"m":9}') == pattern('{"dtype":"float32","k":1024,"m":1}')
    assert pattern('{"x":"float32[64,128]"}') == pattern('{"x":"float32[1,7]"}')
    assert pattern('{"block":"16"}') == pattern('{"block":"24"}')
    assert place_of('{"k":8,"m":4}').sums == (3.0, 2.0, 0.0, 0.0)
    assert place_of('{"a":2,"b":2,"c":2,"d":2,"e":16}').sums == (5.0, 1.0, 1.0, 1.0)
    alone = ['{"dtype":"float32"}', '{"dtype":"float16"}', '{"x":"float32[4]"}', '{"x":"float32[4,4]"}', '{"k":-1}']
    alone += ['{"k":-2}', '{"k":0}', '{"k":true}', '{"sizes":"4096+1024"}', '{"sizes":"4096+2048"}', "nonsense", ""]
    assert len(set(map(pattern, alone))) == len(alone)


def test_numbers_that_may_be_left_out_do_not_multiply_without_end():
    fields = [(f"f{i}", int, dataclasses.field(default=i + 2)) for i in range(12)]
    many_fields = dataclasses.make_dataclass("ManyFields", fields, bases=(DoubleProblem,), frozen=True)
    spellings = near(DOUBLE, many_fields(8), CPU, within=1).spellings
    assert len(spellings) == len({text for text, _ in spellings}) <= 2 * MOST_SPELLINGS
    assert spellings[0] == (many_fields(8).canonical(), 0.0)


def test_a_similar_record_that_cannot_be_read_leaves_its_place_to_the_next(tmp_path):
    path = tmp_path / "own.db"
    with contextlib.closing(Store(path)) as store:
        records = fill(store, DOUBLE, map(DoubleProblem, (9, 10, 11, 12)), CPU)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE schedules SET record = '{}' WHERE problem = ?", (records[0].key.problem,))
        assert store.nearest(near(DOUBLE, DoubleProblem(8), CPU, within=1)) == records[1:]


@pytest.mark.parametrize("kind", ["file", "postgres"])
def test_what_another_process_adds_is_found_at_once(kind, tmp_path, request):
    question = near(DOUBLE, DoubleProblem(8), CPU, within=1, most=1)
    place = tmp_path / "own.db" if kind == "file" else request.getfixturevalue("postgres")
    with contextlib.closing(Store(place)) as store, contextlib.closing(Store(place)) as other:
        (far,) = fill(other, DOUBLE, [DoubleProblem(12)], CPU)
        assert store.nearest(question) == [far]
        (close,) = fill(other, DOUBLE, [DoubleProblem(9)], CPU)
        assert store.nearest(question) == [close]
        assert store.nearest(question, estimated=True) == []
        assert [head.key for head in store.heads(problem=close.key.problem)] == [close.key]
        assert list(store.read([far.key, close.key])) == [far, close]
        other.forget(close.key)
        assert store.nearest(question) == [far]
        assert store.unfinished() == {}
        other.forget(far.key)


def test_what_was_measured_tells_before_estimates_however_near_these_are():
    with contextlib.closing(Store(":memory:")) as store:
        estimates = [record_of(DOUBLE, DoubleProblem(n), CPU, estimated=True) for n in (9, 10, 11)]
        store.put_all(estimates)
        assert telling_records(store, DOUBLE, DoubleProblem(8), CPU) == estimates
        (measured,) = fill(store, DOUBLE, [DoubleProblem(15)], CPU)
        assert telling_records(store, DOUBLE, DoubleProblem(8), CPU) == [measured]
        assert [one.key.problem for one in store.nearest(near(DOUBLE, DoubleProblem(8), CPU, within=1))] == [
            one.key.problem for one in estimates
        ]


def test_every_shipped_record_has_its_place():
    with contextlib.closing(shipped()) as store:
        for record in store.records():
            operation = load(record.key.operation)
            problem = operation.problem.from_canonical(record.key.problem)
            alike = list(store.records(operation=record.key.operation, hardware=record.key.hardware))
            expected = nearest(operation, problem, identified(record.key.hardware), alike, within=1)
            question = near(operation, problem, identified(record.key.hardware), within=1)
            assert store.nearest(question) == [one.record for one in expected]
        heads = {head.key: head.estimated for head in store.heads()}
        assert heads == {record.key: record.estimated for record in store.records()}


def test_similar_problems_and_searches_cut_short_are_found_by_an_index(tmp_path):
    statements = []
    with contextlib.closing(Store(tmp_path / "own.db")) as store:
        store.put(values.record())
        sa.event.listen(store._database._engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
        store.nearest(near(DOUBLE, DoubleProblem(8), CPU, within=1))
        store.unfinished()
        with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as connection:
            plans = [
                " ".join(row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", given))
                for text, given in statements
                if "schedules" in text or "searches" in text
            ]
    assert any("INDEX schedules_by_place (operation=? AND hardware=? AND pattern=?" in each for each in plans)
    assert any("INDEX searches_unfinished" in each for each in plans)
    assert not any(each.startswith("SCAN schedules") for each in plans)


# What is read


def test_a_missed_shape_reads_a_few_records_however_many_there_are(many, work):
    for k in (30, 300, 900):
        work.rows = work.decoded = 0
        scheduler.tuned_matmul(jnp.ones((9, k)), jnp.ones((k, 16)))
        assert work.decoded <= 9, k  # three, by at most three of the queries that search ever farther
        assert work.rows < MANY / 2, k


def test_a_healthy_store_is_not_given_up_over_misses(many, monkeypatch):
    monkeypatch.setattr(cache, "PROMPT_S", 0.0)  # every question counts
    waited = []
    monkeypatch.setattr(cache, "_worked_s", lambda thread: waited.append(thread) or 1e9)  # all of it was work
    for k in range(30, 60, 2):
        scheduler.tuned_matmul(jnp.ones((8, k)), jnp.ones((k, 16)))
    assert waited
    assert not cache.has_given_up(many.location)
    scheduler.tuned_matmul(jnp.ones((8, 25)), jnp.ones((25, 16)), on_miss="error")


def test_a_prediction_an_explanation_and_a_shown_record_read_a_few_records_too(many, work):
    scheduler.predict("matmul", {"m": 9, "n": 16, "k": 31, "dtype": "float32"})
    assert work.decoded <= 9
    work.decoded = 0
    run("explain", "matmul", "m=8", "n=16", "k=30", "dtype=float32")
    assert work.decoded <= 9
    work.decoded = 0
    run("show", "matmul", "m=8", "n=16", "k=31", "dtype=float32")
    assert work.decoded == 1


def test_a_list_reads_the_records_that_it_prints(many, work):
    out, _ = run("list", "--most", 7)
    assert work.decoded == 7
    assert out.count("dtype=float32") == 7
    assert f"{MANY - 7} more records are left out: --most 0 shows all" in " ".join(out.split())


@pytest.mark.parametrize("held", ["nothing", "the same import", "measurements of the same problems"])
def test_an_import_and_a_read_of_many_records_send_few_statements(held, many, work, tmp_path, monkeypatch):
    run("export", tmp_path / "many.jsonl")
    if held != "measurements of the same problems":
        monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "other.db"))
    if held == "the same import":
        run("import", tmp_path / "many.jsonl")
    work.decoded, statements = 0, []
    with contextlib.closing(Store(default_url())) as store, counted("before_cursor_execute", statements):
        _, err = run("import", tmp_path / "many.jsonl")
        assert len(statements) < 30
        assert work.decoded == (1 if held == "nothing" else 2) * MANY
        assert f"put {0 if held == 'measurements of the same problems' else MANY} records" in err
        statements.clear()
        keys = [head.key for head in store.heads()]
        assert [record.key for record in store.read(reversed(keys))] == keys[::-1]
        assert len(keys) == MANY
        assert len(statements) < 30
        commits = []
        with counted("commit", commits):
            run("forget", "--all")
        assert len(commits) < 5
        assert store.keys() == []


@contextlib.contextmanager
def counted(event, events):
    """Appends to `events` at each such event of SQLAlchemy, such as a statement."""

    def count(*args):
        events.append(event)

    sa.event.listen(sa.Engine, event, count)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, event, count)


# Waiting, and working


class Clock:
    """Seconds that pass as questions say."""

    now = worked = 0.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cache.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(cache.time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(cache, "_worked_s", lambda thread: clock.worked)
    yield clock
    cache.reset_timeouts("a store")


def test_what_a_question_computes_is_not_waited_for(clock):
    def question(seconds, worked):
        clock.now += seconds
        clock.worked = worked
        return "answer"

    for _ in range(5):
        clock.worked = 0.0
        assert cache.call_with_timeout("a store", lambda: question(60, 60)) == "answer"
    assert not cache.has_given_up("a store")
    clock.worked = 0.0
    cache.call_with_timeout("a store", lambda: question(3, 1))  # 2 s of waiting
    assert not cache.has_given_up("a store")
    clock.worked = 0.0
    cache.call_with_timeout("a store", lambda: question(60, 57))
    assert cache.has_given_up("a store")


# The list, and the report


def test_problems_are_sorted_by_numbers_as_numbers():
    def key(**fields):
        return Key("matmul", CPU.id, json.dumps(fields, sort_keys=True, separators=(",", ":")))

    ordered = [
        *(key(m=64, n=8, k=8, dtype=dtype) for dtype in ("float16", "float32")),
        key(m=64, n=8, k=16),
        key(m=64, n=64, k=8),
        key(m=128, n=8, k=8),
        key(m=1024, n=8, k=8, dtype="float32"),
    ]
    for several in itertools.islice(itertools.permutations(ordered), 0, None, 31):
        assert sorted(several, key=order_of) == ordered
    shapes = ["bfloat16[8]", "float32[8,16]", "float32[8,128]", "float32[8]", "float32[64,4]"]
    keys = [Key("own.f", CPU.id, json.dumps({"x": shape})) for shape in shapes]
    assert sorted((keys[place] for place in (3, 0, 4, 2, 1)), key=order_of) == keys
    odd = [Key("own.f", CPU.id, text) for text in ("nonsense", "[1]", '{"x":null}', '{"x":1}', '{"y":"1"}', "1")]
    assert len(sorted(odd, key=order_of)) == len(odd)  # any two of them compare


def test_a_list_begins_with_the_users_own_records_and_says_how_many_more_there_are(many):
    many.put(values.record())  # of another chip
    out, _ = run("list", "--most", 0)
    assert 0 < out.index("matmul, cpu (1 cores") < out.index("matmul, NVIDIA H200 (132")
    ks = [int(word[2:]) for word in out.split() if word.startswith("k=")]
    assert ks[:MANY] == sorted(ks[:MANY])
    with contextlib.closing(shipped()) as store:
        elsewhere = [head for head in store.heads() if head.key.hardware != CPU.id]
    words = " ".join(out.split())
    assert words.endswith(": --all shows them")
    assert f"{len(elsewhere)} more are shipped for other chips (" in words
    assert "TPU" not in words.partition("more are shipped")[0]
    listed = json.loads(run("list", "--json")[0])
    assert len(listed) == MANY + 1
    every = json.loads(run("list", "--json", "--all")[0])
    assert every[: len(listed)] == listed
    assert len(every) == len(listed) + len(elsewhere)
    chips = [row["estimated"] for row in every[len(listed) :]]
    assert chips == sorted(chips)  # what was measured goes first


def test_a_list_of_nothing_says_so_and_what_to_do():
    out, _ = run("list")
    words = " ".join(out.split())
    assert words.startswith(f"No record is in {default_url()}, and none is shipped for this chip; to tune a problem")
    assert "\n  tile-scheduler tune matmul m=64" in out
    assert "more are shipped for other chips" in words
    assert json.loads(run("list", "--json")[0]) == []


def test_a_report_is_of_what_a_list_prints_and_says_how_far_it_is(many, tmp_path):
    out, err = run("report", "--out", tmp_path / "few.html", "--most", 20, "--pictures", "none")
    text = (tmp_path / "few.html").read_text()
    assert "Tile schedules: 20 records" in text
    assert f"{MANY - 20} more records are left out: --most 0 shows all" in text
    assert "more are shipped for other chips" in text
    said = [line for line in err.splitlines() if line.startswith("explaining records: ")]
    assert said[0] == "explaining records: 0 of 20 done"
    assert 5 <= len(said) <= 11
    assert not out


def test_the_pictures_of_a_users_own_records_come_first_and_are_counted(tmp_path):
    run("tune", "matmul", "m=32", "n=32", "k=32", "dtype=float32", "--budget", 4)
    _, err = run("report", "--out", tmp_path / "own.html")
    assert "drawing the pictures of records: 0 of 1 done" in err
    assert (tmp_path / "own.html").read_text().count("<article") == 1
