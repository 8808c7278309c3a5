"""The package as others meet it (its version, its types, who else is named `scheduler`) and as its readers do."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import scheduler
import search_spaces
import tile_scheduler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("scheduler", "search_spaces", "tile_scheduler")
FOREIGN = {
    "scheduler/__init__.py": "Scheduler = object\n",
    "scheduler/error.py": "class SchedulerError(Exception): ...\n",
}


def ran(*command, **environment):
    """Status, and all that was said. Python finds what `environment` says, and the packages that tests run with."""
    env = os.environ | {"PYTHONPATH": ""} | environment
    done = subprocess.run(list(map(str, command)), env=env, cwd="/", capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Ours, and one of another project that has a package `scheduler`, too."""
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    place = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (ours,) = place.glob("*.whl")
    theirs = place / "scheduler-0.8.11-py3-none-any.whl"
    info = "scheduler-0.8.11.dist-info"
    files = FOREIGN | {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: scheduler\nVersion: 0.8.11\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(theirs, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return {"ours": ours, "theirs": theirs}


@pytest.fixture
def site(tmp_path, wheels):
    """Installs ours and theirs, in an order, into an environment: its site-packages, and its command."""

    def install(*steps):
        venv.create(tmp_path / "venv", with_pip=False, system_site_packages=False)
        python = tmp_path / "venv" / "bin" / "python"
        for step in steps:
            change = (
                ["uninstall", "-y", "scheduler"]
                if step == "away"
                else ["install", "--no-deps", "--no-index", wheels[step]]
            )
            status, said = ran(sys.executable, "-m", "pip", "--python", python, *change)
            assert status == 0, said
        (place,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        return place, python.with_name("tile-scheduler")

    return install


def test_the_version_and_the_types_come_with_the_wheel(site):
    place, command = site("ours")
    assert ran(command.with_name("python"), "-c", "import scheduler; print(scheduler.__version__)") == (
        0,
        f"{scheduler.__version__}\n",
    )
    assert tile_scheduler.__version__ == scheduler.__version__
    assert all((place / package / "py.typed").exists() for package in PACKAGES)
    assert f"tile_scheduler-{scheduler.__version__}.dist-info" in os.listdir(place)


def test_what_another_package_was_installed_over_says_so(site):
    place, command = site("ours", "theirs")
    sentence = (
        f"{place}/scheduler/__init__.py is of scheduler 0.8.11, which was installed over tile-scheduler: pip uninst"
    )
    status, said = ran(command, "doctor")
    assert (status, said.count("\n")) == (1, 1)
    assert sentence in said
    status, said = ran(command.with_name("python"), "-c", "import search_spaces")
    assert status == 0
    assert sentence in said
    status, said = ran(command.with_name("python"), "-c", "import tile_scheduler as ts; ts.tuned_matmul")
    assert status == 1
    assert f"ImportError: {sentence}" in said


def test_what_was_installed_over_another_package_works_and_says_so(site):
    place, _ = site("theirs", "ours")
    sentence = (
        f"scheduler 0.8.11 is installed in {place}, too, its files mixed with those of tile-scheduler: pip uninst"
    )
    status, said = ran(sys.executable, "-c", "import scheduler, search_spaces; scheduler.tuned", PYTHONPATH=str(place))
    assert status == 0, said
    assert said.count(sentence) == 1
    look = (
        "from scheduler.core import hardware as h; from scheduler.inspect import doctor as d; "
        "print(*(f for f in d.examine(lambda: h.CPU) if f.what == 'package'))"
    )
    status, said = ran(sys.executable, "-W", "ignore", "-c", look, PYTHONPATH=str(place))
    assert (status, f"state='broken', detail='{sentence}" in said) == (0, True), said


def test_what_is_left_when_the_other_package_goes_again_says_so(site):
    place, command = site("ours", "theirs", "away")
    status, said = ran(command, "list")
    assert (status, said.count("\n")) == (1, 1)
    assert f"{place}/scheduler/__init__.py is missing" in said
    assert "pip install --force-reinstall" in said


def test_a_file_beside_a_script_that_hides_the_package_is_named(tmp_path):
    (tmp_path / "scheduler.py").write_text("")
    status, said = ran(sys.executable, script(tmp_path, "import search_spaces"), PYTHONPATH=str(ROOT))
    assert status == 0
    assert f"{tmp_path}/scheduler.py hides the package scheduler of tile-scheduler, {ROOT}/scheduler" in said
    assert "rename that one" in said
    status, said = ran(
        sys.executable, script(tmp_path, "from tile_scheduler import tuned_matmul"), PYTHONPATH=str(ROOT)
    )
    assert status == 1
    assert f"ImportError: {tmp_path}/scheduler.py hides the package scheduler" in said
    status, said = ran(
        sys.executable, script(tmp_path, "from tile_scheduler.__main__ import main; main()"), PYTHONPATH=str(ROOT)
    )
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith(f"tile-scheduler: {tmp_path}/scheduler.py hides")


def test_workers_find_the_packages_of_their_parent_whatever_lies_in_the_directory(tmp_path):
    (tmp_path / "scheduler.py").write_text("raise SystemExit('not this one')\n")
    command = [sys.executable, "-P", "-m", "scheduler", "tune", "matmul", "m=16", "n=16", "k=16", "dtype=float32"]
    done = subprocess.run(
        [*command, "--budget", "2", "--workers", "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_package_in_its_place_says_nothing():
    assert tile_scheduler.installation_problem() is None
    status, said = ran(sys.executable, "-W", "error", "-c", "import scheduler, search_spaces", PYTHONPATH=str(ROOT))
    assert (status, said) == (0, "")


def test_tile_scheduler_has_all_public_names_and_loads_what_is_used():
    assert set(dir(tile_scheduler)) == {*scheduler.__all__, *search_spaces.__all__}
    assert tile_scheduler.tuned_matmul is scheduler.tuned_matmul
    assert tile_scheduler.Space is search_spaces.Space
    with pytest.raises(
        AttributeError, match=r"'tile_scheduler' has no attribute 'tuned_nothing' \(it has: CacheMiss, "
    ):
        tile_scheduler.tuned_nothing  # noqa: B018
    program = """
import sys
import tile_scheduler as ts
dir(ts)
assert "jax" not in sys.modules
ts.tuned_matmul
mosaic = {"jax.experimental.mosaic.gpu", "jax.experimental.pallas.mosaic_gpu", "jax._src.tpu_custom_call"}
loaded = mosaic & {*sys.modules}
assert not loaded, loaded
"""
    assert ran(sys.executable, "-W", "error", "-c", program, PYTHONPATH=str(ROOT)) == (0, "")


def test_the_description_on_an_index_has_no_relative_link():
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    module = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hatch_build = importlib.util.module_from_spec(module)
    module.loader.exec_module(hatch_build)
    text = (ROOT / "README.md").read_text()
    shown = hatch_build.description(text, "https://example.com/us", "v1")
    assert "](https://example.com/us/blob/v1/docs/" in shown
    relative = r"""\]\((?!https://)|(?:src|srcset|href)="(?!https://)"""
    assert re.search(relative, text)
    assert not re.search(relative, shown)
    unlinked = hatch_build.description(text, "", "v1")
    assert not re.search(relative, unlinked)
    assert "example.com" not in unlinked
    assert re.findall("```.*?```", text, re.DOTALL) == re.findall("```.*?```", unlinked, re.DOTALL)


def test_a_jax_newer_than_those_tried_is_a_warning(monkeypatch):
    tried = {tuple(map(int, path.stem[4:].split(".")[:2])) for path in (ROOT / "constraints").glob("jax-*.txt")}
    assert max(tried) == tile_scheduler.NEWEST_JAX
    assert tile_scheduler.untried_jax() is None
    monkeypatch.setattr(tile_scheduler, "_checked", False)
    monkeypatch.setattr(tile_scheduler, "NEWEST_JAX", (0, 9))
    with pytest.warns(RuntimeWarning, match=r"tested with JAX below 0\.10, and this is .*: pip install 'jax<0\.10'"):
        tile_scheduler.warn()


# What readers meet: files and functions of a size that one can follow, and the field's words.

SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MOST_LINES = 700
MOST_NESTED = 4
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)


def nested(node):
    """How many blocks lie within each other below `node`; an `elif` is no block of its own."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        chained = (
            isinstance(node, ast.If) and name == "orelse" and len(children) == 1 and isinstance(children[0], ast.If)
        )
        for child in children:
            deepest = max(deepest, nested(child) + (isinstance(child, BLOCKS) and not chained))
    return deepest


@pytest.mark.parametrize(
    ("body", "levels"),
    [
        ("return 1", 0),
        ("if a:\n  b\nelif c:\n  d\nelse:\n  e", 1),
        ("if a:\n  b\nelse:\n  if c:\n    d\n  e", 2),
        ("for a in b:\n  with c:\n    try:\n      d\n    except E:\n      if f:\n        g", 4),
        ("def inner():\n  while a:\n    match b:\n      case 1:\n        c", 3),
    ],
)
def test_blocks_within_each_other_are_counted(body, levels):
    (function,) = ast.parse("def f():\n" + "".join(f"  {line}\n" for line in body.splitlines())).body
    assert nested(function) == levels


def test_no_function_is_nested_deeper_than_four():
    deep = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and nested(node) > MOST_NESTED
    }
    assert not deep


def test_no_file_is_longer_than_700_lines():
    long = {str(path.relative_to(ROOT)) for path in SOURCES if len(path.read_text().splitlines()) > MOST_LINES}
    assert not long


# Words of our own for what the field has words for, as far as they mean nothing else.
OWN_WORDS = re.compile(
    r"\b(multipliers?|copiers?|copy units?|blocks? that stays?|to and fro|fills? the cores|tiles shared along k"
    r"|what follows|whole numbers?|in_groups|mailed|(?-i:Board|Team|Everyone)|askew|met in the cache|portable"
    r"|model said|of bound|the model's first|unconfirmed|paid answer|free answer|doubtful|suspect|judges?"
    r"|raster_width|epilogue_n|in_flight|hold=|split=|swap=)(?!\w)",
    re.IGNORECASE,
)


def test_the_words_are_those_of_the_field():
    read = [*SOURCES, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {
        str(path.relative_to(ROOT)): sorted({match[0] for match in OWN_WORDS.finditer(path.read_text())})
        for path in read
        if OWN_WORDS.search(path.read_text())
    }
    assert not found
