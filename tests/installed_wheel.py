"""Does what a new user does first, where nothing but the wheel is installed: the program of a document, some commands.

cd EMPTY; ENVIRONMENT/bin/python -P tests/installed_wheel.py README.md
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path


def run(*command: str, accepted: tuple[int, ...] = (0,)) -> str:
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert ended.returncode in accepted, f"{command[1:]} ended with status {ended.returncode}: {ended.stdout}"
    return ended.stdout


def main(document: Path) -> None:
    assert not any(Path.cwd().iterdir()), f"{Path.cwd()} is not empty"
    os.environ["TILE_SCHEDULER_CACHE"] = str(Path.cwd() / "cache.db")
    os.environ.pop("PYTHONPATH", None)  # it could lead to what the wheel lacks
    program = Path("program.py")
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)))
    print(run(sys.executable, str(program)))

    command = str(Path(sys.executable).with_name("tile-scheduler"))
    place = run(sys.executable, "-c", "import tile_scheduler as ts; print(ts.tune.__code__.co_filename)")
    assert Path(place).is_relative_to(sys.prefix), place
    print(run(command, "--version"))
    print(run(command, "doctor", accepted=(0, 3)).splitlines()[0])  # 3: with a warning, as of records of another JAX
    shipped = json.loads(run(command, "list", "--hardware", "H200", "--json"))
    print(len(shipped), "shipped records for the H200")
    assert shipped, "the wheel has no cache.db"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
