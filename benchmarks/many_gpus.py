"""Several GPUs of one host: layers divided over them on tuned calls beside plain jnp, and a job tuned on all of them.

    python benchmarks/many_gpus.py --only tensor_parallel --minutes 2     # measures these, and keeps their rows
    python benchmarks/many_gpus.py --only job --problems 8 --minutes 5    # job_all, and job_one (of one GPU)
    python benchmarks/many_gpus.py --report                               # writes the result of the rows that there are
    python benchmarks/many_gpus.py                                        # measures what is left, and writes the result
    python benchmarks/many_gpus.py --small                                # on few GPUs, or on a CPU's made-up devices

Of layers (layer_models.py) that XLA divides by the shardings of their arguments, the problems of one device are
extracted and tuned by `tile-scheduler tune --devices all`; then both versions are timed in interleaved rounds of wall
time under sustained load, by a process that chose nothing (sharded_layers.py). Ratios are the wall time of jnp over
ours. A training step whose batch is divided is timed beside itself under `scheduler.optimize`, without a search. The
job is of problems that are drawn (drawn_problems.py); it is tuned on all GPUs and on the first one alone with its share
of the host's cores, each time from an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import drawn_problems
import sharded_layers
from harness import RESULTS, ROOT, Kept, environment, write_result
from job_on_gpus import Ran, job_of, limited, tune, verify, visible
from rich.console import Console
from rich.table import Table
from sharded_layers import STEPS, Sharded

from scheduler.core import hardware
from scheduler.measure.gpu import Gpu, cuda_wanted
from scheduler.measure.runner import environment as measured
from scheduler.store.database import CACHE_VARIABLE
from scheduler.store.store import default_url
from search_spaces.gated_matmul import GATED_MATMUL
from search_spaces.matmul import MATMUL

LAYERS = Path(sharded_layers.__file__)
JOB_ON_ALL, JOB_ON_ONE = "job_all", "job_one"
# Made up where there is no GPU; trials of a search there; what a process of layers may take.
DEVICES_OF_CPU, SMALL_BUDGET, LAYERS_S = 4, 2, 420.0
# Where Linux says which logical CPUs are threads of one core.
TOPOLOGY = Path("/sys/devices/system/cpu")
# Of the time for a job, its searches propose trials; the rest is for the start of workers and for final comparisons.
PROPOSING = 0.75

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of rows or their beginnings, with commas between them")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each tuning; what takes longer is interrupted")
    parser.add_argument("--budget", type=int, default=None, help="trials of each search; 64, or 2 where it is --small")
    parser.add_argument("--problems", type=int, default=40, help="of the job")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn")
    parser.add_argument("--gpus", type=int, default=None, help="use only so many")
    parser.add_argument("--small", action="store_true", help="a rehearsal, whose times say nothing about the kernels")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the result of what there is")
    parser.add_argument("--cache", default=None, help="path or URL of the cache to tune layers in")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "many_gpus", help="what is kept for later commands"
    )
    parser.add_argument("--results", type=Path, help="where the result is written; a rehearsal's, among what is kept")
    options = parser.parse_args(arguments)

    gpus = visible_gpus()[: options.gpus]
    only = tuple(name for name in options.only.split(",") if name)
    if not options.small and len(gpus) < (1 if only == (JOB_ON_ONE,) else 2):
        parser.error(
            f"at least two GPUs are wanted, and {len(gpus)} can be used; --only {JOB_ON_ONE} needs one, and --small "
            "rehearses on a CPU's devices"
        )
    options.budget = options.budget or (SMALL_BUDGET if options.small else 64)
    devices = len(gpus) or options.gpus or DEVICES_OF_CPU
    layers = {one.name: one for one in sharded_layers.cases(devices, options.small)}
    # What is slow the first time, such as reading the packages from disk, is against all GPUs.
    names = (*layers, *STEPS, JOB_ON_ALL, JOB_ON_ONE)
    if unknown := [name for name in only if not any(each.startswith(name) for each in names)]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(names)}")

    kept, rows = Kept(options.work / "rows.jsonl"), dict[str, Row]()
    for name in names:
        conditions = _conditions(name, devices, gpus, options.small)
        row = kept.get(conditions)
        if not options.report and (name.startswith(only) if only else row is None):
            if name in STEPS:
                made = _measured("timed", name, devices, options.small, _environment(gpus, devices))
            else:
                made = layers_row(layers[name], gpus, options) if name in layers else job_row(name, gpus, options)
            _print(row := kept.add(made, conditions))
        if row is not None:
            rows[name] = row
    if only:
        return
    if not rows:
        raise SystemExit(f"{options.work} holds no rows of {devices} devices: run the command without --report")
    done = list(rows.values())
    Console().print(figures := summary(done))
    made = environment(measured(gpus[0].driver if gpus else ""), MATMUL, GATED_MATMUL)
    missing = [name for name in names if name not in rows]
    chip = hardware.find(done[0]["hardware"].partition(" (")[0])
    made |= {"missing": missing} if missing else {}
    results = options.results or (options.work if options.small else RESULTS)
    name = f"many_gpus-{figures['gpus']}"
    write_result(name, chip, summary=figures, rows=done, environment=made, directory=results)


def visible_gpus() -> list[Gpu]:
    """Those that JAX would use here, found without touching one."""
    found: list[Gpu] = []
    while cuda_wanted() and (gpu := Gpu.query(len(found))) is not None:
        found.append(gpu)
    return found


def _conditions(name: str, devices: int, gpus: Sequence[Gpu], small: bool) -> dict[str, Any]:
    """By what a row is found again; how long its searches were, and of how many problems, it says itself."""
    versions = measured(gpus[0].driver if gpus else "")
    return {"case": name, "devices": devices, "jax": versions.jax, "driver": versions.driver, "small": small}


def layers_row(one: Sharded, gpus: Sequence[Gpu], options: argparse.Namespace) -> Row:
    """One line of the result: times as microseconds a layer, and who answered each problem of a device."""
    devices = one.data * one.model
    cache = options.cache or default_url()
    extracted = _measured(
        "local", one.name, devices, options.small, _environment([], devices) | {CACHE_VARIABLE: cache}
    )
    problems = extracted["problems"]
    seconds = 60 * options.minutes
    searches_on_one = -(-len(problems) // max(1, len(gpus)))
    job = limited(extracted["job"], options.budget, PROPOSING * seconds / max(1, searches_on_one))
    ran = tune(job, gpus, cache, seconds)
    print(f"{one.name}: {len(ran.results)} of {len(problems)} problems in {ran.seconds:.0f} s", flush=True)
    row = _measured("timed", one.name, devices, options.small, _environment(gpus, devices) | {CACHE_VARIABLE: cache})
    asked = {answer["problem"] for answer in row["answers"]}
    tuning = {"gpus": len(gpus), "budget": options.budget, **_told(ran)}
    return row | {"local_problems": problems, "asked_as_extracted": asked == set(problems), "tuning": tuning}


def _environment(gpus: Sequence[Gpu], devices: int) -> dict[str, str]:
    """Of a process that sees these GPUs or, if there are none, so many made-up devices of a CPU."""
    made_up = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    return visible(gpus) if gpus else visible([], XLA_FLAGS=made_up)


def _measured(what: str, name: str, devices: int, small: bool, environment: Mapping[str, str]) -> Row:
    """What a process of sharded_layers.py says, as far as it came.

    Raises:
      SystemExit: it failed before it said anything, or took too long.
    """
    command = [sys.executable, str(LAYERS), what, name, str(devices), *["--small"] * small]
    with tempfile.TemporaryFile("w+") as said:
        try:
            code = subprocess.run(command, env=dict(environment), stdout=said, timeout=LAYERS_S).returncode
        except subprocess.TimeoutExpired:
            code = None
        said.seek(0)
        lines = [json.loads(line) for line in said if line.startswith("{")]
    why = f"{LAYERS.name} {what} {name} " + ("took too long" if code is None else f"ended with {code}")
    if not lines:
        raise SystemExit(why)
    row = {name: value for line in lines for name, value in line.items()}
    return row if code == 0 else row | {"untold": why}


def job_row(name: str, gpus: Sequence[Gpu], options: argparse.Namespace) -> Row:
    """One line of the result: a job on all GPUs, or on the first one alone, from an empty cache."""
    kinds = drawn_problems.SMALL if options.small else drawn_problems.KINDS
    tasks = drawn_problems.drawn(options.problems, options.seed, kinds, options.budget)
    some = gpus if name == JOB_ON_ALL else gpus[:1]
    cores = by_core(os.sched_getaffinity(0))
    cores = cores[: max(1, len(cores) * len(some) // max(1, len(gpus)))]
    job = limited(job_of(tasks), options.budget)
    with tempfile.TemporaryDirectory() as empty:
        cache = str(Path(empty) / "cache.db")
        ran = tune(job, some, cache, 60 * options.minutes, cores)
        recorded = [result["record"] for result in ran.results if "record" in result]
        verified = verify(some, cache, cores) if recorded and name == JOB_ON_ONE else {}
    if not recorded:
        raise SystemExit(f"{name} tuned no problem: {'; '.join(ran.failed) or 'there was no time'}")
    asked = {"problems": [str(task) for task in tasks], "budget": options.budget, "seed": options.seed}
    where = {"gpus": len(some) or 1, "cores": len(cores)}
    return {"case": name, **where, **asked, **_told(ran), **verified, "hardware": recorded[0]["hardware"]}


def by_core(cpus: Collection[int], topology: Path = TOPOLOGY) -> list[int]:
    """Logical CPUs, those of one core next to each other: half of them is half of the host.

    Where second threads of cores are numbered last, the first half of the numbers has a thread of each core, and
    computes faster than it would beside the other half.
    """

    def core(cpu: int) -> tuple[str, int]:
        try:
            return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(), cpu
        except OSError:
            return "", cpu

    return sorted(cpus, key=core)


def _told(ran: Ran) -> Row:
    """What a job came to, as a row keeps it; `elapsed_s` of a problem is that of its search."""
    results = [
        {
            **{name: result[name] for name in ("task", "state", "reason", "elapsed_s")},
            "tried": result.get("record", {}).get("tried"),
            "backend": result.get("answer", {}).get("backend"),
        }
        for result in ran.results
    ]
    whole = not ran.cut_off and not ran.failed
    return {"seconds": ran.seconds, "whole": whole, "busy": list(ran.busy), "results": results}


def speedup(every: Mapping[str, Any] | None, one: Mapping[str, Any] | None) -> float | None:
    """Wall time of the row on one GPU over that on all; None unless both tuned all problems, and the same."""
    if every is None or one is None or not (every["whole"] and one["whole"]):
        return None
    alike = all(every[name] == one[name] for name in ("problems", "budget", "hardware"))
    return one["seconds"] / every["seconds"] if alike else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures to speak of, from rows as the result file keeps them; null where no row is meant."""
    layers, of = [row for row in rows if "tuned_vs_jnp" in row], {row["case"]: row for row in rows}
    every, one = of.get(JOB_ON_ALL), of.get(JOB_ON_ONE)
    gpus = max(row["gpus"] for row in rows)
    return {
        "gpus": gpus,
        "tensor_parallel_vs_jnp_worst": min((row["tuned_vs_jnp"] for row in layers), default=None),
        "error_vs_jnp_worst": max((row["error_vs_jnp"] for row in layers), default=None),
        "same_collectives": all(row["same_collectives"] for row in layers) if layers else None,
        "collective_bytes_vs_jnp_worst": max(map(_bytes_vs_jnp, layers), default=None),
        "answered_from_records": all(each["recorded"] for row in layers for each in row["answers"]) if layers else None,
        **{f"{name}_vs_jnp": of[name]["optimize_vs_jnp"] for name in STEPS if name in of},
        "job_problems": len(one["results"]) if one else None,
        f"job_speedup_{gpus}_gpus": speedup(every, one),
        "seconds_per_problem_1_gpu": one["seconds"] / len(one["results"]) if one else None,
        "seconds_per_record_verified": one["verify_seconds"] / len(one["verdicts"]) if one else None,
    }


def _bytes_vs_jnp(row: Mapping[str, Any]) -> float:
    """What devices tell each other on tuned calls, over what they do on jnp."""
    tuned, jnp = (sum(each["bytes"] for each in row["collectives"][name].values()) for name in ("tuned", "jnp"))
    return tuned / jnp if jnp else float(tuned > 0) + 1.0


def _print(row: Row) -> None:
    if row["case"] in STEPS:
        print(f"{row['case']}: {row['optimize_vs_jnp']:.3f} ({row['jnp_us']:.1f} us a layer in jnp); {row['reason']}")
        print(*row["replaced"], sep="\n", flush=True)
        return
    if "tuned_vs_jnp" not in row:
        busy = ", ".join(f"{share:.0%}" for share in row["busy"])
        print(f"{row['case']}: {len(row['results'])} of {len(row['problems'])} problems", end=" ")
        print(f"in {row['seconds']:.1f} s on {row['gpus']} GPUs" + (f", busy for {busy}" if busy else ""), flush=True)
        return
    table = Table("", "us a layer", "vs jnp", "collectives", title=f"{row['case']}: {row['model']}, {row['mesh']}")
    for name in ("jnp", "tuned"):
        told = ", ".join(f"{one['count']} {kind} ({one['bytes']} B)" for kind, one in row["collectives"][name].items())
        ratio = f"{row['tuned_vs_jnp']:.3f}" if name == "tuned" else ""
        table.add_row(name, f"{row[f'{name}_us']:.1f}", ratio, told)
    Console(width=120).print(table)
    for answer in row["answers"]:
        print(f"  {answer['problem']}: {answer['backend']} {answer['schedule']}, {answer['from']}")
    print({"error_vs_jnp": row["error_vs_jnp"], "asked_as_extracted": row["asked_as_extracted"]}, flush=True)


if __name__ == "__main__":
    main()
