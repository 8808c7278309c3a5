"""`torch._grouped_mm` as a rival, in a process of its own: it is timed in turns with the candidates of a runner.

As a program it reads one request to a line, and writes the kernel time in seconds of each repetition, or an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# Device memory that is left to this process.
MEMORY_BYTES = 8 * 2**30
# Matrices as the product takes them, or each transposed: the kernel has a faster layout.
LAYOUTS = ("n", "k")
TORCH = "torch"


class TorchProcess:
    """A process that times `torch._grouped_mm`; operands of the last shape are kept.

    Args:
      python: an interpreter that has torch.
    """

    def __init__(self, python: str) -> None:
        command = [python, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, request: Mapping[str, Any]) -> list[float] | str:
        """Returns the kernel time of each repetition, or why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return "the process of torch has ended"
        answer: list[float] | str = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        # Closes its pipes and waits; a request may not have reached a process that has ended.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def available(python: str) -> bool:
    """Returns whether torch is installed and finds a GPU, without keeping a context on it."""
    code = "import torch, sys; sys.exit(not (torch.cuda.is_available() and hasattr(torch, '_grouped_mm')))"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


# ------------------------------------------------------------------------------
# The program.


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


def _kernel_seconds(torch: Any, operands: Operands, repetitions: int) -> list[float]:
    def call() -> None:
        lhs, rhs = operands.sets[operands.calls % len(operands.sets)]
        operands.calls += 1
        torch._grouped_mm(lhs, rhs, offs=operands.ends)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = sorted(
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == cuda
    )
    if not kernels or len(kernels) % repetitions:
        raise RuntimeError(f"{len(kernels)} kernels in {repetitions} calls")
    each = len(kernels) // repetitions
    return [sum(us for _, us in kernels[i * each : (i + 1) * each]) * 1e-6 for i in range(repetitions)]


def main() -> None:
    import torch

    held: dict[str, Operands] = {}  # by layout
    shape: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        repetitions, layout = request.pop("repetitions"), request["layout"]
        answer: list[float] | str
        try:
            if (wanted := {**request, "layout": ""}) != shape:
                held, shape = {}, wanted
                torch.cuda.empty_cache()
            if layout not in held:
                drawn = _drawn(torch, request)
                _check(torch, drawn)
                held[layout] = drawn
            answer = _kernel_seconds(torch, held[layout], repetitions)
        except (RuntimeError, ArithmeticError) as error:
            answer = str(error).splitlines()[0]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
