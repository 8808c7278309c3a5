"""Pictures of what was tuned: what they show is what is known, and those of the documents are of what is shipped."""

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
from scheduler.cli import plotting
from scheduler.cli.app import app
from scheduler.core.errors import MissingPackage, NothingToDraw
from scheduler.core.hardware import CPU, find
from scheduler.core.records import Measurement
from scheduler.inspect import case as cases
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from scheduler.inspect.explain import GROUPS, bounds, group_of
from scheduler.inspect.plots.gallery import gallery
from scheduler.inspect.plots.roofline import Gain, Point, grouped
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


# What is kept in the documents


@pytest.mark.parametrize("dark", [False, True])
def test_the_pictures_of_the_documents_are_drawn_from_what_is_shipped(records, dark):
    theme = "dark" if dark else "light"
    drawn = {}
    for name, made in gallery(records, SWEEPS, dark=dark):
        drawn[f"{name}-{theme}.svg"] = plots.svg(made)
        assert faults(made) == [], name
    assert drawn.keys() == {path.name for path in KEPT.glob(f"*-{theme}.svg")}
    for name, svg in drawn.items():
        kept = (KEPT / name).read_text()
        said = "these differ from what is shipped: tile-scheduler plot all --out docs/pictures"
        assert words(kept) == words(svg), f"{name}: {said}"
        assert np.allclose(numbers(kept), numbers(svg), atol=0.5), f"{name}: {said}"


def test_pictures_of_the_documents_are_small_and_the_wheel_has_none():
    assert all(path.stat().st_size < 200_000 for path in KEPT.iterdir())
    wheel = re.search(r"only-include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert "docs" not in wheel


def test_every_picture_of_the_command_line_is_kept():
    names = {path.stem.rpartition("-")[0] for path in KEPT.iterdir()}
    assert names == {*plotting.MANY, *plotting.ONE}


# As files


def test_pictures_in_one_page_share_no_id_and_say_what_they_are(records):
    compared = [record for record in records if Gain.of(record)]
    svgs = [plots.svg(plots.gains(compared[:count], dark=dark)) for count in (1, 3, 60) for dark in (False, True)]
    svgs.append(plots.svg(plots.roofline([cases.of_record(records[0])])))
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

    first = plots.svg(plots.gains(records))
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert plots.svg(plots.gains(records)) == first
    assert plots.png(plots.gains(records[:1])).startswith(b"\x89PNG")


def test_light_and_dark_differ_in_colours_alone(records):
    light, dark = (plots.svg(plots.gains(records, dark=dark)) for dark in (False, True))
    assert words(light) == words(dark)
    assert np.array_equal(numbers(light), numbers(dark))
    assert "#ffffff" in light
    assert "#ffffff" not in dark


# Of many


def test_gains_are_the_times_of_the_records(records):
    for record in records:
        gain = Gain.of(record)
        xla, cudnn = (record.best(frozenset({name})) for name in ("xla", "cudnn"))
        if ("cudnn" in record.versions and cudnn is None) or not (xla or cudnn):
            assert gain is None, "what cuDNN was not tried for is compared with nobody"
            continue
        library = min((one for one in (xla, cudnn) if one), key=lambda one: one.measurement.median_s)
        assert gain.library == ("cuDNN" if library is cudnn else "XLA")
        assert gain.final * record.winner.measurement.median_s == pytest.approx(library.measurement.median_s)
        assert gain.beaten == (record.winner == library and gain.searched is not None)
    answered = [record for record in records if record.winner.backend == "xla"]
    assert answered, "what XLA wins is shipped as well"
    assert {gain.library for gain in map(Gain.of, records) if gain} == {"XLA", "cuDNN"}


@pytest.mark.parametrize("count", [1, 14, 200])
def test_gains_are_drawn_of_one_and_of_many(records, count):
    some = (records * 2)[:count] if count > 20 else [record for record in records if Gain.of(record)][:count]
    made = plots.gains(some)
    assert f"{len([r for r in some if Gain.of(r)])} problem" in " ".join(words(plots.svg(made)))
    assert faults(made) == []


def copies(records, operations, problems, name="operation", field="n"):
    """Records of so many problems of so many operations, with the times of shipped ones."""
    timed = [record for record in records if Gain.of(record)]
    return [
        dataclasses.replace(
            record, key=dataclasses.replace(record.key, operation=f"{name}_{of}", problem=f'{{"{field}": {number}}}')
        )
        for of in range(operations)
        for number in range(problems)
        for record in [timed[(37 * of + 11 * number) % len(timed)]]
        if record.library_entry
    ]


@pytest.mark.parametrize(
    ("operations", "problems", "name", "field"),
    [
        (1, 1, "operation", "n"), (12, 100, "operation", "n"), (40, 3, "operation", "n"), (1, 600, "operation", "n"),
        (3, 5, "package.kernels:" + "fused_bias_gelu_" * 6, "a_very_long_name_of_a_field_" * 5),
        (12, 10, "x" * 200, "n"), (2, 30, "W" * 60, "n"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_gains_can_be_seen_of_however_many_and_however_they_are_called(records, operations, problems, name, field):
    made = plots.gains(copies(records, operations, problems, name, field))
    assert faults(made) == []
    bars = [bar for bars in made.axes[0].containers for bar in bars]
    assert len(bars) >= operations * problems // 2


@pytest.mark.parametrize("times", [1e-3, 0.4, 0.97, 1.0, 1.003, 3.0, 150.0, 1e6])
def test_gains_of_any_size_are_seen(records, times):
    (record,) = [one for one in records if one.key.operation == "matmul" and one.winner.backend == "mosaic_gpu"][:1]
    library = record.library_entry
    slower = dataclasses.replace(library.measurement, median_s=times * record.winner.measurement.median_s)
    entries = [record.winner, dataclasses.replace(library, measurement=slower)]
    for order in (entries, entries[::-1]):
        assert faults(plots.gains([dataclasses.replace(record, entries=tuple(order))])) == []


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


def test_the_rarest_operations_of_a_roofline_share_a_marker():
    point = Point("", 1.0, 1.0, None, 1.0, 1.0)
    many = [dataclasses.replace(point, operation=f"op{n:02}") for n in range(20) for _ in range(1 + (n != 3))]
    points, names = grouped(many)
    assert names[-1] == "6 others"
    assert len({*names}) == len(names) == 15
    assert "op03" not in names
    assert {p.operation for p in points} == {*names}
    assert grouped(many[:5])[1] == ["op00", "op01", "op02"]


def test_nothing_stands_above_the_roofline_of_cold_operands(records):
    points = [Point.of(cases.of_record(record)) for record in records]
    assert all(0 < point.rate <= point.roof for point in points if point is not None)


def test_pictures_of_nothing_say_what_to_do():
    for draw, told in ((plots.gains, "tune a problem first"), (plots.roofline, "tune a problem first")):
        with pytest.raises(NothingToDraw, match=told):
            draw([])
    with pytest.raises(NothingToDraw, match="sweep or tune a problem"):
        plots.predictions([Case(MATMUL, SQUARE, H200)])


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
    assert bounds(parts, 1) == ["matrix units"]


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
    assert "Kendall's tau" in " ".join(words(plots.svg(plots.predictions([case]))))


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
    assert told("gains", "softmax", "rows=4096", "--out", tmp_path / "g.svg")[0] == 0
    assert any("rows=4096 columns=16384" in text for text in words((tmp_path / "g.svg").read_text()))


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["roofing"], 2, "no picture 'roofing'; did you mean 'roofline'?"),
        (["gains", "--out", "g.jpeg"], 2, "--out must end in .svg or .png"),
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
        (["gains", "softmax", "rows=3"], 1, "no such record is stored or shipped"),
        (["best-so-far", "matmul", "m=4096", "n=4096", "k=4096"], 1, "no trials are kept"),
        (["best-so-far", "--recording", "nowhere.jsonl.gz"], 1, "nowhere.jsonl.gz cannot be read"),
        (["gains", "--out", "nowhere/g.svg"], 1, "nowhere does not exist: create it"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_answered_in_a_sentence(arguments, status, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended, said = told(*arguments)
    assert (ended, sentence in said) == (status, True), said


def test_without_recorded_sweeps_all_pictures_but_one_are_drawn(records):
    missing = {name: made for name, made in gallery(records[::5], []) if isinstance(made, str)}
    assert missing.keys() == {"best-so-far"}
    assert "the trials of a search" in missing["best-so-far"]


def test_all_draws_what_it_can_and_says_what_the_rest_needs(tmp_path, monkeypatch, records):
    def some(*_, dark):
        yield "gains", plots.gains(records[:1], dark=dark)
        yield "tiles", "it needs a problem"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scheduler.inspect.plots.gallery.gallery", some)
    status, said = told("all")
    assert status == 0
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"gains-dark.svg", "gains-light.svg"}
    assert said.count("tiles is not drawn: it needs a problem") == 1


def test_a_gallery_of_nothing_says_of_each_picture_what_it_needs(monkeypatch, tmp_path):
    needs = dict(gallery([], []))
    assert needs.keys() == {*plotting.MANY, *plotting.ONE}
    assert all(isinstance(need, str) and "a problem" in need for need in needs.values())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scheduler.store.store.shipped", lambda: None)
    status, said = told("all")
    assert (status, said.count("is not drawn")) == (1, len(needs))
    assert "no picture could be drawn" in said


def test_a_picture_of_many_is_of_the_chip_with_the_most_records(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    here = scheduler.Store(str(tmp_path / "cache.db"))
    scheduler.tune("matmul", {"m": 256, "n": 128, "k": 128, "dtype": "float32"}, budget=3, store=here)
    status, said = told("gains", "--out", tmp_path / "g.svg")
    assert (
        status,
        "NVIDIA H200 (132 cores, 140 GiB), which has the most records; --hardware selects another (" in said
        and "cpu (" in said,
    ) == (
        0,
        True,
    )
    assert told("gains", "--hardware", "cpu", "--out", tmp_path / "c.svg")[0] == 0
    assert "XLA's time over ours, cpu: 1 problem" in words((tmp_path / "c.svg").read_text())
    for what in ("landscape", "best-so-far", "time-breakdown", "tiles", "predictions", "block-sizes"):
        status, said = told(what, "matmul", "m=256", "n=128", "k=128", "dtype=float32", "--out", tmp_path / "x.svg")
        assert status == 0, said


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch, records):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not plots.available()
    with pytest.raises(MissingPackage, match=r"pip install 'tile-scheduler\[plots\]'"):
        plots.gains(records)
    status, said = told("gains")
    assert (status, "matplotlib, which is not installed: pip install" in said) == (1, True)


def test_predictions_compare_every_schedule_that_ran(swept):
    ran = [trial for trial in swept.trials if trial.backend != "xla" and isinstance(trial.outcome, Measurement)]
    assert f"{len(ran)} schedules of m=512" in " ".join(words(plots.svg(plots.predictions([swept]))))


def test_the_lower_bound_is_the_roof(square):
    point = Point.of(square)
    assert point.roof * CostModel(H200).lower_bound(SQUARE) == pytest.approx(SQUARE.flops)


def test_the_lines_of_the_guide_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    guide = (ROOT / "docs" / "use" / "pictures.md").read_text()
    ran = {"scheduler": scheduler}
    exec("\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)), ran)
    assert "m=256 n=128 k=512 dtype=float32" in " ".join(words(ran["text"]))
