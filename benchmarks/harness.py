"""What every benchmark shares: what its figures depend on, the file that keeps them, and the time it may take."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scheduler.core.hardware import Hardware
from scheduler.core.records import Environment
from scheduler.measure.gpu import query_driver
from search_spaces import Operation, Problem

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# What of a GPU decides how fast it is, by the name in results and that of NVIDIA's driver.
GPU_STATE = {
    "index": "index", "sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "most_sm_mhz": "clocks.max.sm",
    "most_memory_mhz": "clocks.max.mem", "power_w": "power.draw", "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu", "clocks_lowered_by": "clocks_event_reasons.active",
}  # fmt: skip
T = TypeVar("T")
P = TypeVar("P", bound=Problem)


def environment(measured: Environment, *operations: Operation[Any]) -> dict[str, Any]:
    """Versions and date, the kernels' versions, and the commit."""
    return {
        **dataclasses.asdict(measured),
        "kernels": {f"{o.name}/{k.backend}": k.version for o in operations for k in o.kernels},
        **commit(),
    }


def commit() -> dict[str, Any]:
    """Which commit this is; "dirty" where the tree is not the commit's."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        # A result written by an earlier benchmark of the same session is not a change of what is measured.
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
    }


def gpu_state() -> dict[str, Any]:
    """Clocks, power and temperature of each GPU at this moment, as the driver says them; nothing without a GPU."""
    found = [dict(zip(GPU_STATE, values, strict=True)) for values in query_driver(",".join(GPU_STATE.values()))]
    return {"gpu": found} if found else {}


def paced(of: Sequence[T], step: str, deadline: float, clock: Callable[[], float] = time.perf_counter) -> Iterator[T]:
    """One after the other, as long as the longest so far would end before `deadline`; says how much time is left.

    Args:
      step: what is done with them, for these lines.
      deadline: by `clock`, seconds.
    """
    began, longest_s = clock(), 0.0
    for done, one in enumerate(of):
        started = clock()
        if started + longest_s > deadline:
            print(f"{step}: time is up; {len(of) - done} of {len(of)} are left", flush=True)
            return
        yield one
        ended = clock()
        longest_s = max(longest_s, ended - started)
        left_s = (ended - began) / (done + 1) * (len(of) - done - 1)
        print(f"{step}: {done + 1} of {len(of)} in {ended - began:.0f} s, about {left_s:.0f} s left", flush=True)


def told(problem: Problem) -> str:
    """What kept rows are found by: fields at their defaults left out, however a problem is printed."""
    return " ".join(f"{name}={value}" for name, value in problem.non_default_fields().items())


def posed(kind: type[P], text: str) -> P:
    """The problem of a row, however much of it the text tells that was written then."""
    return kind.parse(dict(field.split("=", 1) for field in text.split()))


class Kept:
    """Rows of a file, one to a line, each there as soon as it is measured and found again by all that it depends on.

    Several processes may add to a file.

    Args:
      path: of the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # empty, or as far as a command came that was killed
                one = json.loads(line)
                self._rows[json.dumps(one["conditions"], sort_keys=True)] = one

    def get(self, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
        """The latest row that was measured under these conditions, the problem among them."""
        return self._rows.get(json.dumps(conditions, sort_keys=True))

    def latest(self) -> list[dict[str, Any]]:
        """Every row, the latest of those under the same conditions."""
        return list(self._rows.values())

    def add(self, row: Mapping[str, Any], conditions: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the row, with the conditions, the commit and the state of the GPU; returns it with those."""
        kept = dict(row) | {"conditions": dict(conditions)} | commit() | gpu_state()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", buffering=2**20) as file:  # one write, which others' writes do not divide
            file.write("\n" + json.dumps(kept))  # on a line of its own, even after one that was cut off
        return kept


def write_result(
    name: str,
    hardware: Hardware,
    *,
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
    directory: Path = RESULTS,
) -> Path:
    """Writes ``<name>-<hardware>.json`` into `directory`; from a dirty tree ``.dirty.json``, which is not to be kept.

    Args:
      summary: the few figures that matter, by the names that are used to speak of them.
      rows: everything measured, raw repetitions included: the summary can be computed from it again.

    Returns:
      The file.
    """
    path = result_file(name, hardware, environment["dirty"], directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "command": _command(),
        "environment": {"device": hardware.id, **environment, **gpu_state()},
        "summary": dict(summary),
        "rows": [dict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {_within(path)}" + (" (the tree has changes: not a result to keep)" * environment["dirty"]))
    return path


def result_file(name: str, hardware: Hardware, dirty: bool, directory: Path = RESULTS) -> Path:
    """Returns where `write_result` writes."""
    kind = re.sub(r"[^a-z0-9]+", "-", hardware.kind.lower()).strip("-")
    return directory / f"{name}-{kind}{'.dirty' if dirty else ''}.json"


def _command() -> str:
    return shlex.join(["python", str(_within(Path(sys.argv[0]).resolve())), *sys.argv[1:]])


def _within(path: Path) -> Path:
    """As seen from the checkout, where it is in there; of others the name alone."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)


def _git(*words: str) -> str:
    """What git says, "" outside a checkout."""
    ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else ""
