"""torch in a process of its own, which a runner times in turns with its candidates (`independent.WithTorch`).

A program of torch reads one request to a line, and writes the kernel time in seconds of each repetition, or an error.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TORCH = "torch"


class TorchProcess:
    """A process that answers requests.

    Args:
      python: an interpreter that has torch.
      program: a file that calls `serve`.
    """

    def __init__(self, python: str, program: Path) -> None:
        command = [python, str(program)]
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


def available(python: str, name: str = "compile") -> bool:
    """Returns whether torch is installed, has this name, and finds a GPU, without keeping a context on it."""
    code = f"import torch, sys; sys.exit(not (torch.cuda.is_available() and hasattr(torch, {name!r})))"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


# ------------------------------------------------------------------------------
# The program.


def serve(seconds: Callable[[Any, dict[str, Any]], list[float]]) -> None:
    """Answers the requests on standard input by ``seconds(torch, request)``."""
    import torch

    for line in sys.stdin:
        answer: list[float] | str
        try:
            answer = seconds(torch, json.loads(line))
        except (RuntimeError, ArithmeticError, TimeoutError) as error:
            answer = (str(error).splitlines() or [type(error).__name__])[0]
        print(json.dumps(answer), flush=True)


def kernel_seconds(torch: Any, call: Callable[[], Any], repetitions: int) -> list[float]:
    """Returns the time of all kernels of each call.

    Raises:
      RuntimeError: calls differ in their number of kernels, or have none.
    """
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
