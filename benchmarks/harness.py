"""What every benchmark shares: what its figures depend on, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.hardware import Hardware
from scheduler.record import Environment
from search_spaces import Operation

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment(measured: Environment, *operations: Operation[Any]) -> dict[str, Any]:
    """Versions and date, the kernels' versions, and the commit; "dirty" where the tree was not the commit's."""
    return {
        **dataclasses.asdict(measured),
        "kernels": {f"{o.name}/{k.backend}": k.version for o in operations for k in o.kernels},
        "commit": _git("rev-parse", "HEAD"),
        # A result written by an earlier benchmark of the same session is not a change of what is measured.
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
    }


def write_result(
    name: str,
    hardware: Hardware,
    *,
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
) -> Path:
    """Writes ``benchmarks/results/<name>-<hardware>.json``; from a dirty tree ``.dirty.json``, which is not to be kept.

    Args:
      summary: the few figures that matter, by the names that are used to speak of them.
      rows: everything measured, raw repetitions included: the summary can be computed from it again.

    Returns:
      The file.
    """
    kind = re.sub(r"[^a-z0-9]+", "-", hardware.kind.lower()).strip("-")
    path = RESULTS / f"{name}-{kind}{'.dirty' if environment['dirty'] else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
    result = {
        "command": command,
        "environment": {"device": hardware.id, **environment},
        "summary": dict(summary),
        "rows": [dict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}" + (" (the tree has changes: not a result to keep)" * environment["dirty"]))
    return path


def _git(*words: str) -> str:
    """What git says, "" outside a checkout."""
    ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else ""
