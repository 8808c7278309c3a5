"""Counts what a reader of the code has to know: lines, files that run for a call, modules that an import loads.

Run on a CPU, without other options: ``python benchmarks/code_size.py``. ``--results FILE`` also writes the counts as
JSON. Product means the packages `scheduler`, `search_spaces` and `tile_scheduler`; the shelf is what is below a
folder `contrib`. A file runs if one of its functions does; what runs while a module is imported does not count.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scheduler", "search_spaces", "tile_scheduler")
SHELF = "contrib"
ODD_WORDS = re.compile(r"\b(who|whose|whom|whoever|nobody|somebody)\b")
# A call of each kind, as a program of its own: what it loads and runs is not mixed with that of another.
CALLS = {
    "stored_answer": """
import jax, jax.numpy as jnp, scheduler
x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
def run():
    with scheduler.target("NVIDIA H200"):
        jax.jit(scheduler.tuned_matmul).trace(x, x).lower(lowering_platforms=("cuda",))
""",
    "miss": """
import jax, jax.numpy as jnp, scheduler
x = jax.ShapeDtypeStruct((4160, 4160), jnp.bfloat16)
def run():
    with scheduler.target("NVIDIA H200"):
        jax.jit(scheduler.tuned_matmul).trace(x, x).lower(lowering_platforms=("cuda",))
""",
    "second_call": """
import jax.numpy as jnp, scheduler
x = jnp.ones((64, 64))
scheduler.tuned_matmul(x, x)
def run():
    scheduler.tuned_matmul(x, x)
""",
    "tune": """
from scheduler.cli.app import app
def run():
    app(["tune", "matmul", "m=64", "n=64", "k=64", "dtype=float32", "--budget", "3"], standalone_mode=False)
""",
}
COUNTS_FILES = """
import sys, threading
ran, importing = set(), threading.local()
def seen(frame, event, argument):
    if frame.f_code.co_name == "<module>":
        importing.depth = getattr(importing, "depth", 0) + {"call": 1, "return": -1}.get(event, 0)
    elif event == "call" and not getattr(importing, "depth", 0):
        ran.add(frame.f_code.co_filename)
threading.setprofile(seen)
sys.setprofile(seen)
run()
sys.setprofile(None)
threading.setprofile(None)
print("\\n".join(["files:", *ran]))
"""


def product() -> list[Path]:
    """Returns the product's source files."""
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_by_package() -> dict[str, int]:
    """Returns the lines of each folder directly below a package, and of the files directly in a package."""
    found: collections.Counter[str] = collections.Counter()
    for path in product():
        parts = path.relative_to(ROOT).parts
        found["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += lines([path])
    return dict(found.most_common())


def functions() -> dict[str, float]:
    """Returns the number of functions, and the share of private functions that their file names only once."""
    total = private = once = 0
    for path in product():
        text = path.read_text()
        tree = ast.parse(text)
        names = collections.Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for each in ast.walk(tree):
            if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            total += 1
            if each.name.startswith("_") and not each.name.startswith("__"):
                private += 1
                once += names[each.name] == 1
    return {"functions": total, "private_used_once": round(once / private, 3)}


def class_names_with_two_meanings() -> dict[str, list[str]]:
    """Returns class names that two or more files define, with these files. Leading underscores do not count."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in product():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in sorted(found.items()) if len(set(paths)) > 1}


def odd_words() -> int:
    """Returns how often `ODD_WORDS` occur in the product and its documents."""
    pages = [*product(), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(ODD_WORDS.findall(path.read_text())) for path in pages)


def files_that_run(program: str) -> list[str]:
    """Runs a program in another process. Returns the product's files of which a function runs in its `run()`."""
    output = _output(program + COUNTS_FILES).partition("files:\n")[2]
    return sorted({line for line in map(_in_product, output.splitlines()) if line})


def modules_loaded() -> int:
    """Returns how many of the product's modules ``import scheduler; scheduler.tuned_matmul`` loads."""
    names = _output("import sys, scheduler; scheduler.tuned_matmul; print('\\n'.join(['files:', *sys.modules]))")
    return sum(name.split(".")[0] in PACKAGES for name in names.partition("files:\n")[2].splitlines())


def _in_product(file: str) -> str:
    path = Path(file)
    relative = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path()
    return str(relative) if relative.parts[:1] and relative.parts[0] in PACKAGES else ""


def _output(program: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"TILE_SCHEDULER_CACHE": f"{folder}/cache.db", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True, check=False
        )
    if ran.returncode:
        raise SystemExit(f"a program failed:\n{program}\n{ran.stderr}")
    return ran.stdout


def counts(files_run: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Returns all counts by name, those of the files that run for each kind of call included."""
    shelf = [path for path in product() if SHELF in path.parts]
    return {
        "files": len(product()),
        "lines": lines(product()),
        "lines_outside_shelf": lines(product()) - lines(shelf),
        "lines_of_tests": lines((ROOT / "tests").rglob("*.py")),
        **functions(),
        "class_names_with_two_meanings": len(class_names_with_two_meanings()),
        "odd_words": odd_words(),
        "modules_of_tuned_matmul": modules_loaded(),
        **{f"files_run_{name}": len(files) for name, files in files_run.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="a file that gets the counts as JSON")
    parser.add_argument("--details", action="store_true", help="also lists packages, class names and files that run")
    given = parser.parse_args()
    files_run = {name: files_that_run(program) for name, program in CALLS.items()}
    found = counts(files_run)
    for name, count in found.items():
        print(f"{name:32} {count}")
    if given.details:
        print(json.dumps({"packages": lines_by_package(), "class names": class_names_with_two_meanings()}, indent=1))
        for name, files in files_run.items():
            print(f"{name}: {', '.join(files)}")
    if given.results:
        given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
