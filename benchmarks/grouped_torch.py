"""The program that times `torch._grouped_mm` as a rival (`torch_process`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch_process import kernel_seconds, serve

# Device memory that is left to this process.
MEMORY_BYTES = 8 * 2**30
# Matrices as the product takes them, or each transposed: the kernel has a faster layout.
LAYOUTS = ("n", "k")


@dataclasses.dataclass
class Operands:
    """Sets of operands, of which each call takes the next, so that it finds none in the cache."""

    request: Mapping[str, Any]
    sets: list[tuple[Any, Any]]
    ends: Any
    calls: int = 0


def _drawn(torch: Any, request: Mapping[str, Any]) -> Operands:
    rows, k, n, groups = (request[name] for name in ("rows", "k", "n", "groups"))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = 1 + math.floor(2 * l2_bytes / (2 * (rows * k + groups * k * n)))
    torch.manual_seed(0)
    made = []
    for _ in range(sets):
        lhs = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        if request["layout"] == "n":
            rhs = torch.randn(groups, k, n, device="cuda", dtype=torch.bfloat16)
        else:
            rhs = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16).transpose(-2, -1)
        made.append((lhs, rhs))
    ends = torch.tensor(request["sizes"], device="cuda").cumsum(0).to(torch.int32)
    return Operands(request, made, ends)


def _check(torch: Any, operands: Operands) -> None:
    """Raises an ArithmeticError if the product of the largest group is wrong."""
    lhs, rhs = operands.sets[0]
    found = torch._grouped_mm(lhs, rhs, offs=operands.ends)
    sizes = operands.request["sizes"]
    group = sizes.index(max(sizes))
    first = sum(sizes[:group])
    rows = slice(first, first + min(sizes[group], 128))
    right = lhs[rows].float() @ rhs[group].float()
    if not torch.allclose(found[rows].float(), right, rtol=0.02, atol=0.02 * math.sqrt(operands.request["k"])):
        raise ArithmeticError("torch._grouped_mm is wrong")


held: dict[str, Operands] = {}  # by layout, all of one shape


def _seconds(torch: Any, request: dict[str, Any]) -> list[float]:
    repetitions, layout = request.pop("repetitions"), request["layout"]
    if any({**operands.request, "layout": ""} != {**request, "layout": ""} for operands in held.values()):
        held.clear()
        torch.cuda.empty_cache()
    if layout not in held:
        drawn = _drawn(torch, request)
        _check(torch, drawn)
        held[layout] = drawn
    operands = held[layout]

    def call() -> None:
        lhs, rhs = operands.sets[operands.calls % len(operands.sets)]
        operands.calls += 1
        torch._grouped_mm(lhs, rhs, offs=operands.ends)

    return kernel_seconds(torch, call, repetitions)


if __name__ == "__main__":
    serve(_seconds)
