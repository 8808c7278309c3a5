"""Converts a function's problems to JSON."""

from __future__ import annotations

from typing import Any

from scheduler.core import codec
from scheduler.core.frames import Call
from scheduler.functions.counted import Counted
from scheduler.functions.problems import Problems


def to_json(found: Problems) -> dict[str, Any]:
    return {
        "hardware": found.hardware.id,
        "tuned": [_row(row) for row in found.tuned],
        "untuned": [_row(each.row) | {"call": each.call, "gain": each.gain} for each in found.untuned],
        "mesh": found.mesh,
        "left": [_row(each.row) | {"reason": each.reason} for each in found.left],
        "loops": [{"kind": loop.kind, "line": None if loop.line is None else _line(loop.line)} for loop in found.loops],
    }


def _row(row: Counted) -> dict[str, Any]:
    return {
        "operation": row.operation.name,
        "problem": codec.problem_to_json(row.problem.canonical()),
        "count": row.count,
        "least_s": row.least_s,
        "lines": [_line(line) for line in row.lines],
    }


def _line(line: Call) -> dict[str, Any]:
    return {"file": line.file, "line": line.line, "function": line.function}
