"""What the documents show runs as it is written, what they name exists, and their figures are those of the results."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import hopper_matmul
import pytest
import typer.main
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.core.hardware import find
from scheduler.model.cost import CostModel
from scheduler.search import jobs
from scheduler.store.store import shipped
from search_spaces import OPERATIONS
from search_spaces.jax_compat import PYTHON_OF_JAX
from search_spaces.matmul import MatmulProblem
from tile_scheduler import __version__

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import command_line_page
import results_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "use" / "own-kernels.md").read_text()
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "findings/README.md")
DOCUMENTS = (*TOP, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
CODE = ("scheduler", "search_spaces", "benchmarks", "tests")
IMPORTS = """
import dataclasses
import jax
import jax.numpy as jnp
import scheduler
from jax.experimental import pallas as pl
from search_spaces import Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Problem, Space
"""


# What a new reader sees, by the name of the module that its code becomes; what it shows runs as it is written.
FIRST = {
    "readme": "README.md",
    "quickstart": "docs/quickstart.md",
    "model": "docs/guides/model.md",
    "kernel": "docs/guides/kernel.md",
    "offline": "docs/guides/offline-job.md",
}
STEP = "step = lambda params, batch: params * batch @ batch\nparams = batch = jnp.ones((16, 16))\n"
# What the snippets of other pages take for granted.
ASSUMED = {
    "kernels/ragged-dot.md": """
from scheduler import tuned_ragged_dot
from jax.sharding import PartitionSpec as P
x, w, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 4)), jnp.array([3, 5])
psum, axis_index = jax.lax.psum, jax.lax.axis_index
jax.lax.psum, jax.lax.axis_index = lambda x, axis: x, lambda axis: jnp.int32(0)
""",
    "use/calls.md": "a, b = jnp.ones((16, 16)), jnp.ones((16, 16))\n",
    "use/extract.md": STEP,
    "use/optimize.md": STEP.replace("params * batch @ batch", "(params * batch @ batch, 0.0)") + "state = 2 * batch\n",
    "use/own-kernels.md": "",
    "use/pictures.md": "",
    "use/plans.md": STEP,
    "use/sharding.md": """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scheduler import tuned_matmul
x = up = down = jnp.ones((16, 16))
""",
    "use/tuning.md": """
import optuna
problem = {"m": 16, "n": 16, "k": 16, "dtype": "float32"}
""",
}


def python(text):
    """The code of its blocks, those within a list too."""
    return "\n".join(
        map(textwrap.dedent, re.findall(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE))
    )


def run(*arguments, directory=ROOT):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=directory, env=env
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def commands(text):
    """The lines of the blocks without a language that run this package's command, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("tile-scheduler ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.slow
def test_pages_for_a_new_reader_run_word_for_word(tmp_path, monkeypatch):
    """Each page is a module of one process; then its commands run where its files are."""
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    monkeypatch.setenv("TILE_SCHEDULER_MISSES", "on")
    monkeypatch.chdir(tmp_path)
    for name, page in FIRST.items():
        (tmp_path / f"{name}.py").write_text(python((ROOT / page).read_text()))
    run("-c", f"import {', '.join(FIRST)}", directory=tmp_path)
    for page in ("quickstart", "kernel", "offline"):
        (tmp_path / "own.py").write_text((tmp_path / f"{page}.py").read_text())
        for command in commands((ROOT / FIRST[page]).read_text()):
            ended = CliRunner().invoke(app, command)
            # doctor warns of records that another JAX measured.
            assert ended.exit_code == 0 or command == ["doctor"], f"{shlex.join(command)}: {ended.output}"


@pytest.mark.slow
def test_snippets_of_the_pages_of_use_run(tmp_path):
    """Each page in a namespace of its own, with the names that it takes for granted."""
    snippets = {page: python((ROOT / "docs" / page).read_text()) for page in ASSUMED}
    with_code = {
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if python(path.read_text())
    }
    assert with_code - {page.removeprefix("docs/") for page in FIRST.values()} == snippets.keys()
    program = "\n".join(f"exec({IMPORTS + ASSUMED[page] + code!r}, {{}})" for page, code in snippets.items())
    run("-c", program, directory=tmp_path)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_that_a_document_shows_are_parsed(path):
    """Without the command running: each option and argument is one of the command's."""
    group = typer.main.get_command(app)
    for words in commands((ROOT / path).read_text()):
        if "..." not in words:
            words = words[: next((n for n, word in enumerate(words) if word in (">", "|", "&&")), len(words))]
            group.commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.slow
def test_the_kernel_of_the_guide_is_searched_and_called(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(python((ROOT / FIRST["kernel"]).read_text()))
    assert "own_kernel.py:BIAS_GELU m=64 n=128" in GUIDE
    example = ROOT / "examples" / "own_kernel.py"
    out = run("-m", "scheduler", "tune", f"{example}:BIAS_GELU", "m=64", "n=128", "--budget", "8", "--json")
    assert '"trials"' not in out
    assert '"tried": 5' in out  # four tiles and the library: none was dropped or failed to be proposed
    out = run("-m", "scheduler", "tune", f"{file}:summed_rows", "x=float32[64,128]", "--budget", "8", "--json")
    assert '"tried": 5' in out


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_that_a_document_names_exist(path):
    # A command's name follows at the start of a line or of a code span; elsewhere it is prose.
    named = re.findall(r"(?:^|`)tile-scheduler ([a-z-]+)", (ROOT / path).read_text(), re.MULTILINE)
    assert set(named) <= set(typer.main.get_command(app).commands)


def test_the_page_of_the_command_line_is_that_of_its_code():
    page = command_line_page.PAGE.read_text()
    assert command_line_page.with_commands(page) == page, "run: python benchmarks/command_line_page.py"
    commands = typer.main.get_command(app).commands
    assert set(command_line_page.PAGES) <= set(commands)
    options = {each.opts[0] for command in commands.values() for each in command.params}
    assert options >= command_line_page.SHARED
    assert all(f"`{option}`" in page for option in options if option.startswith("--"))
    own = {re.sub("_(saving|jvp|backward)$", "", name) for name in OPERATIONS}
    assert all(f"`{name}`" in page for name in (*own, "_saving", "_jvp", "_backward"))


def test_the_site_has_at_most_20000_words():
    """Outside of blocks of code, and without the reference, which docstrings are."""
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2], re.MULTILINE)
    pages = [README, *((ROOT / "docs" / name).read_text() for name in listed if name != "README.md")]
    cells = json.loads((ROOT / "docs" / "teaching.ipynb").read_text())["cells"]
    pages += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    words = (re.findall(r"[A-Za-z][\w'-]*", re.sub(r"```.*?```", "", page, flags=re.DOTALL)) for page in pages)
    assert sum(map(len, words)) <= 20_000


def test_jobs_that_documents_show_are_jobs():
    shown = [
        job for path in DOCUMENTS for job in re.findall(r"```toml\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    ]
    assert shown
    for job in shown:
        assert all(isinstance(task, jobs.Task) for task in jobs.parse(job)), job


def anchors(text):
    """Of each heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_of_a_document_lead_somewhere(path):
    text = (ROOT / path).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = ((ROOT / path).parent / file) if file else ROOT / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def exists(name):
    """A file of the repository; of its code, also by the end of its path. `<op>` and `*` stand for any name."""
    pattern = re.sub(r"<\w+>", "*", name)
    return any(ROOT.glob(pattern)) or any(any((ROOT / place).glob(f"**/{pattern}")) for place in CODE)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_files_that_a_document_names_exist(path):
    text = (ROOT / path).read_text()
    spans = re.findall(r"`([\w./*<>-]+\.(?:py|md|toml|json|svg|db))`", text)
    top = "benchmarks|docs|examples|records|scheduler|search_spaces|sweeps|tests"
    paths = re.findall(rf"(?<![\w/.])((?:{top})/[\w./*-]+)", text)
    shown = re.findall(r'^```python title="(.*)"$', text, re.MULTILINE)  # files that the reader writes
    missing = {name for name in (*spans, *(found.rstrip(".-/") for found in paths)) if not exists(name)}
    assert missing <= {*shown}


def test_documents_that_code_names_exist():
    for place in (*CODE, "examples", "records", "sweeps"):
        for file in (path for kind in ("*.py", "*.toml", "*.md") for path in (ROOT / place).rglob(kind)):
            named = set(re.findall(r"(?<![\w./])docs/[\w./-]+\.md", file.read_text()))
            assert all((ROOT / name).exists() for name in named), f"{file}: {named}"


def test_every_document_is_reached_from_the_readme():
    reached, left = set(), ["README.md"]
    while left:
        path = left.pop()
        if path in reached or not path.endswith(".md"):
            continue
        reached.add(path)
        links = re.findall(r"\]\(([^)#:]+)", (ROOT / path).read_text())
        left += [os.path.relpath((ROOT / path).parent / link, ROOT) for link in links]
    assert set(DOCUMENTS) <= reached


def test_each_finding_has_a_line_in_the_index():
    folder = ROOT / "findings"
    lines = [line.split("|")[1:-1] for line in (folder / "README.md").read_text().splitlines() if ".sh" in line]
    assert [name.strip() for name, *_ in lines] == [f"[`{x.name}`]({x.name})" for x in sorted(folder.glob("*.sh"))]
    for name, *rest in lines:
        assert all(cell.strip() for cell in rest), name


def test_the_version_of_the_package_is_that_of_the_changelog_and_the_citation():
    assert re.search(r"(?m)^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text())[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_figures_of_the_documents_are_those_of_the_results():
    results = {path.stem: json.loads(path.read_text()) for path in results_page.RESULTS.glob("*.json")}
    run = "run: python benchmarks/results_page.py"
    page = results_page.page(results)
    assert results_page.PAGE.read_text() == page, run
    for path in (results_page.README, results_page.REPEATED):
        assert results_page.with_figures(path.read_text(), results) == path.read_text(), run
    for name, ratio in (("matmul", "pallas_vs_xla"), ("fused", "pallas_vs_written"), ("rows", "pallas_vs_xla")):
        rows = [
            row
            for row in results[f"{name}-nvidia-h200"]["rows"]
            if row.get("operation") in (None, *results_page.FORWARD)
        ]
        ends = (end(rows, key=lambda row: row[ratio]) for end in (min, max))
        for row in (*ends, *(row for row in rows if row[ratio] < results_page.LOSS)):
            problem = row["problem"].removesuffix(" dtype=bfloat16")
            assert re.search(rf"\| {problem} \|.* {row[ratio]:.3f} \|", page), problem
    for name in ("final_vs_xla_geomean", "final_vs_xla_worst"):
        assert f"| {results['matmul-nvidia-h200']['summary'][name]:.3f} |" in README, name


@pytest.mark.slow
def test_the_demo_finds_what_was_tuned():
    fields = ("m=32", "n=32", "k=32", "dtype=float32")
    assert "tuning it now" in run("examples/demo.py", *fields)
    out = run("examples/demo.py", *fields)
    assert "tuning" not in out
    assert "2nd call: found in the cache" in out
    assert "numbers:  right" in out


def test_the_terms_of_the_model_are_told_by_the_names_that_explain_prints():
    _, page = (ROOT / "docs" / "search-and-model.md").read_text().split("| term, as `explain` prints it |")
    table, _ = page.split("\n\n", 1)
    told = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    footprint = hopper_matmul.footprint(MatmulProblem(512, 512, 512), hopper_matmul.schedule())
    assert told == set(CostModel(find("NVIDIA H200")).terms(footprint))


def test_install_says_with_which_jax_the_shipped_records_are_current():
    install = (ROOT / "docs" / "use" / "versions.md").read_text()
    (made,) = {record.environment.jax for record in shipped().records()}
    assert f"measured with JAX {made}" in install
    rows = re.findall(r"(?m)^\| .*? \| ([\d.]+) or newer \| ([\d.]+) \| (\w+) \| (\w+)", install)
    assert {jax for _, jax, *_ in rows} == {path.stem[4:] for path in (ROOT / "constraints").glob("jax-*.txt")}
    for python, jax, records, kernels in rows:
        version = tuple(map(int, jax.split(".")))
        needed = next(needed for since, needed in PYTHON_OF_JAX if version >= since)
        assert python == ".".join(map(str, needed))
        assert (records == "current") == (jax.split(".")[:2] == made.split(".")[:2])
        assert (kernels == "yes") == (version >= (0, 11, 2))
