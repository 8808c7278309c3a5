"""The program that times PyTorch's functions of rows, forward and backward, eager and compiled (`torch_process`).

Autograd runs the forward pass once for each set of operands and keeps its graph, so a backward pass is timed alone.
Results of PyTorch's own kernels are not verified.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_process import kernel_seconds, serve

# Device memory that is left to this process.
MEMORY_BYTES = 16 * 2**30
# Seconds in which a function must compile.
COMPILING_S = 60
EAGER, COMPILED = "eager", "compiled"
EPS = 1e-6
GROUPS = 32
LARGEST_FLOAT8 = 448.0


def functions(torch: Any) -> dict[str, Callable[..., Any]]:
    """Returns, by the name of a formula, what users of PyTorch call."""
    f = torch.nn.functional

    def rms_norm(x: Any, weight: Any) -> Any:
        return f.rms_norm(x, x.shape[-1:], weight, EPS)

    def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        return rms_norm(total, weight), total

    def silu_and_mul(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return f.silu(gate) * up

    def group_norm(x: Any, weight: Any, bias: Any) -> Any:
        channels_second = x.reshape(x.shape[0], -1, x.shape[-1]).transpose(1, 2)
        return f.group_norm(channels_second, GROUPS, weight, bias, EPS)

    def quantize_rows(x: Any) -> Any:
        wide = x.float()
        most = wide.abs().amax(-1, keepdim=True)
        scale = torch.where(most > 0, most / LARGEST_FLOAT8, 1.0)
        q = (wide * (1 / scale)).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
        return q.to(torch.float8_e4m3fn), scale.squeeze(-1)

    return {
        "copy": torch.neg,
        "softmax": lambda x: f.softmax(x, -1),
        "softmax_with_lse": lambda x: (f.softmax(x, -1), torch.logsumexp(x.float(), -1)),
        "log_softmax": lambda x: f.log_softmax(x, -1),
        "cross_entropy": lambda x, label: f.cross_entropy(x, label, reduction="none"),
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "layer_norm": lambda x, weight, bias: f.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        "group_norm": group_norm,
        "silu_and_mul": silu_and_mul,
        "quantize_rows": quantize_rows,
    }


def calls(torch: Any, request: dict[str, Any], sets: Sequence[Sequence[Any]]) -> list[Callable[[], Any]]:
    """Returns a call on each set of operands: of the function, or of its backward pass alone."""
    function = functions(torch)[request["formula"]]
    if request["mode"] == COMPILED:
        # A compiled backward pass may otherwise overwrite what the graph keeps for the next call.
        importlib.import_module("torch._functorch.config").donated_buffer = False
        torch.compiler.reset()
        function = torch.compile(function, dynamic=False)
    if not request["backward"]:
        return [lambda operands=operands: function(*operands) for operands in sets]  # type: ignore[misc]
    return [_backward(torch, function, operands) for operands in sets]


def _backward(torch: Any, function: Callable[..., Any], operands: Sequence[Any]) -> Callable[[], Any]:
    moving = [x.detach().requires_grad_() if x.is_floating_point() else x for x in operands]
    found = function(*moving)
    results = found if isinstance(found, tuple) else (found,)
    cotangents = [torch.randn_like(x) for x in results]
    wanted = [x for x in moving if x.requires_grad]
    return lambda: torch.autograd.grad(results, wanted, cotangents, retain_graph=True)


def drawn(torch: Any, request: dict[str, Any], count: int, device: str) -> list[list[Any]]:
    """Returns sets of operands: standard normal, and labels that are columns of the first operand."""
    columns = request["operands"][0][0][-1]

    def draw(shape: Sequence[int], dtype: str) -> Any:
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            return torch.randn(shape, device=device, dtype=kind)
        return torch.randint(columns, shape, device=device)  # int64, which `cross_entropy` takes

    torch.manual_seed(0)
    return [[draw(shape, dtype) for shape, dtype in request["operands"]] for _ in range(count)]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises a TimeoutError in what takes longer than `COMPILING_S`."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"does not compile in {COMPILING_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(COMPILING_S)
    try:
        yield
    finally:
        signal.alarm(0)


# Calls by mode, of the formula and the operands of `of`.
held: dict[str, Iterator[Callable[[], Any]]] = {}
of: dict[str, Any] = {}


def _seconds(torch: Any, request: dict[str, Any]) -> list[float]:
    repetitions = request.pop("repetitions")
    if (wanted := {**request, "mode": ""}) != of:
        held.clear()
        of.clear()
        of.update(wanted)
        torch.cuda.empty_cache()
    if request["mode"] not in held:
        # Each call takes another set, so that it finds none in the cache.
        size = sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in request["operands"])
        count = 1 + math.floor(2 * torch.cuda.get_device_properties(0).L2_cache_size / size)
        with _limited():
            made = calls(torch, request, drawn(torch, request, count, "cuda"))
            made[0]()
        held[request["mode"]] = itertools.cycle(made)
    rotating = held[request["mode"]]
    return kernel_seconds(torch, lambda: next(rotating)(), repetitions)


if __name__ == "__main__":
    serve(_seconds)
