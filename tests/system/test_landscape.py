"""The landscape over two choices, drawn or in a terminal, and a record in a notebook."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scheduler.cli import plotting
from scheduler.cli.app import app
from scheduler.core.errors import NothingToDraw
from scheduler.core.hardware import find
from scheduler.core.records import choice_text
from scheduler.inspect import case as cases
from scheduler.inspect.case import Case
from scheduler.inspect.landscape import landscape
from scheduler.model.pruning import prune
from scheduler.store.store import shipped
from search_spaces.matmul import MATMUL, MatmulProblem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
H200 = find("h200")
SQUARE = Case(MATMUL, MatmulProblem(4096, 4096, 4096), H200)


@pytest.fixture(scope="module")
def records():
    return list(shipped().records())


def pruned(case):
    best = case.best()
    return prune(best.kernel, case.problem, case.hardware, case.model(best.kernel))


@pytest.mark.parametrize("over", [None, ("stages", "tile_k"), ("cluster", "swap_ab")])
def test_the_pairs_account_for_every_schedule_of_the_space(over):
    land, whole = landscape(SQUARE, over=over), pruned(SQUARE)
    cells = [cell for row in land.cells for cell in row]
    assert sum(cell.legal for cell in cells) == len(whole.points)
    reasons = {reason for cell in cells for reason in cell.dropped}
    assert {reason: sum(cell.dropped.get(reason, 0) for cell in cells) for reason in reasons} == dict(whole.dropped)
    assert land.best_s == whole.predicted_s[0]


def test_by_default_it_is_over_the_sizes_of_a_tile():
    assert (landscape(SQUARE).x, landscape(SQUARE).y) == ("tile_n", "tile_m")


def test_pairs_that_no_schedule_takes_are_empty(records):
    """Also where a kernel's footprint is of the worst of some schedules, of which there must then be one."""
    (causal,) = (
        one for one in records if one.key.hardware.startswith("TPU v5 lite") and '"causal":true' in one.key.problem
    )
    land = landscape(cases.of_record(causal, ()))
    cells = [cell for row in land.cells for cell in row]
    assert {cell.legal > 0 for cell in cells} == {True, False}


def test_an_empty_pair_says_what_removed_its_last_schedules():
    land = landscape(SQUARE, over=("stages", "tile_n"))
    deep = land.cells[land.ys.index(256)][land.xs.index(6)]
    assert (deep.legal, deep.best_s) == (0, None)
    assert deep.reason.startswith("needs more on-chip memory than NVIDIA H200 has")
    assert len(deep.dropped) > 1  # and others removed more


def test_measured_times_stand_where_they_are_known():
    (path,) = (ROOT / "sweeps").rglob("matmul-m2048-n2048-k2048.jsonl.gz")
    case = cases.of_recording(path)
    land = landscape(case)
    ran = [seconds for trial, seconds in case.measured() if trial.backend == "mosaic_gpu"]
    assert (land.measured, land.best_s) == (len(ran), min(ran))
    column, row = land.place(land.best.schedule)
    assert land.cells[row][column].best_s == min(ran)


def test_choices_that_are_none_are_named():
    with pytest.raises(ValueError, match="mosaic_gpu has no choice 'tile_l'; did you mean 'tile_"):
        landscape(SQUARE, over=("tile_l", "tile_m"))
    with pytest.raises(ValueError, match="over two choices, and tile_m is one"):
        landscape(SQUARE, over=("tile_m", "tile_m"))
    with pytest.raises(NothingToDraw, match="only the library supports"):
        landscape(Case(MATMUL, MatmulProblem(8, 8, 8, "float32", precision="highest"), H200))


def printed(land):
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        for line in plotting.landscape_lines(land):
            console.print(line, markup=False, highlight=False)
    return captured.get().splitlines()


def test_a_terminal_of_80_columns_shows_it(records):
    for record in records[::7]:
        case = cases.of_record(record)
        try:
            land = landscape(case)
        except NothingToDraw:
            continue
        lines = printed(land)
        assert max(map(len, lines)) <= 80
        assert sum(line.count("[") for line in lines) == 1, "the winner's pair, and no other"
        assert any("1.00" in line for line in lines)


def test_more_values_than_fit_are_said_to_be_left_out():
    land = landscape(SQUARE)
    many = tuple(range(30))
    wide = dataclasses.replace(land, xs=many, ys=many, cells=(((land.cells[0][0],) * 30),) * 30)
    lines = printed(wide)
    assert max(map(len, lines)) <= 80
    assert any("10 of 30 values" in line for line in lines)


def test_show_draws_the_landscape_of_a_record():
    ran = CliRunner().invoke(app, ["show", "matmul", "m=4096", "n=4096", "k=4096"], env={"COLUMNS": "80"})
    assert ran.exit_code == 0
    assert "mosaic_gpu over tile_n and tile_m: minimum time of each pair, by the model" in " ".join(ran.output.split())
    assert "spills registers (255 per thread)" in ran.output


# In a notebook


class Texts(HTMLParser):
    """What a browser would show, and the tags it would see."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags, self.open = [], set(), []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_record_shows_itself_in_a_notebook(records):
    for record in records[::5]:
        seen = Texts(record._repr_html_())
        assert not seen.open
        assert not seen.tags & {"script", "link", "img", "style", "iframe"}
        said = " ".join(seen.texts)
        assert record.key.operation in said
        assert record.key.hardware in said
        assert choice_text(record.winner.backend, record.winner.schedule) in seen.texts
        assert len([tag for tag in seen.texts if "xla" in tag.lower()]) > 0
    named = ("matmul", SQUARE.problem.canonical())
    (square,) = [r for r in records if (r.key.operation, r.key.problem) == named and "H200" in r.key.hardware]
    said = " ".join(Texts(square._repr_html_()).texts)
    assert "m=4096 n=4096 k=4096 dtype=bfloat16" in said
    assert "against XLA undecided" in said
    assert "between 0.25% faster and 0.68% slower" in said


def test_hostile_words_of_a_record_stay_words(records):
    evil = '<script>alert("1")</script>'
    key = dataclasses.replace(records[0].key, operation=evil, hardware=evil, problem='{"<b>": "<img src=x>"}')
    entries = tuple(dataclasses.replace(e, backend=evil, schedule={evil: evil}) for e in records[0].entries)
    hostile = dataclasses.replace(records[0], key=key, entries=entries, stopped=evil)
    seen = Texts(hostile._repr_html_())
    assert not seen.tags & {"script", "img"}
    assert evil in "".join(seen.texts)
