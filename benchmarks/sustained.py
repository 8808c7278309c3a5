"""Whether schedules that win in bursts win on a device that is kept busy, where its power decides the clock.

    python benchmarks/sustained.py                      # the products of a Llama 3 8B layer and of its training step
    python benchmarks/sustained.py --only prefill       # those of a layer alone

A search times a few calls at a time, before which the device has rested; within a model it never rests, and a large
product takes 15 % longer, as the clock follows the power that it draws. So the schedule that needs the least energy may
be the fastest there. Of each problem the stored answer, XLA's program, and the model's first choice of each kind of
tile (extents, consumers, cluster) are timed both ways: by the device's clock, a few calls after a rest; and by the
wall's, in rounds of `SAMPLE_S` that follow each other without one. Where NVML tells of energy (``nvidia-ml-py``), a row
has joules of a call, too.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from harness import RESULTS, ROOT, environment, told, write_result
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from scheduler.core import hardware as chips
from scheduler.core.hardware import Hardware
from scheduler.core.records import key_of
from scheduler.measure.runner import environment as measured
from scheduler.model.constants import model_of
from scheduler.model.pruning import prune
from scheduler.rewriting.interleaved import interleaves_on, sample_seconds
from scheduler.store.store import Store
from search_spaces import Operation, Problem, jax_compat, load

Call = Callable[[], Any]
PROBLEMS: Mapping[str, Sequence[tuple[str, str]]] = {
    "prefill": (
        ("gated_matmul", "m=4096 n=14336 k=4096"),
        ("matmul", "m=4096 n=4096 k=14336 residual=bfloat16"),
        ("matmul", "m=4096 n=6144 k=4096 split_sizes=4096+1024+1024"),
        ("matmul", "m=4096 n=4096 k=4096 residual=bfloat16"),
    ),
    "train": (
        ("matmul", "m=4096 n=28672 k=4096"),
        ("matmul", "m=4096 n=28672 k=4096 transpose_a=True"),
        ("matmul", "m=4096 n=4096 k=28672 transpose_b=True"),
        ("matmul", "m=14336 n=4096 k=4096 transpose_a=True"),
    ),
}
KINDS = ("tile_m", "tile_n", "consumers", "cluster", "swap_ab")
# The sets of operands that calls take in turn: no call finds those of the one before in the cache.
SETS = 3
SAMPLE_S, SETTLE_S, REST_S = 0.2, 3.0, 0.05
BURST_CALLS, BURSTS = 4, 5
# Calls on their way at once: each takes far longer than the host is ever late.
AHEAD = 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PROBLEMS), help="names of lists, with commas between them")
    parser.add_argument("--cache", default=str(ROOT / "cache.db"), help="path or URL of the cache with the answers")
    parser.add_argument("--schedules", type=int, default=14, help="of each problem, beside the stored and XLA's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written")
    options = parser.parse_args(arguments)
    if unknown := set(options.only.split(",")) - set(PROBLEMS):
        parser.error(f"no list {', '.join(sorted(unknown))}; there are {', '.join(PROBLEMS)}")

    chip, store = chips.detect(), Store(options.cache)
    rows: list[dict[str, Any]] = []
    for name, text in (each for only in options.only.split(",") for each in PROBLEMS[only]):
        operation = load(name)
        problem = operation.problem.parse(dict(field.split("=", 1) for field in text.split()))
        rows.append(row(operation, problem, chip, store, options.schedules, options.rounds))
        _print(rows[-1])
    told_of = environment(measured(""))
    write_result("sustained", chip, summary=summary(rows), rows=rows, environment=told_of, directory=options.results)


def row(
    operation: Operation[Any], problem: Problem, chip: Hardware, store: Store, schedules: int, rounds: int
) -> dict[str, Any]:
    """One problem: microseconds of each schedule in bursts and under load, its joules, and what wins either way."""
    chosen = _chosen(operation, problem, chip, store, schedules)
    operands = [problem.inputs(seed) for seed in range(SETS)]
    calls, failures = _compiled(problem, chip, chosen, operands)
    with interleaves_on(jax.devices()[:1]), _energy_counter() as joules:
        burst = _bursts(calls)
        sustained, energy = _sustained(calls, rounds, joules)
    lines = [
        {
            "backend": chosen[label][0].backend,
            "schedule": dict(chosen[label][1]),
            "stored": label == "stored",
            "burst_us": statistics.median(burst[label]) * 1e6,
            "sustained_us": statistics.median(sustained[label]) * 1e6,
            "joules": statistics.median(energy[label]) if energy[label] else None,
            "burst_samples_us": [round(s * 1e6, 3) for s in burst[label]],
            "sustained_samples_us": [round(s * 1e6, 3) for s in sustained[label]],
        }
        for label in calls
    ]
    lines.sort(key=lambda line: float(str(line["sustained_us"])))
    return {"operation": operation.name, "problem": told(problem), "schedules": lines, "failures": failures}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """How alike the two orders are, and what is lost by the winner of bursts, over all problems."""
    taus, losses, stored_losses = [], [], []
    for each in rows:
        pallas = [line for line in each["schedules"] if line["backend"] != "xla"]
        if len(pallas) < 2:
            continue
        taus.append(kendalltau(*([line[f"{how}_us"] for line in pallas] for how in ("burst", "sustained"))).statistic)
        best = min(line["sustained_us"] for line in pallas)
        losses.append(min(pallas, key=lambda line: line["burst_us"])["sustained_us"] / best)
        stored_losses += [line["sustained_us"] / best for line in pallas if line["stored"]]
    return {
        "tau_mean": statistics.fmean(taus) if taus else None,
        "burst_winner_over_best_worst": max(losses, default=None),
        "stored_over_best_worst": max(stored_losses, default=None),
    }


def _chosen(
    operation: Operation[Any], problem: Problem, chip: Hardware, store: Store, count: int
) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Kernels with schedules by label: XLA's, the stored, and the first of each kind of tile in the model's order."""
    chosen: dict[str, tuple[Any, Mapping[str, Any]]] = {"xla": (operation.library, {})}
    record = store.get(key_of(operation, problem, chip))
    for kernel in operation.kernels:
        if kernel.library or kernel.vendor or kernel.supports(problem, chip.target):
            continue
        if record is not None and (entry := record.best(frozenset({kernel.backend}))) is not None:
            chosen["stored"] = kernel, entry.schedule
        kinds: set[tuple[Any, ...]] = set()
        for candidate in prune(kernel, problem, chip, model_of(operation, kernel, chip)).candidates():
            kind = tuple(candidate.whole().schedule.get(field) for field in KINDS)
            again = "stored" in chosen and dict(chosen["stored"][1]) == dict(candidate.schedule)
            if kind not in kinds and not again and len(kinds) < count:
                kinds.add(kind)
                chosen[f"{kernel.backend} {len(kinds)}"] = kernel, candidate.schedule
    return chosen


def _compiled(
    problem: Problem, chip: Hardware, chosen: Mapping[str, tuple[Any, Mapping[str, Any]]], operands: Sequence[Any]
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls that take the operands in turn; what did not compile or run, with the reason."""
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    lowered = {}
    for label, (kernel, schedule) in chosen.items():
        decoded = kernel.space(problem, chip.target).decode(schedule)
        try:
            lowered[label] = jax.jit(functools.partial(kernel.run, problem, decoded, chip.target)).lower(*operands[0])
        except Exception as error:  # whatever a kernel or its lowering raises
            failures[label] = _said(error)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiling = {label: pool.submit(each.compile) for label, each in lowered.items()}
        for label, future in compiling.items():
            try:
                compiled = future.result()
                jax.block_until_ready(compiled(*operands[0]))
            except Exception as error:  # whatever a compiler raises
                failures[label] = _said(error)
                continue
            calls[label] = _rotating(compiled, operands)
    return calls, failures


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _rotating(compiled: Any, operands: Sequence[Any]) -> Call:
    turn = collections.deque(operands)

    def call() -> Any:
        turn.rotate(1)
        return compiled(*turn[0])

    return call


def _bursts(calls: Mapping[str, Call]) -> dict[str, list[float]]:
    """Seconds by the device's clock of a few calls after a rest, in turns; by the wall's where there is none."""
    taken: dict[str, list[float]] = {label: [] for label in calls}
    order = random.Random(0)
    for _ in range(BURSTS):
        for label in order.sample(list(calls), len(calls)):
            time.sleep(REST_S)
            if jax.default_backend() == "cpu":
                taken[label].append(sample_seconds(calls[label], 1, AHEAD))
            else:
                taken[label].append(statistics.median(jax_compat.device_seconds(calls[label], BURST_CALLS)))
    return taken


def _sustained(
    calls: Mapping[str, Call], rounds: int, joules: Callable[[], float] | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and joules of a call in rounds without a rest, in another order each."""
    sizes = {label: max(1, round(SAMPLE_S / sample_seconds(call, 2, AHEAD))) for label, call in calls.items()}
    taken: dict[str, list[float]] = {label: [] for label in calls}
    energy: dict[str, list[float]] = {label: [] for label in calls}
    order, until = random.Random(0), time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        sample_seconds(next(iter(calls.values())), next(iter(sizes.values())), AHEAD)
    for _ in range(rounds):
        for label in order.sample(list(calls), len(calls)):
            before = joules() if joules else 0.0
            taken[label].append(sample_seconds(calls[label], sizes[label], AHEAD))
            if joules:
                energy[label].append((joules() - before) / sizes[label])
    return taken, energy


@contextlib.contextmanager
def _energy_counter() -> Iterator[Callable[[], float] | None]:
    """Joules that the device has taken since its driver started; None where nothing tells them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no package, no driver, or one that does not count
        yield None
        return
    yield lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3


def _print(row: Mapping[str, Any]) -> None:
    table = Table(title=f"{row['operation']} {row['problem']}")
    for column in ("", "burst us", "sustained us", "joules"):
        table.add_column(column, justify="right")
    for line in row["schedules"]:
        name = line["backend"] if not line["schedule"] else " ".join(f"{k}={v}" for k, v in line["schedule"].items())
        joules = f"{line['joules']:.4f}" if line["joules"] else "-"
        table.add_row(
            f"{name}{' (stored)' * line['stored']}", f"{line['burst_us']:.1f}", f"{line['sustained_us']:.1f}", joules
        )
    Console(width=220).print(table)
    for label, why in row["failures"].items():
        print(f"  {label}: {why[:150]}")


if __name__ == "__main__":
    main()
