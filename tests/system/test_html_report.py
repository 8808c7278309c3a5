"""The report of a cache as a reader meets it in a browser, and as text that may hold anything."""

import base64
import contextlib
import dataclasses
import gzip
import html.parser
import json
import re
import sys
from pathlib import Path

import browser
import pytest
from typer.testing import CliRunner
from values import ENVIRONMENT, FAST, SLOW, VERDICT, record, trial

from scheduler.cli.app import app
from scheduler.core.records import Entry, Failure, Key
from scheduler.inspect.report import content, page
from scheduler.inspect.report.content import element, extend, written
from scheduler.store.store import Store, shipped
from search_spaces import load

pytestmark = pytest.mark.slow

EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>\"'&<!--"
SMALL = ["m=32", "n=32", "k=32", "dtype=float32"]
SWEEP = Path(__file__).parents[2] / "sweeps" / "nvidia-h200" / "matmul-m8-n14336-k4096.jsonl.gz"
CUT_SHORT = Key("matmul", "NVIDIA H200 (132 cores, 140 GiB)", '{"k":72,"m":72,"n":72}')


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tile-scheduler")
    assert result.exit_code == status, result.output
    return result.output


def hostile():
    """A record and a trial of which every text is markup, of an operation that nobody has."""
    schedule = {f"tile {EVIL}": f"128 {EVIL}"}
    entries = (Entry(f"kernel {EVIL}", 1, schedule, FAST, 1e-4), Entry("xla", 1, {}, SLOW, 2e-4))
    made = dataclasses.replace(
        record(Key(f"evil {EVIL}", f"chip {EVIL}", json.dumps({f"m {EVIL}": f"1 {EVIL}"}))),
        entries=entries,
        environment=dataclasses.replace(ENVIRONMENT, jax=EVIL, driver=EVIL, date=EVIL),
        versions={f"kernel {EVIL}": 1, "xla": 1},
        confidence=dataclasses.replace(VERDICT, notes=(EVIL,), tied=(EVIL, EVIL)),
        stopped=EVIL,
    )
    return made, dataclasses.replace(trial(outcome=Failure("compile", EVIL)), schedule=schedule)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The file that the command writes of a cache with a search's record, a hostile one, and a search cut short."""
    place = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILE_SCHEDULER_CACHE", str(place / "cache.db"))
        run("tune", "matmul", *SMALL, "--budget", 4)
        with contextlib.closing(Store(place / "cache.db")) as store:
            evil, failed = hostile()
            store.save_trials(evil.key, [failed], ENVIRONMENT)
            store.put(evil)
            store.save_trials(CUT_SHORT, [trial()], ENVIRONMENT)
        said = run("report", "--out", place / "report.html", "--pictures", "none", "--all", "--most", 0)
        listed = json.loads(run("list", "--all", "--json"))
    assert re.search(rf"wrote {len(listed)} records to \S+report.html \(\d+\.\d MB\)", said)
    return place / "report.html", listed


@pytest.fixture(scope="module")
def window(report):
    if browser.programs() is None:
        pytest.skip(browser.MISSING)
    with browser.opened() as opened:
        yield opened


@pytest.fixture
def reader(window, report):
    """The report, just opened at a desk."""
    window.look(1280)
    window.open("about:blank")
    window.open(report[0].as_uri())
    window.complaints()
    return window


def address(reader, words):
    """That of the first record whose problem reads so."""
    return reader.script(
        "return [...document.querySelectorAll('#records a')].find((a) => a.textContent === arguments[0]).hash", words
    )


def test_all_that_is_listed_is_in_the_report(reader, report):
    shown = zip(reader.column("operation"), reader.column("chip"), strict=True)
    assert sorted(shown) == sorted((row["operation"], row["hardware"]) for row in report[1])
    assert reader.words("#count").startswith(f"{len(report[1])} records")
    assert "72 n=72 k=72 dtype=bfloat16 on NVIDIA H200 (132 cores, 140 GiB)" in reader.words("#list ul")
    assert "1 trial kept" in reader.words("#list ul")


def test_records_are_filtered_by_what_they_are_and_by_words(reader, report):
    reader.choose("[data-field=operation]", "=softmax")
    softmax = sum(row["operation"] == "softmax" for row in report[1])
    assert set(reader.column("operation")) == {"softmax"}
    assert reader.words("#count").startswith(f"{softmax} of {len(report[1])} records")
    reader.choose("[data-field=dtype]", "=float32")
    assert all("dtype=float32" in problem for problem in reader.column("problem"))
    assert 0 < len(reader.column("problem")) < softmax
    reader.press("button[type=reset]")
    reader.script("return new Promise((done) => setTimeout(done))")
    assert len(reader.column("problem")) == len(report[1])
    reader.type("#words", "GELU m=4096")
    assert all("gelu" in problem and "m=4096" in problem for problem in reader.column("problem"))
    reader.type("#words", " nothing has this")
    assert reader.column("problem") == []
    assert reader.words("#none") == "No record has all of that."


def test_a_chip_is_chosen_and_how_a_record_stands_against_xla(reader, report):
    reader.choose("[data-field=chip]", "=NVIDIA H200 (132 cores, 140 GiB)")
    assert len(reader.column("chip")) == sum("H200" in row["hardware"] for row in report[1])
    reader.choose("[data-field=against]", "=a tie")
    assert set(reader.column("gain")) == {"tie"}


def numbers(reader, column):
    return reader.script(
        "return [...document.querySelectorAll(`#records tbody .${arguments[0]} data`)].map((data) => data.value)",
        column,
    )


@pytest.mark.parametrize(("column", "first"), [("gain", -1), ("time", 1), ("flops", -1), ("bytes", -1), ("share", -1)])
def test_columns_are_sorted_by_their_numbers_and_what_has_none_comes_last(reader, column, first):
    for sign in (first, -first):
        reader.press(f"#records th.{column} button")
        values = numbers(reader, column)
        known = [float(value) for value in values if value]
        assert known == sorted(known, reverse=sign < 0)
        assert values[: len(known)] == [value for value in values if value]
        assert reader.script("return document.querySelector(arguments[0]).ariaSort", f"#records th.{column}") == (
            "ascending" if sign > 0 else "descending"
        )


def test_problems_are_sorted_by_their_extents_and_not_by_their_digits(reader):
    reader.choose("[data-field=operation]", "=matmul")
    reader.press("#records th.problem button")
    m = [int(re.search(r"m=(\d+)", problem)[1]) for problem in reader.column("problem")]
    assert m == sorted(m)


def test_a_record_says_why_it_won_how_sure_that_is_and_how_it_is_tuned_again(reader, report):
    reader.script("location.hash = arguments[0]", address(reader, "m=4096 n=4096 k=4096 dtype=bfloat16"))
    text = reader.words("article:target")
    kernel = explained("m=4096", "n=4096", "k=4096", "--hardware", "h200")["kernels"][0]
    for reason, count in kernel["dropped"].items():
        assert f"{reason} \u2212{count:,}" in text
    left = reader.script(
        "return [...document.querySelectorAll('article:target .bar')]"
        ".map((bar) => bar.closest('tr').cells[2].innerText)"
    )
    assert left[0] == f"{kernel['size']:,}"
    assert left[-1] == f"{kernel['untried']:,}"
    assert "The search tried" in text
    assert "Run-off:" in text
    assert "tile-scheduler tune matmul m=4096 n=4096 k=4096 dtype=bfloat16 --force" in text
    assert "not stored with the record" in text
    assert not reader.complaints()


def explained(*fields):
    return json.loads(run("explain", "matmul", *fields, "--json"))


def test_the_list_is_left_for_a_record_and_is_back_as_it_was(reader):
    reader.choose("[data-field=operation]", "=softmax")
    first, second = reader.column("problem")[:2]
    reader.press("#records tbody tr:not([hidden]) a")
    assert reader.words("article:target h2") == f"softmax {first}"
    assert not reader.words("#list")
    reader.press("article:target nav .next")
    assert reader.words("article:target h2") == f"softmax {second}"
    reader.press("article:target nav .previous")
    assert reader.words("article:target h2") == f"softmax {first}"
    reader.press("article:target nav a")
    assert set(reader.column("operation")) == {"softmax"}
    assert reader.words("#list")


def test_a_record_is_opened_by_its_address_and_knows_its_neighbours(reader, report):
    place = address(reader, "m=32 n=32 k=32 dtype=float32")
    reader.open("about:blank")
    reader.open(f"{report[0].as_uri()}{place}")
    text = reader.words("article:target")
    assert "of these failed" not in text
    assert reader.script("return document.querySelectorAll('article:target h3').length") >= 6
    trials = reader.script(
        "return [...document.querySelectorAll('article:target section')].find("
        "(part) => part.querySelector('h3').textContent === 'Trials').querySelectorAll('tbody tr').length"
    )
    assert trials == 4
    assert "next" in reader.words("article:target nav")


def test_what_a_record_says_is_text_and_nothing_else(reader):
    reader.script("location.hash = document.querySelector('#records a[href^=\"#r-evil\"]').hash")
    text = reader.words("article:target")
    for said in ("evil ", "m ", "tile ", "compile: ", "The search ended: "):
        assert f"{said}{EVIL}" in text, said
    assert "is not in this package" in text
    assert reader.script("return window.broken") is None
    assert reader.script("return [...document.scripts].map((script) => script.type)") == [""]
    assert not reader.complaints()


def test_nothing_is_fetched_and_nothing_of_others_runs(reader, report):
    assert reader.script("return performance.getEntriesByType('resource').length") == 0
    reader.script("const made = document.createElement('script'); made.text = 'window.broken = 3';"
                  "document.body.append(made)")  # fmt: skip
    assert reader.script("return window.broken") is None
    assert any("Content Security Policy" in said for said in reader.complaints())


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(reader, width, dark):
    reader.look(width, dark=dark)
    addresses = reader.script("return [...document.querySelectorAll('#records a')].map((a) => a.hash)")
    for place in ["", *addresses[:: len(addresses) // 10], *(a for a in addresses if "evil" in a)]:
        reader.script("location.hash = arguments[0]", place)
        assert reader.script("return document.documentElement.scrollWidth") <= width, place
    ground = reader.script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_without_its_script_the_report_is_read_all_the_same(window, report, tmp_path):
    path, listed = report
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r'<script type="application/json".*</script>', "", path.read_text(), flags=re.DOTALL))
    window.look(1280)
    window.open(bare.as_uri())
    assert window.script("return document.querySelectorAll('#records tbody tr').length") == len(listed)
    assert not window.words("#filters")
    window.open(f"{bare.as_uri()}{address(window, 'm=4096 n=4096 k=4096 dtype=bfloat16')}")
    assert "The search tried" in window.words("article:target")


# As text, where there is no browser, too.


class Tags(html.parser.HTMLParser):
    """Every element, and every address that it names."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.handlers = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "srcset", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


def test_no_text_becomes_markup(report):
    text = report[0].read_text()
    found = Tags(text)
    assert (found.tags.count("script"), found.handlers) == (1, [])
    assert "onerror" not in "".join(found.tags)
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert len(text) < 10e6


def test_a_tree_becomes_text_in_which_all_that_was_given_is_escaped():
    made = element("p", "<b>", element("i", "a & b", title='"quoted" <x>'), " </p>", None, hidden=True, class_="x")
    extend(made, ["\ud800"])
    assert written(made) == (
        '<!DOCTYPE html>\n<p hidden="" class="x">&lt;b&gt;<i title="&quot;quoted&quot; <x&gt;">a &amp; b</i>'
        " &lt;/p&gt;\\ud800</p>\n"
    )


def test_a_report_of_nothing_says_so():
    origin = page.Origin(["here"], {"tile-scheduler": "1"}, "2026-03-01T12:00:00Z")
    text = page.page([], [], origin, content.no_pictures([], ""))
    assert "No record is stored." in text
    assert "Tile schedules: 0 records" in text


def test_records_are_explained_as_far_as_they_are_known_here():
    known = next(shipped().records(operation="matmul"))
    elsewhere = dataclasses.replace(known, key=dataclasses.replace(known.key, hardware="NVIDIA H200 (1 cores, 1 GiB)"))
    nobodys = dataclasses.replace(known, key=dataclasses.replace(known.key, operation="nobody's"))
    other = dataclasses.replace(known, key=dataclasses.replace(known.key, problem='{"x":1}'))
    told = list(content.gather([("here", one, []) for one in (known, elsewhere, nobodys, other)]))
    assert told[0].accounts
    assert told[0].command.endswith(" --force")
    assert [bool(one.unexplained) for one in told] == [False, True, True, True]
    assert "table of chips" in told[1].unexplained
    assert "give --operation package.module:NAME or file.py:NAME" in told[2].unexplained
    assert "no field 'x'" in told[3].unexplained
    assert [one.command is None for one in told] == [False, False, True, True]


@pytest.mark.parametrize("problem", ["nonsense", "[1]", '""', "null", "{}", '{"dtype":5}', '{"m":{"a":[1]}}'])
def test_a_problem_that_is_none_is_shown_as_it_is_written(problem, tmp_path):
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        store.put(record(Key("mine", "chip", problem)))
    run("report", "--out", tmp_path / "odd.html", "--operation", "mine")
    assert "Tile schedules: 1 record<" in (tmp_path / "odd.html").read_text()


def test_the_winner_has_its_place_in_the_models_order():
    told = list(content.gather([("here", one, []) for one in shipped().records(operation="softmax")]))
    places = [one.rank for one in told if one.record.winner.backend == "mosaic_gpu"]
    assert all(1 <= place <= among for place, among in places)
    assert any(place > 1 for place, _ in places)


def test_an_operation_of_ones_own_is_explained_where_it_is_named(tmp_path):
    operation = "operations:DOUBLE"
    run("tune", operation, "n=8", "--budget", 2)
    run("report", "--out", tmp_path / "one.html", "--operation", operation, "--pictures", "all")
    text = (tmp_path / "one.html").read_text()
    assert "Tile schedules: 1 record<" in text
    assert "is not in this package" not in text
    assert "schedules of" in text
    assert packed(text)


def packed(text):
    """The pictures of a report as the SVG that a reader sees."""
    return [gzip.decompress(base64.b64decode(found)).decode() for found in re.findall(r'data-svg="([^"]+)"', text)]


def test_each_record_has_its_pictures_and_so_have_all_together(tmp_path):
    run("report", "--out", tmp_path / "some.html", "--operation", "silu_and_mul", "--all")
    text = (tmp_path / "some.html").read_text()
    drawn = packed(text)
    records = list(shipped().records(operation="silu_and_mul"))
    assert len(drawn) == len(records) + len({one.key.hardware for one in records})
    for picture in drawn:
        assert Tags(picture).tags[0] == "svg"
    for one in records:
        assert any(str(load("silu_and_mul").problem.from_canonical(one.key.problem)) in picture for picture in drawn)
    assert len(text) / len(records) < 10e6 / 122  # so that all that is shipped stays below 10 MB


def test_without_matplotlib_a_report_has_all_but_pictures_and_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python has it where it is not installed
    run("report", "--out", tmp_path / "bare.html", "--operation", "softmax", "--all")
    text = (tmp_path / "bare.html").read_text()
    assert text.count("Pictures need matplotlib: run pip install 'tile-scheduler[plots]'") > 1
    assert not packed(text)
    assert "The search tried" in text


@pytest.mark.parametrize("dark", [False, True])
def test_pictures_are_shown_on_a_ground_like_that_of_the_page(window, tmp_path, dark):
    run("tune", "matmul", *SMALL, "--budget", 4)
    run("report", "--out", tmp_path / "one.html", "--operation", "matmul", "--hardware", "cpu")
    window.look(1280, dark=dark)
    window.open((tmp_path / "one.html").as_uri() + "#r-matmul-m-32-n-32-k-32-dtype-float32-cpu")
    corner = """
        return (async () => {
          const images = [...document.querySelectorAll("article:target img")];
          while (images.some((image) => !image.src)) await new Promise((done) => setTimeout(done, 10));
          await Promise.all(images.map((image) => image.decode()));
          return images.map((image) => {
            const canvas = new OffscreenCanvas(20, 20).getContext("2d");
            canvas.filter = getComputedStyle(image).filter;
            canvas.drawImage(image, 0, 0, 20, 20);
            return [...canvas.getImageData(1, 1, 1, 1).data];
          });
        })()
    """
    for *ground, _ in window.script(corner):  # the landscape, and how the search went
        assert max(ground) < 40 if dark else min(ground) == 255
    assert not window.complaints()


def test_a_file_that_cannot_be_written_is_said_in_a_sentence_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("scheduler.inspect.report.content.gather", None)
    assert "No such file or directory" in run("report", "--out", tmp_path / "no" / "report.html", status=1)
    assert "--pictures must be few, all or none, found some" in run("report", "--pictures", "some", status=2)
    assert "no operation 'matmull'; did you mean 'matmul'?" in run("report", "--operation", "matmull", status=2)
