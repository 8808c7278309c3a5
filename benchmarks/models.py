"""Unmodified functions, plain and by `scheduler.optimize` without a search: training steps, inference, overheads.

    python benchmarks/models.py                               # all, and the result file
    python benchmarks/models.py --only 'nnx_*' llama          # these; the rows of others stay in the result file
    python benchmarks/models.py --small --results build       # small ones by the interpreter: the times mean nothing

The file has each row as soon as it is measured. Functions are written as the authors of frameworks write them
(plain_steps.py, framework_steps.py). One call of `optimize` decides on each. Then both versions are timed in
interleaved rounds of wall time. Ratios are the time of the plain function, as its framework jits it, over that of
`optimize`.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import json
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import framework_steps
import jax
import optimize_overhead
import plain_steps
from harness import RESULTS, environment, paced, result_file, write_result
from plain_steps import Step
from rich.console import Console
from whole_functions import wall_times

import scheduler
from scheduler.core import hardware
from scheduler.measure.gpu import Gpu
from scheduler.measure.runner import environment as measured
from search_spaces import load

Row = dict[str, Any]
# What a decision says of a kernel, or of a whole version, whose results differ.
REJECTIONS = ("disagree", "a kernel is not used", "computed different results")


def measurements(options: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """Returns what can be measured, by name."""
    steps = (*plain_steps.STEPS, *framework_steps.STEPS)
    return {step.name: functools.partial(measure_step, step, options) for step in steps} | {
        "overhead_2": functools.partial(optimize_overhead.of_arrays, 2),
        "overhead_200": functools.partial(optimize_overhead.of_arrays, 200),
        "overhead_nnx": optimize_overhead.of_nnx,
        "second_process": functools.partial(optimize_overhead.second_process, options.small),
        "attention_found": found_share,
    }


def measure_step(step: Step, options: argparse.Namespace) -> Row:
    """Returns wall times of a call, peak memory, and what was replaced."""
    built = step.build(options.small)
    fast = optimize_overhead.optimized(built.function, options.small)
    call = built.caller(fast)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        jax.block_until_ready(call())
        decided_s = time.perf_counter() - started
    runs = {"jnp": built.caller(built.function), "optimize": call}
    times = [wall_times(runs, 1, seconds=options.seconds) for _ in range(options.repeats)]
    ratios = [line["optimize_vs_jnp"] for line in times]
    # Of a state with a Python number there are two: the number is an array from the second call on.
    decision = fast.decisions[-1]
    told = [*(str(each.message) for each in caught), *(each.reason for each in fast.decisions), *decision.left]
    print(decision, flush=True)
    return {
        "kind": step.kind,
        "jnp_us": statistics.median(line["jnp_us"] for line in times),
        "optimize_us": statistics.median(line["optimize_us"] for line in times),
        "optimize_vs_jnp": statistics.median(ratios),
        "ratios": ratios,
        "kept": decision.kept,
        "reason": decision.reason,
        "rejected": [each for each in dict.fromkeys(told) if any(words in each for words in REJECTIONS)],
        "jnp_bytes": decision.plain_bytes,
        "optimize_bytes": decision.tuned_bytes,
        "replaced": [str(each) for each in decision.replaced],
        "changes": list(decision.changes),
        "left": dict(decision.left),
        "decided_s": decided_s,
    }


def found_share() -> Row:
    """Returns the share of the corpus that the rewriting finds."""
    from attention_corpus import FORMS, is_found

    return {"found": sum(map(is_found, FORMS)) / len(FORMS)}


def measured_or_failed(measure: Callable[[], Row]) -> Row:
    """Returns the row, or one with the error, so that the others are measured."""
    try:
        return measure()
    except ModuleNotFoundError as error:
        return {"error": f"skipped: {error.name} is not installed"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        jax.clear_caches()


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of the result's summary; None where no row tells."""
    of = {row["model"]: row for row in rows if "error" not in row}
    timed = {name: row for name, row in of.items() if "ratios" in row}
    training = [row for row in timed.values() if row["kind"] == "training"]
    ratios = [row["optimize_vs_jnp"] for row in training]

    def over(name: str, ours: str, direct: str) -> float | None:
        return of[name][ours] / of[name][direct] if name in of else None

    two = of.get("overhead_2")
    return {
        "training_steps": len(training),
        "training_geomean": statistics.geometric_mean(ratios) if ratios else None,
        "false_rejections": [name for name, row in timed.items() if row["rejected"]],
        "optimize_worst": min((min(row["ratios"]) for row in timed.values()), default=None),
        "overhead_us_2": two["optimize_us"] - two["jnp_us"] if two else None,
        "overhead_200": over("overhead_200", "optimize_us", "jnp_us"),
        "overhead_nnx": over("overhead_nnx", "optimize_us", "jnp_us"),
        "second_process": over("second_process", "optimize_s", "plain_s"),
        "decide_s": statistics.median(row["decided_s"] for row in training) if training else None,
        "attention_found": of["attention_found"]["found"] if "attention_found" in of else None,
        "errors": [row["model"] for row in rows if "error" in row],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names in order, also with * and ?")
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds for each version")
    parser.add_argument("--repeats", type=int, default=3, help="how often each function is timed")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing that would end after so many"
    )
    parser.add_argument("--left", action="store_true", help="only those that have no row in the result file")
    parser.add_argument("--small", action="store_true", help="small models by the interpreter; the times mean nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result is written, and continued")
    options = parser.parse_args(arguments)
    known = measurements(options)
    if unknown := [each for each in options.only if not fnmatch.filter(known, each)]:
        parser.error(f"nothing is named {', '.join(unknown)}; there are {', '.join(known)}")
    chip = hardware.detect()
    gpu = None if chip.platform == "cpu" else Gpu.query(0)
    made = environment(measured(gpu.driver if gpu else ""), load("flash_attention"), load("flash_attention_backward"))
    path = result_file("models", chip, made["dirty"], options.results)
    rows = {row["model"]: row for row in (json.loads(path.read_text())["rows"] if path.exists() else ())}
    figures = summary(list(rows.values()))
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TILE_SCHEDULER_CACHE"] = str(Path(directory, "cache.db"))  # no decision of an earlier command
        scheduler.reload()
        names = dict.fromkeys(name for each in options.only for name in fnmatch.filter(known, each))
        chosen = [name for name in names if not (options.left and name in rows)]
        for name in paced(chosen, "time", time.perf_counter() + 60 * options.minutes):
            rows[name] = {"model": name} | measured_or_failed(known[name])
            _print(rows[name])
            ordered = [rows[name] for name in dict.fromkeys((*known, *rows)) if name in rows]
            figures = summary(ordered)
            write_result("models", chip, summary=figures, rows=ordered, environment=made, directory=options.results)
    Console().print(figures)


def _print(row: Mapping[str, Any]) -> None:
    if "ratios" in row:
        ratios = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        print(
            f"{row['model']}: {row['optimize_vs_jnp']:.3f} ({ratios}), plain {row['jnp_us']:.0f} us, optimize "
            f"{row['optimize_us']:.0f} us, decided in {row['decided_s']:.1f} s{', REJECTED' * bool(row['rejected'])}",
            flush=True,
        )
    else:
        print({name: value for name, value in row.items() if name != "repetitions_us"}, flush=True)


if __name__ == "__main__":
    main()
