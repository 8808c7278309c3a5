"""The pictures of the documents are drawn from the shipped records and the recorded sweeps."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from rendered import faults

from scheduler.cli import plotting
from scheduler.core.records import Measurement
from scheduler.inspect import case as cases
from scheduler.inspect import plots
from search_spaces.matmul import MatmulProblem

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import pictures

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

KEPT = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def inputs():
    return pictures.inputs()


@pytest.fixture(scope="module")
def swept(inputs):
    (path,) = [path for path in inputs[1] if "matmul-m512-n512-k512" in path.name]
    return cases.of_recording(path)


def words(svg):
    """All that is written in a picture, line by line."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def numbers(svg):
    paths = [path.get("d", "") for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    return np.array([float(n) for path in paths for n in re.findall(r"-?\d+(?:\.\d+)?", path)])


@pytest.mark.parametrize("dark", [False, True])
def test_the_pictures_of_the_documents_are_drawn_from_what_is_shipped(inputs, dark):
    theme = "dark" if dark else "light"
    drawn = {}
    for name, made in pictures.pictures(*inputs, dark=dark):
        drawn[f"{name}-{theme}.svg"] = plots.svg(made)
        assert faults(made) == [], name
    assert drawn.keys() == {path.name for path in KEPT.glob(f"*-{theme}.svg")}
    for name, svg in drawn.items():
        kept = (KEPT / name).read_text()
        said = "these differ from what is shipped: python benchmarks/pictures.py"
        assert words(kept) == words(svg), f"{name}: {said}"
        assert np.allclose(numbers(kept), numbers(svg), atol=0.5), f"{name}: {said}"


def test_pictures_of_the_documents_are_small_and_the_wheel_has_none():
    assert all(path.stat().st_size < 200_000 for path in KEPT.iterdir())
    wheel = re.search(r"only-include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1]
    assert "docs" not in wheel


def test_every_picture_of_the_command_line_is_kept():
    names = {path.stem.rpartition("-")[0] for path in KEPT.iterdir()}
    assert names == {*plotting.WHAT, "gains", "predictions"}


def test_gains_are_the_times_of_the_records(inputs):
    records, _ = inputs
    for record in records:
        gain = pictures.Gain.of(record)
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
    assert {gain.library for gain in map(pictures.Gain.of, records) if gain} == {"XLA", "cuDNN"}


def test_predictions_compare_every_schedule_that_ran(swept):
    ran = [trial for trial in swept.trials if trial.backend != "xla" and isinstance(trial.outcome, Measurement)]
    assert f"{len(ran)} schedules of m=512" in " ".join(words(plots.svg(pictures.predictions(swept))))


def test_a_product_of_large_matrices_is_bound_by_the_matrix_units():
    found = cases.of_record(
        next(r for r in pictures.inputs()[0] if r.key.problem == MatmulProblem(4096, 4096, 4096).canonical())
    )
    best = found.best()
    assert pictures.bounds(found.model(best.kernel).breakdown(found.footprint(best)), 1) == ["matrix units"]
