"""Row operations and their derivatives beside XLA, PyTorch and a copy, interleaved.

    python benchmarks/rows.py --search --seconds 540     # as often as it says that problems are left
    python benchmarks/rows.py                            # searches what is left, then times what is left
    python benchmarks/rows.py --points table --trials 16 --seconds 300
    python benchmarks/rows.py --points layer_norm_backward,quantize_rows

Each problem of a job is searched first (or found in the cache). Then fresh processes, which chose nothing, verify the
best Pallas schedule, the final answer and the library's program, once each, and time them in turns with XLA's program
for what people write (`rows_rivals`), and with PyTorch's functions, eager and compiled (`rows_torch`), of which the
faster counts. A copy of about as many bytes follows. Rates count each operand read once and each result written once.
Ratios are the other's time over ours: above one is faster. The *floor* of a problem is its bytes over the best rate of
large copies; "of floor" is a time over the floor. The result has the rows of this command, and those of the earlier
result in the same place that still hold. `table` is all operations but the forward passes of `FORWARD`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rows_torch
import suite
from harness import RESULTS, commit, posed, result_file
from independent import REPETITIONS, Candidate, FreshProcesses, Timed, WithTorch, conditions, time_in_rounds, times_of
from rich.console import Console
from rich.table import Table
from rows_rivals import AS_WRITTEN, COPY, CopyProblem, WrittenProblem
from suite import answers, cell, conclude, found, search, time_all
from torch_process import TORCH, TorchProcess, available

from scheduler.core.hardware import Hardware
from scheduler.core.records import Measurement, Outcome, Record
from scheduler.measure.gpu import Gpu
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import InProcess, Runner, Task
from scheduler.search import jobs
from scheduler.search.jobs import Malformed
from scheduler.store.store import Store, default_url
from search_spaces import Problem, load
from search_spaces.rows.problem import RowProblem

JOB = Path(__file__).with_suffix(".toml")
# Where the interpreter rehearses: a run of seconds whose times say nothing about the kernels.
CPU_SUITE = (
    ("softmax", 64, 128),
    ("add_rms_norm", 33, 100),
    ("silu_and_mul", 16, 256),
    ("layer_norm_backward", 33, 128),
    ("cross_entropy_saving", 16, 256),
    ("cross_entropy_backward", 16, 256),
    ("quantize_rows", 16, 256),
)
# The forward passes whose speed at all sizes the older figures of the summary are about.
FORWARD = ("softmax", "rms_norm", "add_rms_norm", "silu_and_mul")
CROSS_ENTROPY = ("cross_entropy_saving", "cross_entropy_backward")
TABLE = "table"
SKIPPED = (TORCH, rows_torch.COMPILED)
MIB = 2**20
# Of the time, for searches; the rest is for the comparison.
SEARCHING = 0.6


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = _parser().parse_args(arguments)
    skipped = frozenset(filter(None, options.skip.split(",")))
    if unknown := skipped - {*SKIPPED}:
        raise SystemExit(f"--skip {', '.join(sorted(unknown))}: there are {', '.join(SKIPPED)}")
    deadline = started + options.seconds
    store = Store(options.cache or default_url())
    with contextlib.closing(start_runner(load("softmax"))) as runner:
        every, left_out = suite_of(runner.hardware, options.budget)
        chosen = jobs.part(chosen_by(options.points, every), options.part)
        until = deadline if options.search else started + SEARCHING * options.seconds
        search(chosen, runner, store, until)
    if options.search:
        return
    print(*left_out, sep="\n")
    with contextlib.closing(_fresh(skipped, options.torch)) as fresh:
        rows = measured(chosen, fresh, store, options, skipped, deadline)
        rows = merged(rows, every, fresh, options.results)
    figures = summary(rows)
    _print(rows, fresh.hardware)
    Console().print(figures)
    done = {_key(row) for row in rows}
    missing = [str(task) for task in every if (task.operation.name, task.problem) not in done]
    operations = {task.operation.name: task.operation for task in every}
    conclude(
        "rows",
        fresh,
        rows,
        figures,
        *operations.values(),
        missing=missing + left_out,
        chosen=options,
        partly=False,
        incomplete=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = suite.options(__doc__, "rows", budget=None, rounds=5)
    parser.add_argument("--search", action="store_true", help="only fill the cache")
    parser.add_argument(
        "--points", default="", help=f"names of operations or parts of problems' text, with commas between; or {TABLE}"
    )
    parser.add_argument("--skip", default="", help=f"what is not timed: {', '.join(SKIPPED)}")
    parser.add_argument("--torch", default=sys.executable, help="a Python interpreter that has torch")
    return parser


def suite_of(hardware: Hardware, budget: int | None) -> tuple[list[jobs.Task], list[str]]:
    """Returns the searches of the suite, and which of its problems no operation takes, with the reason."""
    if hardware.platform == "cpu":
        operations = [(load(name), rows, columns) for name, rows, columns in CPU_SUITE]
        return [
            jobs.Task(one, one.problem(rows=rows, columns=columns, dtype="float32"), jobs.SearchOptions(budget or 4))
            for one, rows, columns in operations
        ], []
    parsed = jobs.parse(JOB.read_text())
    tasks = [task for task in parsed if isinstance(task, jobs.Task)]
    left_out = [f"{task} is left out: {task.reason}" for task in parsed if isinstance(task, Malformed)]
    return [
        jobs.Task(task.operation, task.problem, jobs.SearchOptions(budget or task.options.budget)) for task in tasks
    ], left_out


def tasks(hardware: Hardware, budget: int | None) -> list[jobs.Task]:
    """The suite."""
    return suite_of(hardware, budget)[0]


def chosen_by(points: str, every: Sequence[jobs.Task]) -> list[jobs.Task]:
    """Returns the tasks that a list of names chooses, all for an empty one.

    A name is that of an operation, or else a part of the text of tasks.

    Raises:
      SystemExit: a name chooses none.
    """
    chosen: dict[int, jobs.Task] = {}
    names = {task.operation.name for task in every}
    for wanted in filter(None, points.split(",")):
        found = {
            n: task
            for n, task in enumerate(every)
            if (wanted == TABLE and task.operation.name not in FORWARD)
            or (wanted == task.operation.name if wanted in names else wanted in f"{task.operation.name} {task.problem}")
        }
        if not found:
            raise SystemExit(f"--points {wanted}: there are {TABLE}, {', '.join(sorted(names))}")
        chosen |= found
    return [chosen[n] for n in sorted(chosen)] if points else list(every)


# ------------------------------------------------------------------------------
# The runner of the comparison: processes of ours, of XLA's programs on other operands, and of torch.


class Processes:
    """A runner that leaves what people write, and copies, to `theirs`: their operands are others than ours."""

    def __init__(self, ours: Runner, theirs: Runner) -> None:
        self._ours, self._theirs = ours, theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def measure(self, task: Task, *, again: bool = False) -> Outcome:
        of = self._theirs if task.operation in (AS_WRITTEN, COPY) else self._ours
        return of.measure(task, again=again)

    def close(self) -> None:
        self._theirs.close()
        self._ours.close()


def _fresh(skipped: frozenset[str], python: str) -> Any:
    """Returns the runner of the comparison; there is torch where it is installed and finds a GPU."""
    gpu = Gpu.wanted()
    if gpu is None:
        return Processes(InProcess(), InProcess())
    has_torch = TORCH not in skipped and available(python)
    each = (gpu.free_bytes - has_torch * rows_torch.MEMORY_BYTES) // 2
    ours, theirs = (FreshProcesses(dataclasses.replace(gpu, free_bytes=each), 1) for _ in range(2))
    both = Processes(ours, theirs)
    if not has_torch:
        return both
    return WithTorch(both, TorchProcess(python, Path(rows_torch.__file__)), request)  # type: ignore[arg-type]


def request(task: Task) -> dict[str, Any]:
    """Returns what torch is asked for a task."""
    problem: Any = task.problem
    inputs = problem.forward.operands() if isinstance(problem, WrittenProblem) else problem.operands()
    return {
        "formula": problem.formula,
        "backward": problem.backward,
        "operands": [[list(s.shape), str(s.dtype)] for s in inputs],
        **task.schedule,
    }


# ------------------------------------------------------------------------------
# The comparison.


def candidates(task: jobs.Task, record: Record, fresh: Any, skipped: frozenset[str]) -> dict[str, Candidate]:
    """By name: "library", "pallas", "final", "xla", "torch 1" and so on, of those that there are."""
    found = {
        {"xla": "library"}.get(name, name): Candidate(entry.backend, entry.version, entry.schedule)
        for name, entry in answers(task.operation, record).items()
    }
    found["xla"] = Candidate(AS_WRITTEN.library.backend, AS_WRITTEN.library.version, {})
    if isinstance(fresh, WithTorch):
        compiled = task.operation.name not in FORWARD and rows_torch.COMPILED not in skipped
        modes = (rows_torch.EAGER, *([rows_torch.COMPILED] if compiled else ()))
        found |= {f"{TORCH} {n}": Candidate(TORCH, 0, {"mode": mode}) for n, mode in enumerate(modes, start=1)}
    return found


def measured(
    chosen: Sequence[jobs.Task],
    fresh: Any,
    store: Store,
    options: argparse.Namespace,
    skipped: frozenset[str],
    deadline: float,
) -> list[dict[str, Any]]:
    """A row for each problem that has an answer; those of an earlier command stand where nothing has changed.

    Raises:
      SystemExit: a schedule that a record names does not run, or is wrong.
    """
    cases = [
        (task, record)
        for task in chosen
        if (record := found(task.operation, task.problem, fresh.hardware, store)) is not None
    ]

    copies: dict[CopyProblem, Timed] = {}

    def conditions_of(case: tuple[jobs.Task, Record]) -> dict[str, Any]:
        task, record = case
        return conditions(task.operation, task.problem, candidates(task, record, fresh, skipped), fresh, options.rounds)

    return time_all(
        cases,
        conditions_of,
        lambda case: row(*case, fresh, options.rounds, skipped, copies),
        options.work / "judged.jsonl",
        deadline,
    )


def row(
    task: jobs.Task,
    record: Record,
    fresh: Any,
    rounds: int,
    skipped: frozenset[str],
    done: dict[CopyProblem, Timed],
) -> dict[str, Any]:
    """One line of the result; a rival that failed has no time, and the line says why.

    Args:
      done: copies that this command has timed.

    Raises:
      SystemExit: a schedule that the record names does not run, or is wrong.
    """
    operation, problem = task.operation, task.problem
    written = WrittenProblem(operation.name, problem.canonical())
    entries = candidates(task, record, fresh, skipped)
    rivals = {name for name in entries if name.split()[0] in ("xla", TORCH)}
    outcome = time_in_rounds(
        fresh,
        {
            name: Task(
                *((AS_WRITTEN, written) if name in rivals else (operation, problem)),
                one.backend,
                one.schedule,
                REPETITIONS,
            )
            for name, one in entries.items()
        },
        rounds,
    )
    copied, copies = _copies(problem, fresh, rounds, done)
    failures = outcome.failures | copies.failures
    if wrong := {name: failure for name, failure in failures.items() if name in {*entries} - rivals}:
        raise SystemExit(f"{task}: {wrong}")
    times = {name: outcome.times(name) for name in ("xla", "library", "pallas", "final")}
    times |= {TORCH: _fastest(outcome), "copy": _fastest(copies)}
    line: dict[str, Any] = {
        "operation": operation.name,
        "problem": str(problem),
        "columns": problem.columns_of_program if isinstance(problem, RowProblem) else problem.operands()[0].shape[-1],
        "dtype": str(problem.operands()[0].dtype),
        "operand_bytes": max(s.size * s.dtype.itemsize for s in problem.operands()),
        "bytes": problem.bytes_moved,
        "final_backend": record.winner.backend,
        "trials": record.tried,
        "failures": {name: str(failure) for name, failure in failures.items()},
    }
    for name, joined in times.items():
        moved_bytes = copied.bytes_moved if name == "copy" else problem.bytes_moved
        entry = entries.get(name)
        line |= times_of(name, joined)
        line[f"{name}_tb_per_s"] = joined and moved_bytes / joined.median_s / 1e12
        line[f"{name}_vs_xla"] = _ratio(times["xla"], joined)
        line[f"{name}_vs_{TORCH}"] = _ratio(times[TORCH], joined)
        line[f"{name}_schedule"] = entry and dict(entry.schedule)
    return line


def _copies(problem: Problem, fresh: Any, rounds: int, done: dict[CopyProblem, Timed]) -> tuple[CopyProblem, Timed]:
    """Times copies that move about as many bytes, by XLA and by torch, once for each power of two."""
    columns = 4096
    copied = CopyProblem(2 ** max(0, math.floor(math.log2(problem.bytes_moved / 4 / columns))), columns)
    if copied not in done:
        tasks = {"copy": Task(COPY, copied, COPY.library.backend, {}, REPETITIONS)}
        if isinstance(fresh, WithTorch):
            tasks["copy by torch"] = Task(COPY, copied, TORCH, {"mode": rows_torch.EAGER}, REPETITIONS)
        # Apart from the problem's candidates: other operands make a process give up those of the problem.
        done[copied] = time_in_rounds(fresh, tasks, rounds)
    return copied, done[copied]


def _fastest(outcome: Timed) -> Measurement | None:
    """Returns the least time of the candidates of torch, or of the copies."""
    timed = [outcome.times(name) for name in outcome.rounds if name.split()[0] in (TORCH, "copy")]
    return min(timed, key=lambda joined: joined.median_s, default=None)


def _ratio(other: Measurement | None, ours: Measurement | None) -> float | None:
    return other.median_s / ours.median_s if other and ours else None


# ------------------------------------------------------------------------------
# The result: rows of several commands, and the figures.


def _key(row: Mapping[str, Any]) -> tuple[str, Any]:
    return row["operation"], posed(load(row["operation"]).problem, row["problem"])


def merged(
    rows: Sequence[dict[str, Any]], every: Sequence[jobs.Task], fresh: Any, directory: Path = RESULTS
) -> list[dict[str, Any]]:
    """Returns these rows, and of the result in the directory those of other problems that still hold.

    A row holds for the same device and JAX, and the same versions of the kernels in it.
    """
    path = result_file("rows", fresh.hardware, commit()["dirty"], directory)
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    versions = {(task.operation.name, k.backend): k.version for task in every for k in task.operation.kernels}

    def holds(row: Mapping[str, Any]) -> bool:
        of, named = row["conditions"], row["conditions"]["candidates"]
        same = (of["device"], of["jax"]) == (fresh.hardware.id, fresh.environment.jax)
        ours = [named[name] for name in ("library", "pallas", "final") if name in named]
        return (
            same
            and "library" in named
            and all(versions.get((row["operation"], one["backend"])) == one["version"] for one in ours)
        )

    by_key = {_key(row): row for row in [*filter(holds, earlier), *rows]}
    order = [(task.operation.name, task.problem) for task in every]
    return [by_key[key] for key in order if key in by_key]


def copy_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the best rate of copies in TB/s: of those that no cache holds, if there are any."""
    large = [row for row in rows if row["bytes"] >= 256 * MIB]
    return max((row["copy_tb_per_s"] for row in large or rows if row["copy_tb_per_s"]), default=None)


def of_floor(rows: Sequence[Mapping[str, Any]], tb_per_s: float, name: str = "final") -> float | None:
    """Returns the time of several problems over the time of their bytes at this rate."""
    if not rows or any(not row[f"{name}_us"] for row in rows):
        return None
    return float(sum(row[f"{name}_us"] for row in rows) * tb_per_s * 1e6 / sum(row["bytes"] for row in rows))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """The figures to speak of, from rows as the result file keeps them; None where no row is meant.

    "Large" is 128 MiB of bfloat16 and more in rows of 1,024 to 131,072 columns, "long" those of 32,768 and more. A rate
    "of best" is its share of the best rate that any program of the run reached on as much, the copy included.

    Figures of the floor, of torch, and of backward passes are of the answer; lower is better where "of floor". Both
    passes of the cross-entropy count as one problem, by the sums of their times and floors. `backward_vs_xla` is
    against ``jax.vjp`` of what is written, from inputs; `backward_vs_library` is against XLA's program that reads what
    our forward pass saves.
    """
    large = [
        row
        for row in rows
        if row["dtype"] == "bfloat16"
        and row["operand_bytes"] >= 128 * MIB
        and 1024 <= row["columns"] <= 131072
        and row["operation"] in FORWARD
    ]
    best = max(
        (row[f"{name}_tb_per_s"] or 0.0 for row in large for name in ("copy", "xla", "pallas")),
        default=0.0,
    )
    rate = copy_rate(rows) or 0.0

    def worst(figure: str, chosen: Sequence[Mapping[str, Any]]) -> float | None:
        # A problem that no Pallas kernel takes counts as 0: it was to be fast there, too.
        return min((row[figure] or 0.0 for row in chosen), default=None)

    def of(operation: str, chosen: Sequence[Mapping[str, Any]] = large) -> list[Mapping[str, Any]]:
        return [row for row in chosen if row["operation"] == operation]

    def is_long(row: Mapping[str, Any]) -> bool:
        return bool(row["columns"] >= 32768)

    def most_of_floor(operation: str) -> float | None:
        return max(filter(None, (of_floor([row], rate) for row in of(operation, rows))), default=None)

    def mean(other: str) -> float | None:
        backward = [row for row in rows if row["operation"].endswith("_backward") and row[f"{other}_us"]]
        return statistics.geometric_mean(row[f"{other}_us"] / row["final_us"] for row in backward) if backward else None

    both = [row for row in rows if row["operation"] in CROSS_ENTROPY]
    both = both if len(both) == len(CROSS_ENTROPY) else []
    with_torch = [[row] for row in rows if row not in both] + [both]
    with_torch = [each for each in with_torch if each and all(row["torch_us"] for row in each)]
    rates = {name: worst("pallas_tb_per_s", of(name)) for name in ("softmax", "rms_norm")}
    gated = [row for row in of("silu_and_mul", rows) if row["operand_bytes"] >= 64 * MIB]
    return {
        "problems": len(rows),
        "best_tb_per_s": best or None,
        "copy_tb_per_s": rate or None,
        "softmax_tb_per_s_worst": rates["softmax"],
        "rms_norm_tb_per_s_worst": rates["rms_norm"],
        "softmax_of_best_worst": rates["softmax"] and rates["softmax"] / best,
        "rms_norm_of_best_worst": rates["rms_norm"] and rates["rms_norm"] / best,
        "softmax_vs_xla_worst": worst("pallas_vs_xla", of("softmax")),
        "softmax_long_vs_xla_worst": worst("pallas_vs_xla", [row for row in of("softmax") if is_long(row)]),
        "rms_norm_long_vs_xla_worst": worst("pallas_vs_xla", [row for row in of("rms_norm") if is_long(row)]),
        "add_rms_norm_vs_xla_worst": worst("pallas_vs_xla", of("add_rms_norm", rows)),
        "silu_and_mul_vs_xla_worst": worst("pallas_vs_xla", gated),
        "layer_norm_backward_of_floor": most_of_floor("layer_norm_backward"),
        "rms_norm_backward_of_floor": most_of_floor("rms_norm_backward"),
        "softmax_backward_of_floor": most_of_floor("softmax_backward"),
        "log_softmax_of_floor": most_of_floor("log_softmax"),
        "quantize_of_floor": most_of_floor("quantize_rows"),
        "group_norm_of_floor": most_of_floor("group_norm"),
        "cross_entropy_of_floor": of_floor(both, rate),
        "backward_vs_xla_geomean": mean("xla"),
        "backward_vs_library_geomean": mean("library"),
        "vs_torch_worst": min(
            (sum(r["torch_us"] for r in each) / sum(r["final_us"] for r in each) for each in with_torch), default=None
        ),
        "final_vs_xla_worst": min((row["final_vs_xla"] for row in rows if row["final_vs_xla"]), default=None),
    }


def _print(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    table = Table(title=f"rows on {hardware.kind}: microseconds; TB/s of reads and writes")
    names = ("copy", "xla", "library", TORCH, "pallas", "final")
    for column in ("problem", *names, "TB/s", "of floor", "vs XLA", "vs torch", "by"):
        table.add_column(column, justify="left" if column == "problem" else "right")
    rate = copy_rate(rows) or 0.0
    for row in rows:
        table.add_row(
            f"{row['operation']} {row['problem']}",
            *(cell(row[f"{name}_us"], ".1f") for name in names),
            cell(row["final_tb_per_s"], ".2f"),
            cell(of_floor([row], rate), ".2f"),
            cell(row["final_vs_xla"], ".2f"),
            cell(row["final_vs_torch"], ".2f"),
            row["final_backend"],
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
