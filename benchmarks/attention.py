"""Attention by the best Pallas schedule and by the final answer beside cuDNN, interleaved; XLA where it comes near.

    python benchmarks/attention.py --seconds 450            # searches, then times; again, where problems are left
    python benchmarks/attention.py --errors --seconds 450   # what the results are off by, of a point of each kind

Each point is searched first (or found in the cache); no search is begun that would end after 70 % of the time, if it
took as long as the longest before it. Then fresh processes, which chose nothing, verify the best Pallas schedule, the
final answer, the model's first choice, cuDNN, the library's best program (where it takes less than four times as long),
some configs of tokamax's kernels where it is installed and, of float16, every schedule of JAX's kernel, and time them
in turns on the same buffers; of a rival the fastest counts. Ratios are the other's time over ours: above one is faster.
When time is up, the result is written of what there is, and `missing` in its environment names the rest; the same
command goes on from there.

Two GPUs of a host share the points, the cache (`--cache`) and the kept rows (`--work`), and a third command, which
searches and times nothing, writes the result of both:

    CUDA_VISIBLE_DEVICES=0 python benchmarks/attention.py --part 1/2 --seconds 450 &
    CUDA_VISIBLE_DEVICES=1 python benchmarks/attention.py --part 2/2 --seconds 450 & wait
    python benchmarks/attention.py --seconds 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import suite
from attention_points import REHEARSED, Point, points
from attention_rivals import BACKWARD, BACKWARD_RIVALS, FORWARD, FORWARD_RIVALS, RIVALS
from harness import Kept, told
from independent import REPETITIONS, Candidate, conditions, start_fresh, time_in_rounds, times_of
from rich.console import Console
from rich.table import Table
from suite import answers, cell, conclude, found, search, time_all

from scheduler.core.arguments import named_backends
from scheduler.core.hardware import Hardware, detect
from scheduler.core.records import Record
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, Task
from scheduler.model.constants import model_of
from scheduler.model.pruning import prune
from scheduler.search import jobs
from scheduler.store.store import Store, default_url
from search_spaces import Operation
from search_spaces.flash_attention import FLASH_ATTENTION
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD

ERRORS = Path(__file__).with_name("attention_errors.py")
# Of the time, for searches; what they leave, and the rest, is for the comparison.
SEARCHING = 0.7
# XLA is compared where it takes at most so many times as long as the final answer: longer is no news, and slow to time.
MOST_TIMES = 4.0


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    parser = suite.options(__doc__, "attention", budget=12, rounds=5)
    parser.add_argument("--search", action="store_true", help="only fill the cache")
    parser.add_argument("--errors", action="store_true", help="only compare results with float32")
    parser.add_argument("--only", default="", help="only points whose text holds this, such as 'forward decode'")
    options = parser.parse_args(arguments)
    deadline = started + options.seconds
    searched_by = deadline if options.search else started + SEARCHING * options.seconds

    store = Store(options.cache or default_url())
    if options.errors:
        hardware = detect()
        errors(_chosen(hardware, options), hardware, store, options.work, deadline)
        return
    with contextlib.closing(start_runner(FLASH_ATTENTION)) as runner:
        chosen = _chosen(runner.hardware, options)
        tasks = [jobs.Task(tuned_by(point), point.problem, jobs.SearchOptions(options.budget)) for point in chosen]
        search(tasks, runner, store, searched_by)
    if options.search:
        return
    with contextlib.closing(start_fresh()) as fresh:
        rows = measured(chosen, fresh, store, options.work, options.rounds, deadline)
    rows = [with_errors(row, Kept(options.work / "errors.jsonl")) for row in rows]
    figures = summary(rows)
    _print(rows, fresh.hardware)
    Console().print(figures)
    done = {row["point"] for row in rows}
    missing = [str(point) for point in chosen if str(point) not in done]
    conclude(
        "attention",
        fresh,
        rows,
        figures,
        FORWARD,
        BACKWARD,
        missing=missing,
        chosen=options,
        partly=bool(options.only),
        incomplete=True,
    )


def _chosen(hardware: Hardware, options: argparse.Namespace) -> list[Point]:
    return jobs.part([point for point in suite_of(hardware) if options.only in str(point)], options.part)


def suite_of(hardware: Hardware) -> Sequence[Point]:
    return REHEARSED if hardware.platform == "cpu" else points()


def tuned_by(point: Point) -> Operation[Any]:
    return FLASH_ATTENTION_BACKWARD if point.backward else FLASH_ATTENTION


def timed_by(point: Point) -> Operation[Any]:
    """The same with the rivals."""
    return BACKWARD if point.backward else FORWARD


def candidates(point: Point, record: Record, hardware: Hardware) -> dict[str, Candidate]:
    """By name: "xla", "pallas", "final", "model", "cudnn", "jax 1", "tokamax 1" and so on, of those that there are."""
    operation, problem = tuned_by(point), point.problem
    pallas = named_backends(operation, "pallas")
    named = answers(operation, record)
    if (library := named.get("xla")) and library.measurement.median_s > MOST_TIMES * record.winner.measurement.median_s:
        del named["xla"]
    found = {name: Candidate(one.backend, one.version, one.schedule) for name, one in named.items()}
    cudnn = operation.kernel("cudnn")
    if cudnn.supports(problem, hardware.target) is None:
        found["cudnn"] = Candidate(cudnn.backend, cudnn.version, _only(cudnn, problem, hardware))
    firsts = [
        pruned[0]
        for backend in sorted(pallas or ())
        if (kernel := operation.kernel(backend)).supports(problem, hardware.target) is None
        and (pruned := prune(kernel, problem, hardware, model_of(operation, kernel, hardware), keep=1).candidates())
    ]
    if firsts:
        first = min(firsts, key=lambda one: one.predicted_s)
        found["model"] = Candidate(first.backend, operation.kernel(first.backend).version, first.schedule)
    for name, rival in (BACKWARD_RIVALS if point.backward else FORWARD_RIVALS).items():
        if rival.supports(problem, hardware.target) is None:
            space = rival.space(problem, hardware.target)
            for n, schedule in enumerate(space.schedules(space.legal()[0]), start=1):
                found[f"{name} {n}"] = Candidate(rival.backend, rival.version, vars(schedule))
    return found


def _only(kernel: Any, problem: Any, hardware: Hardware) -> dict[str, Any]:
    """The schedule of a kernel that has one."""
    space = kernel.space(problem, hardware.target)
    (schedule,) = space.schedules(space.points())
    return dict(space.encode(vars(schedule)))


def measured(
    chosen: Sequence[Point], fresh: Runner, store: Store, work: Path, rounds: int, deadline: float
) -> list[dict[str, Any]]:
    """A row for each point that has an answer; those of an earlier command stand where nothing has changed."""
    cases = [
        (point, record)
        for point in chosen
        if (record := found(tuned_by(point), point.problem, fresh.hardware, store)) is not None
    ]
    return time_all(
        cases,
        lambda case: conditions(timed_by(case[0]), case[0].problem, candidates(*case, fresh.hardware), fresh, rounds),
        lambda case: row(*case, fresh, rounds),
        work / "judged.jsonl",
        deadline,
    )


def row(point: Point, record: Record, fresh: Runner, rounds: int) -> dict[str, Any]:
    """One line of the result: times in microseconds, rates, ratios; what failed has no time, and says why."""
    operation, problem = timed_by(point), point.problem
    entries = candidates(point, record, fresh.hardware)
    tasks = {name: Task(operation, problem, one.backend, one.schedule, REPETITIONS) for name, one in entries.items()}
    outcome = time_in_rounds(fresh, tasks, rounds)
    alias = {name: name for name in ("cudnn", "xla", "pallas", "final", "model")}
    for rival in RIVALS:
        timed = {
            name: measured.median_s
            for name in entries
            if name.startswith(f"{rival} ") and (measured := outcome.times(name))
        }
        alias[rival] = min(timed, key=timed.__getitem__, default="")
    line: dict[str, Any] = {
        "point": str(point),
        "kind": point.kind,
        "backward": point.backward,
        "causal": problem.causal,
        "problem": str(problem),
        "flops": problem.flops,
        "bytes": problem.bytes_moved,
        "final_backend": record.winner.backend,
        "trials": record.tried,
        "failures": {name: str(failure) for name, failure in outcome.failures.items()},
    }
    times = {name: outcome.times(alias[name]) for name in alias}
    for name, joined in times.items():
        entry = entries.get(alias[name])
        line |= times_of(name, joined)
        line[f"{name}_tflops"] = joined and problem.flops / joined.median_s / 1e12
        line[f"{name}_tb_per_s"] = joined and problem.bytes_moved / joined.median_s / 1e12
        line[f"{name}_schedule"] = entry and dict(entry.schedule)
    for ours in ("pallas", "final"):
        for other in ("cudnn", "xla", *RIVALS):
            line[f"{ours}_vs_{other}"] = _ratio(line[f"{other}_us"], line[f"{ours}_us"])
    line["model_vs_pallas"] = _ratio(line["pallas_us"], line["model_us"])
    return line


def _ratio(other: float | None, ours: float | None) -> float | None:
    return other / ours if other and ours else None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """The figures to speak of, from rows as the result file keeps them; None where no row is meant.

    Only points that cuDNN computes count against it. Of these, those without a Pallas schedule are counted apart.
    """
    against = [row for row in rows if row["cudnn_us"]]
    forward = [row for row in against if not row["backward"] and row["kind"] != "decode"]
    backward = [row for row in against if row["backward"]]
    decode = [row for row in against if row["kind"] == "decode"]

    def mean(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        ratios = [row[figure] for row in chosen if row[figure]]
        return statistics.geometric_mean(ratios) if ratios else None

    def worst(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        return min((row[figure] for row in chosen if row[figure]), default=None)

    off = [row["errors"] for row in rows if {"pallas", "cudnn"} <= row.get("errors", {}).keys()]
    return {
        "points": len(rows),
        "points_without_pallas": sum(not row["pallas_us"] for row in rows),
        "answers_that_failed": sum(bool({"pallas", "final"} & row.get("failures", {}).keys()) for row in rows),
        "pallas_vs_cudnn_geomean": mean("pallas_vs_cudnn", forward),
        "pallas_vs_cudnn_worst": worst("pallas_vs_cudnn", forward),
        "causal_vs_cudnn_geomean": mean("pallas_vs_cudnn", [row for row in forward if row["causal"]]),
        "backward_vs_cudnn_geomean": mean("pallas_vs_cudnn", backward),
        "backward_vs_cudnn_worst": worst("pallas_vs_cudnn", backward),
        "decode_vs_cudnn_worst": worst("pallas_vs_cudnn", decode),
        "final_vs_cudnn_worst": worst("final_vs_cudnn", against),
        "model_first_choice_worst": worst("model_vs_pallas", rows),
        "pallas_vs_jax_geomean": mean("pallas_vs_jax", rows),
        "pallas_vs_tokamax_geomean": mean("pallas_vs_tokamax", forward),
        "pallas_vs_tokamax_worst": worst("pallas_vs_tokamax", forward),
        "backward_vs_tokamax_geomean": mean("pallas_vs_tokamax", backward),
        "backward_vs_tokamax_worst": worst("pallas_vs_tokamax", backward),
        "decode_vs_tokamax_worst": worst("pallas_vs_tokamax", decode),
        "final_vs_xla_worst": worst("final_vs_xla", rows),
        "mean_error_vs_cudnn_worst": max(
            (ours / theirs for one in off for ours, theirs in _mean_errors(one)), default=None
        ),
    }


def _mean_errors(errors: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Ours and cuDNN's mean absolute error, of each result."""
    pairs = zip(errors["pallas"], errors["cudnn"], strict=True)
    return [(ours["mean_absolute"], theirs["mean_absolute"]) for ours, theirs in pairs if theirs["mean_absolute"]]


def errors(chosen: Sequence[Point], hardware: Hardware, store: Store, work: Path, deadline: float) -> None:
    """Compares results of one length of each kind with float32, in a process of its own, and keeps what it says.

    Raises:
      SystemExit: that process failed, for another reason than time.
    """
    kept, asked = Kept(work / "errors.jsonl"), []
    for point in chosen:
        record = found(tuned_by(point), point.problem, hardware, store)
        if record is None or (point.kind == "square" and point.problem.q_len > 4096):
            continue
        here = candidates(point, record, hardware)
        named = {name: here[name] for name in ("pallas", "cudnn", "xla") if name in here}
        if kept.get(_of_errors(str(point), {name: dict(one.schedule) for name, one in named.items()})) is None:
            asked.append(
                {
                    "point": str(point),
                    "operation": tuned_by(point).name,
                    "problem": told(point.problem),
                    "candidates": {name: [one.backend, dict(one.schedule)] for name, one in named.items()},
                }
            )
    seconds = deadline - time.perf_counter()
    command = [sys.executable, str(ERRORS), str(min(seconds, 1e6))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        for line in process.stdout:
            one = json.loads(line)
            print(one["point"], {name: [f"{x['mean_absolute']:.2e}" for x in of] for name, of in one["errors"].items()})
            kept.add(one, _of_errors(one["point"], one["schedules"]))
    if process.returncode:
        raise SystemExit(f"{ERRORS.name} ended with {process.returncode}")


def _of_errors(point: str, schedules: Mapping[str, Any]) -> dict[str, Any]:
    return {"point": point, "schedules": dict(schedules)}


def with_errors(row: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    """The row with what its results are off by, where that was compared."""
    named = {name: row[f"{name}_schedule"] for name in ("pallas", "cudnn", "xla")}
    one = kept.get(
        _of_errors(row["point"], {name: schedule for name, schedule in named.items() if schedule is not None})
    )
    return dict(row) | ({"errors": one["errors"]} if one else {})


def _print(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    table = Table(title=f"attention on {hardware.kind}: microseconds, and TFLOP/s (decoding: TB/s) of Pallas")
    for column in ("point", "cuDNN", "XLA", "JAX", "tokamax", "Pallas", "rate", "vs cuDNN", "model's", "final", "by"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for row in rows:
        rate = row["pallas_tb_per_s"] if row["kind"] == "decode" else row["pallas_tflops"]
        table.add_row(
            row["point"],
            *(cell(row[f"{name}_us"], ".1f") for name in ("cudnn", "xla", *RIVALS, "pallas")),
            cell(rate, ".2f" if row["kind"] == "decode" else ".0f"),
            *(cell(row[name], ".3f") for name in ("pallas_vs_cudnn", "model_vs_pallas", "final_vs_cudnn")),
            row["final_backend"],
        )
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
