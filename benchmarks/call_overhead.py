"""What a cached eager call costs above calling the same jitted kernel directly, in microseconds.

The two take turns, many calls each turn, and the overhead is the median of the differences between neighbouring turns:
what the machine does meanwhile meets both. Small operands, so that the calls and not the products are measured.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import environment, write_result
from rich.console import Console
from rich.table import Table

from scheduler import tuned, tuned_matmul
from scheduler.core import hardware
from scheduler.dispatch import dispatch
from scheduler.measure.gpu import Gpu
from scheduler.measure.runner import environment as measured_with
from search_spaces.matmul import MATMUL

WARM_UP = 50


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=300, help="turns of each of the two")
    parser.add_argument("--calls", type=int, default=200, help="calls in one turn")
    options = parser.parse_args(arguments)

    chip = hardware.detect()
    rows = [
        {"call": name, **measure(ours, direct, args, options.turns, options.calls)}
        for name, ours, direct, args in _cases()
    ]
    table = Table(title=f"An eager call on {chip.kind}, microseconds", title_justify="left")
    for column in ("call", "tuned", "jitted directly", "overhead"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for row in rows:
        table.add_row(row["call"], *(f"{row[f]:.2f}" for f in ("tuned_us", "direct_us", "overhead_us")))
    Console().print(table)
    gpu = Gpu.wanted()
    write_result(
        "call_overhead",
        chip,
        summary={"eager_overhead_us": max(row["overhead_us"] for row in rows)},
        rows=rows,
        environment=environment(measured_with(driver=gpu.driver if gpu else ""), MATMUL),
    )


def _cases() -> list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[jax.Array, ...]]]:
    a, b = (jax.random.normal(key, (16, 16), jnp.float32) for key in jax.random.split(jax.random.key(0)))
    problem = MATMUL.problem.of(a, b)
    found = dispatch.decide(MATMUL, problem, hardware.detect().platform, dispatch.options(MATMUL))
    direct = jax.jit(functools.partial(found.kernel.run, problem, found.schedule, found.target))
    worded = functools.partial(tuned_matmul, transpose_b=False, precision="default", on_miss="xla")
    return [
        ("tuned_matmul(a, b)", tuned_matmul, direct, (a, b)),
        ("tuned_matmul(a, b, precision=..., on_miss=...)", worded, direct, (a, b)),
        ("tuned(MATMUL)(a, b)", tuned(MATMUL), direct, (a, b)),
    ]


def measure(
    ours: Callable[..., Any], direct: Callable[..., Any], args: tuple[jax.Array, ...], turns: int, calls: int
) -> dict[str, Any]:
    """Microseconds of a call of both until it returns: their medians over turns, and each turn's."""
    for function in (ours, direct):
        _turn(function, args, WARM_UP)
    # The order within a pair alternates: what a turn leaves behind it then helps neither.
    pairs = [
        (_turn(ours, args, calls), _turn(direct, args, calls))
        if turn % 2
        else (_turn(direct, args, calls), _turn(ours, args, calls))[::-1]
        for turn in range(turns)
    ]
    return {
        "tuned_us": statistics.median(ours_us for ours_us, _ in pairs),
        "direct_us": statistics.median(direct_us for _, direct_us in pairs),
        "overhead_us": statistics.median(ours_us - direct_us for ours_us, direct_us in pairs),
        "calls_per_turn": calls,
        "repetitions_us": {"tuned": [ours_us for ours_us, _ in pairs], "direct": [direct_us for _, direct_us in pairs]},
    }


def _turn(function: Callable[..., Any], args: tuple[jax.Array, ...], calls: int) -> float:
    """Microseconds of one of `calls` calls: until they return, for the device works on by itself."""
    started = time.perf_counter()
    for _ in range(calls):
        result = function(*args)
    elapsed = time.perf_counter() - started
    jax.block_until_ready(result)
    return elapsed / calls * 1e6


if __name__ == "__main__":
    main()
