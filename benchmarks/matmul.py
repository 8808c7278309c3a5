"""Our matrix product against XLA's and JAX's own Hopper kernel, interleaved on the same buffers.

In three steps. Each can be a command of its own, keeps what it has as it goes, and goes on where it ended:

  --tune          searches each problem, into the cache
  --rival         times a random draw of the schedules of JAX's own kernel, where that can do the problem
  --independent   in fresh processes, which chose nothing, verifies our best Pallas schedule, our final answer, XLA's
                  product and the best of that draw, and times them in turns

Without any of them it takes all three. Ratios are the other's time over ours: above one, ours is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import suite
from comparison import Case, Draw, Row, row, summarize, table
from harness import paced, posed
from independent import REPETITIONS, start_fresh, time_in_rounds
from jax_hopper import JAX_HOPPER, RIVALS
from problems import MATMULS, REHEARSED, Product
from rich.console import Console
from suite import conclude, found, search

from scheduler.core.hardware import Hardware
from scheduler.measure import replay
from scheduler.measure.pool import start_runner
from scheduler.measure.runner import Runner, Task
from scheduler.search import jobs
from scheduler.search.sweep import file_name, sweep
from scheduler.store.store import Store, default_url
from search_spaces.matmul import MATMUL, MatmulProblem

STEPS = ("tune", "rival", "independent")
RIVAL_SEED = 0


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = _options(arguments)
    deadline = started + options.seconds
    steps = [step for step in STEPS if getattr(options, step)] or STEPS
    store = Store(options.cache or default_url())
    if steps != ["independent"]:
        with contextlib.closing(start_runner(RIVALS)) as runner:
            products = jobs.part(chosen(runner.hardware, options.problems), options.part)
            if "tune" in steps:
                tune_all(products, runner, store, options.budget, deadline)
            if "rival" in steps:
                rival_all(products, runner, options.work, options.rival_schedules, deadline)
    if "independent" not in steps:
        return
    with contextlib.closing(start_fresh()) as fresh:
        products = jobs.part(chosen(fresh.hardware, options.problems), options.part)
        rows = time_all(products, fresh, store, options.work, options.rounds, deadline)
    if rows:
        Console(width=180).print(table(rows, fresh.hardware))
        Console().print(summarize(rows))
    done = {posed(MatmulProblem, one["problem"]) for one in rows}
    missing = [str(product) for product in products if product.problem not in done]
    partly = options.problems is not None
    conclude("matmul", fresh, rows, summarize(rows), RIVALS, missing=missing, chosen=options, partly=partly)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = suite.options(__doc__, "matmul", budget=64, rounds=10)
    for step in STEPS:
        parser.add_argument(f"--{step}", action="store_true", help="only this step, or those that are named")
    parser.add_argument("--problems", nargs="+", metavar="TEXT", help="only those whose line contains one of these")
    parser.add_argument("--rival-schedules", type=int, default=64, help="schedules that the rival draws")
    return parser.parse_args(arguments)


def chosen(hardware: Hardware, texts: Sequence[str] | None) -> list[Product]:
    """The suite, or those of it whose line contains one of `texts`.

    Raises:
      SystemExit: there is none.
    """
    all_of_them = REHEARSED if hardware.platform == "cpu" else MATMULS
    products = [product for product in all_of_them if texts is None or any(text in str(product) for text in texts)]
    if not products:
        raise SystemExit("no problem contains that; there are:\n  " + "\n  ".join(map(str, all_of_them)))
    return products


def tune_all(products: Sequence[Product], runner: Runner, store: Store, budget: int, deadline: float) -> None:
    """Searches those whose answer `store` does not have."""
    search(
        [jobs.Task(MATMUL, product.problem, jobs.SearchOptions(budget)) for product in products],
        runner,
        store,
        deadline,
    )


def rival_all(products: Sequence[Product], runner: Runner, work: Path, schedules: int, deadline: float) -> None:
    """Records a random draw of the rival's schedules for each problem that it can do, each trial as it ends.

    Raises:
      RecordingError: an earlier draw was another one; the message says which file to delete.
    """
    able = [p for p in products if JAX_HOPPER.supports(p.problem, runner.hardware.target) is None]
    left = [p for p in able if not _is_drawn(p.problem, runner, work, schedules)]
    for product in paced(left, "rival", deadline):
        draw = Draw(
            *sweep(
                RIVALS,
                product.problem,
                _recording(work, product.problem),
                runner,
                backends=frozenset({JAX_HOPPER.backend}),
                sample=schedules,
                seed=RIVAL_SEED,
            )
        )
        best = f"{draw.best_s * 1e6:.1f} us" if draw.best_s else "none ran"
        print(f"{product}: {len(draw.tried)} schedules of JAX's own kernel, {best}", flush=True)


def time_all(
    products: Sequence[Product], fresh: Runner, store: Store, work: Path, rounds: int, deadline: float
) -> list[Row]:
    """A row for each problem that has an answer; those of an earlier command stand where nothing has changed."""
    cases = [
        Case(product, record, _draw(product.problem, work))
        for product in products
        if (record := found(MATMUL, product.problem, fresh.hardware, store)) is not None
    ]

    def timed(case: Case) -> Row:
        tasks = {
            name: Task(RIVALS, case.product.problem, one.backend, one.schedule, REPETITIONS)
            for name, one in case.candidates.items()
        }
        return row(case, time_in_rounds(fresh, tasks, rounds), fresh.hardware)

    return suite.time_all(cases, lambda case: case.conditions(fresh, rounds), timed, work / "judged.jsonl", deadline)


def _recording(work: Path, problem: MatmulProblem) -> Path:
    return work / "rival" / file_name(RIVALS, problem)


def _draw(problem: MatmulProblem, work: Path) -> Draw | None:
    path = _recording(work, problem)
    return Draw(*replay.read(path)) if path.exists() else None


def _is_drawn(problem: MatmulProblem, runner: Runner, work: Path, schedules: int) -> bool:
    draw = _draw(problem, work)
    if draw is None or draw.head.environment.jax != runner.environment.jax:
        return False
    # A space no larger than the draw is swept whole, and says so.
    return draw.head.sample in (schedules, None) and len(draw.tried) == (draw.head.sample or draw.head.legal - 1)


if __name__ == "__main__":
    main()
