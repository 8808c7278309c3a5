"""Pictures of what was tuned show what is known."""

import dataclasses
import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendered import faults
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core.errors import MissingPackage, NothingToDraw
from scheduler.core.hardware import CPU, find
from scheduler.inspect import case as cases
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from scheduler.inspect.explain import GROUPS, group_of
from scheduler.inspect.plots.roofline import Point, grouped
from scheduler.model.cost import CostModel
from scheduler.model.traffic import block_loads, walk, window
from scheduler.store.store import shipped
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.matmul.tiles import planar_snake
from search_spaces.rows.formulas import SOFTMAX

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "sweeps").rglob("*.jsonl.gz"))
KEPT = ROOT / "docs" / "pictures"
H200 = find("h200")
SQUARE = MatmulProblem(4096, 4096, 4096)


def recording(text):
    (path,) = [path for path in SWEEPS if text in path.name]
    return path


@pytest.fixture(scope="module")
def records():
    store = shipped()
    assert store is not None
    return [record for record in store.records() if not record.estimated]


@pytest.fixture(scope="module")
def square(records):
    """The shipped record of a product, without trials."""
    (found,) = [one for one in map(cases.of_record, records) if (one.operation.name, one.problem) == ("matmul", SQUARE)]
    return found


@pytest.fixture(scope="module")
def swept():
    return cases.of_recording(recording("matmul-m512-n512-k512"))


def words(svg):
    """All that is written in a picture, line by line."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def numbers(svg):
    paths = [path.get("d", "") for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    return np.array([float(n) for path in paths for n in re.findall(r"-?\d+(?:\.\d+)?", path)])


# As files


def test_pictures_in_one_page_share_no_id_and_say_what_they_are(records):
    known = [cases.of_record(record) for record in records]
    svgs = [plots.svg(plots.roofline(known[:count], dark=dark)) for count in (1, 3, 60) for dark in (False, True)]
    svgs.append(plots.svg(plots.tiles(Case(MATMUL, SQUARE, H200))))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in svgs]
    assert len(set.union(*ids)) == sum(map(len, ids))
    for svg, own in zip(svgs, ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= own
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert "NVIDIA H200" in root.get("aria-label")
        assert not re.search(r"(?m)^\*\s*\{|>\*\s*\{", svg), "a style of one picture would hold for the whole page"


def test_the_same_picture_has_the_same_bytes_and_nobodys_settings_change_them(records):
    import matplotlib

    known = [cases.of_record(record) for record in records]
    first = plots.svg(plots.roofline(known))
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plots.svg(plots.roofline(known)) == first
    assert plots.png(plots.roofline(known[:1])).startswith(b"\x89PNG")


def test_light_and_dark_differ_in_colours_alone(records):
    known = [cases.of_record(record) for record in records]
    light, dark = (plots.svg(plots.roofline(known, dark=dark)) for dark in (False, True))
    assert words(light) == words(dark)
    assert np.array_equal(numbers(light), numbers(dark))
    assert "#ffffff" in light
    assert "#ffffff" not in dark


# Of many


@pytest.mark.parametrize("every", [1, 29, 260])
def test_a_roofline_can_be_read_of_many_and_of_one(records, every):
    assert faults(plots.roofline([cases.of_record(record) for record in records[::every]])) == []


def test_what_is_wrong_with_a_picture_is_found():
    """The checks of this file see what they are for."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(10, 5))
    axes = made.add_subplot()
    axes.bar(range(100), [1.0] * 100)
    axes.set(xlim=(-100, 20000), xticks=[], yticks=[])
    axes.text(5000, 0.5, "one", fontsize=12)
    axes.text(5010, 0.5, "two", fontsize=12)
    axes.text(9000, 0.2, "grey", fontsize=12, color="#dddddd")
    axes.text(9000, 0.8, "small", fontsize=4)
    axes.text(19000, 0.4, "an end that is cut off", fontsize=12)
    axes.text(12000, 0.5, "hidden", fontsize=12)
    axes.plot([12400], [0.51], "o")
    empty = made.add_subplot(1, 9, 9)
    empty.set(xticks=[], yticks=[])
    said = " ".join(faults(made))
    for words_of in ("'one' lies on 'two'", "'grey' has a contrast", "'small' is", "'an end that is cut off' leaves",
                     "a marker lies on 'hidden'", "px wide", "nothing is on the axes"):  # fmt: skip
        assert words_of in said, words_of


def test_the_rarest_operations_of_a_roofline_share_a_row():
    point = Point("", 1.0, 1.0, None, 1.0)
    many = [dataclasses.replace(point, operation=f"op{n:02}") for n in range(31) for _ in range(1 + (n != 3))]
    points, names = grouped(many)
    assert names[-1] == "6 others"
    assert len({*names}) == len(names) == 26
    assert "op03" not in names
    assert {p.operation for p in points} == {*names}
    assert grouped(many[:5])[1] == ["op00", "op01", "op02"]


def test_nothing_stands_above_the_roofline_of_cold_operands(records):
    points = [Point.of(cases.of_record(record)) for record in records]
    assert all(0 < point.rate <= point.roof for point in points if point is not None)


def test_pictures_of_nothing_say_what_to_do():
    with pytest.raises(NothingToDraw, match="tune a problem first"):
        plots.roofline([])


def test_a_roofline_is_of_one_chip(records):
    one = cases.of_record(records[0])
    with pytest.raises(ValueError, match="of one chip"):
        plots.roofline([one, dataclasses.replace(one, hardware=find("H100"))])


# Of one problem


@pytest.mark.parametrize("text", ["m8-n14336", "m16-n4096", "m64-n4096-k14336"])
def test_the_lines_of_a_search_and_their_names_lie_within_the_picture(text):
    assert faults(plots.best_so_far(cases.of_replay(recording(text), budget=12))) == []


def test_a_search_replayed_over_a_sweep_is_drawn_with_its_best(swept):
    searched = cases.of_replay(recording("matmul-m512-n512-k512"), budget=12)
    best_us = min(seconds for trial, seconds in searched.measured() if trial.backend != "xla") * 1e6
    said = words(plots.svg(plots.best_so_far(searched)))
    assert f"best {best_us:.3g} µs" in said
    assert any(re.search(r"XLA (takes )?\d", text) for text in said)
    assert faults(plots.best_so_far(searched)) == []
    with pytest.raises(NothingToDraw, match="no order to draw; replay a search"):
        plots.best_so_far(swept)


def test_where_no_trials_are_kept_the_picture_says_so(square):
    with pytest.raises(NothingToDraw, match=r"no trials are kept of matmul m=4096 .*; replay a search over a recorded"):
        plots.best_so_far(square)


def test_every_term_of_the_model_is_of_one_group(square):
    best = square.best()
    parts = square.model(best.kernel).breakdown(square.footprint(best))
    terms = [*parts.overlapped, *parts.serial]
    assert sorted(terms) == sorted(name for names in GROUPS.values() for name in names)
    assert {group_of(name) for name in parts.serial} == {"start and end"}


def test_the_parts_of_a_launch_add_up_to_its_prediction(square):
    best = square.best()
    footprint, model = square.footprint(best), square.model(best.kernel)
    parts = model.breakdown(footprint)
    assert parts.steps_s + sum(parts.serial.values()) == pytest.approx(model.seconds(footprint))
    assert model.terms(footprint).keys() == parts.overlapped.keys() | parts.serial.keys()


def test_the_best_of_a_case_is_measured_where_it_can_be(square, swept):
    assert square.best().seconds == square.record.winner.measurement.median_s
    fastest = min(s for trial, s in swept.measured() if trial.backend == "mosaic_gpu")
    assert swept.best().seconds == fastest
    assert Case(MATMUL, SQUARE, H200).best().seconds is None
    with pytest.raises(NothingToDraw, match="only the library supports matmul m=16 n=16 k=16 dtype=float32"):
        Case(MATMUL, MatmulProblem(16, 16, 16, "float32", precision="highest"), H200).best_searched()
    with pytest.raises(NothingToDraw, match="the schedule of xla is unknown"):
        square.best_searched("xla")


ODD = [
    Case(MATMUL, MatmulProblem(1, 4096, 14336), H200),
    Case(MATMUL, MatmulProblem(64, 8192, 8192), H200),
    Case(MATMUL, MatmulProblem(4096, 4096, 4096, "float8_e4m3fn", out_dtype="bfloat16", transpose_b=True), H200),
    Case(MATMUL, MatmulProblem(512, 512, 64, "float32"), CPU),
    Case(SOFTMAX, SOFTMAX.problem(7, 1000), H200),
    Case(SOFTMAX, SOFTMAX.problem(4096, 131072), H200),
]


@pytest.mark.parametrize("case", ODD, ids=str)
@pytest.mark.parametrize("draw", [plots.landscape, plots.block_sizes, plots.tiles, plots.time_breakdown])
def test_odd_problems_are_drawn(case, draw):
    made = draw(case)
    assert str(case.problem).split()[0] in " ".join(words(plots.svg(made)))
    assert faults(made) == []


def test_a_space_without_two_choices_has_no_landscape():
    with pytest.raises(NothingToDraw, match="differ in fewer than two choices"):
        plots.landscape(Case(SOFTMAX, SOFTMAX.problem(7, 1000), CPU))


@pytest.mark.parametrize(
    "path", [path for path in SWEEPS if "flash_attention-" in path.name][::3], ids=lambda p: p.name
)
def test_attention_is_drawn_from_its_recordings(path):
    case = cases.of_recording(path)
    for draw in (plots.landscape, plots.block_sizes, plots.tiles, plots.time_breakdown):
        made = draw(case)
        assert "flash_attention" in " ".join(words(plots.svg(made)))
        assert faults(made) == []


# The order of tiles


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 2), st.integers(1, 9), st.booleans(),
)  # fmt: skip
def test_every_tile_is_walked_once(extents, minor, group, snake):
    order = walk(extents, minor % len(extents), group, snake=snake)
    assert len({tuple(tile) for tile in order.tolist()}) == len(order) == np.prod(extents)


@pytest.mark.parametrize(
    ("rows", "columns", "minor", "width"),
    [(1, 1, "m", 4), (9, 5, "m", 4), (9, 5, "n", 4), (4, 9, "m", 2), (7, 3, "n", 16), (8, 8, "n", 1)],
)
def test_tiles_are_walked_as_the_kernel_walks_them(rows, columns, minor, width):
    numbers = jnp.arange(rows * columns)
    _, m, n = jax.vmap(lambda number: jnp.stack(planar_snake(number, (rows, columns), minor, width)))(numbers).T
    order = walk((1, rows, columns), 1 if minor == "m" else 2, width, snake=True)
    assert order[:, 1].tolist() == m.tolist()
    assert order[:, 2].tolist() == n.tolist()


def test_the_window_of_the_model_is_where_the_first_tiles_lie(square):
    footprint = square.footprint(square.best())
    extents = [int(np.max(extent)) for extent in footprint.grid]
    minor, group = int(np.max(footprint.minor)), int(np.max(footprint.group))
    order = walk(extents, minor, group, snake=footprint.snake)
    for count in (1, 16, 64, 128, 512):
        box = window(footprint, float(count))[:, 0]
        assert [len(set(order[:count, axis].tolist())) for axis in range(3)] == box.tolist()
    a, b = (int(loads[0]) for loads in block_loads(footprint, 128.0))
    assert (len(set(order[:128, 1].tolist())), len(set(order[:128, 2].tolist()))) == (a, b)


# The command


def told(*arguments):
    ran = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    return ran.exit_code, " ".join(ran.output.replace("│", " ").split())


def test_a_picture_is_written_where_it_is_wanted(tmp_path):
    square = ("matmul", "m=4096", "n=4096", "k=4096")
    assert told("tiles", *square, "--out", tmp_path / "tiles.svg") == (0, f"{tmp_path}/tiles.svg")
    assert "512 tiles in 4 waves of 132" in " ".join(words((tmp_path / "tiles.svg").read_text()))
    assert told("landscape", *square, "--over", "stages,tile_k", "--dark", "--out", tmp_path / "l.png")[0] == 0
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    sweep = recording("matmul-m512-n512-k512")
    status, _ = told("best-so-far", "--recording", sweep, "--budget", 8, "--out", tmp_path / "b.svg")
    assert (status, "7 trials besides XLA's" in " ".join(words((tmp_path / "b.svg").read_text()))) == (0, True)
    assert told("roofline", "softmax", "rows=4096", "--out", tmp_path / "r.svg")[0] == 0
    assert any("tuned problem" in text for text in words((tmp_path / "r.svg").read_text()))


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["roofing"], 2, "no picture 'roofing'; did you mean 'roofline'?"),
        (["roofline", "--out", "r.jpeg"], 2, "--out must end in .svg or .png"),
        (["tiles"], 2, "tiles plots one problem: give it"),
        (["tiles", "matmul", "m=1"], 2, "missing n, k"),
        (
            ["landscape", "matmul", "m=64", "n=64", "k=64", "--hardware", "h200", "--over", "tile_m"],
            2,
            "must name two fields",
        ),
        (
            ["landscape", "matmul", "m=64", "n=64", "k=64", "--hardware", "h200", "--over", "tile_m,tiles"],
            2,
            "no choice 'tiles'",
        ),
        (["roofline", "softmax", "rows=3"], 1, "no such record is stored or shipped"),
        (["best-so-far", "matmul", "m=4096", "n=4096", "k=4096"], 1, "no trials are kept"),
        (["best-so-far", "--recording", "nowhere.jsonl.gz"], 1, "nowhere.jsonl.gz cannot be read"),
        (["roofline", "--out", "nowhere/r.svg"], 1, "nowhere does not exist: create it"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_answered_in_a_sentence(arguments, status, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended, said = told(*arguments)
    assert (ended, sentence in said) == (status, True), said


def test_a_picture_of_many_is_of_the_chip_with_the_most_records(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    here = scheduler.Store(str(tmp_path / "cache.db"))
    scheduler.tune("matmul", {"m": 256, "n": 128, "k": 128, "dtype": "float32"}, budget=3, store=here)
    status, said = told("roofline", "--out", tmp_path / "r.svg")
    assert (
        status,
        "NVIDIA H200 (132 cores, 140 GiB), which has the most records; --hardware selects another (" in said
        and "cpu (" in said,
    ) == (
        0,
        True,
    )
    assert told("roofline", "--hardware", "cpu", "--out", tmp_path / "c.svg")[0] == 0
    assert "Roofline of cpu: 1 tuned problem" in words((tmp_path / "c.svg").read_text())
    for what in ("landscape", "best-so-far", "time-breakdown", "tiles", "block-sizes"):
        status, said = told(what, "matmul", "m=256", "n=128", "k=128", "dtype=float32", "--out", tmp_path / "x.svg")
        assert status == 0, said


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch, records):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not plots.available()
    with pytest.raises(MissingPackage, match=r"pip install 'tile-scheduler\[plots\]'"):
        plots.roofline([cases.of_record(records[0])])
    status, said = told("roofline")
    assert (status, "matplotlib, which is not installed: pip install" in said) == (1, True)


def test_the_lower_bound_is_the_roof(square):
    point = Point.of(square)
    assert point.roof * CostModel(H200).lower_bound(SQUARE) == pytest.approx(SQUARE.flops)


def test_the_lines_of_the_guide_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    guide = (ROOT / "docs" / "use" / "pictures.md").read_text()
    ran = {"scheduler": scheduler}
    exec("\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)), ran)
    assert "m=256 n=128 k=512 dtype=float32" in " ".join(words(ran["text"]))
