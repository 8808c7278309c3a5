"""The second half of ``make demo``: a call finds the schedule that was tuned before, and its numbers are right.

python examples/demo.py m=256 n=256 k=256 dtype=float32
"""

import sys
import time

import jax.numpy as jnp
import numpy as np

from scheduler import tuned_matmul
from scheduler.core import hardware
from scheduler.core.records import Record, key_of
from scheduler.search.tuner import tune
from scheduler.store.store import Store, default_url
from search_spaces.matmul import MATMUL, MatmulProblem

PALLAS = frozenset(MATMUL.backends) - {MATMUL.library.backend}


def main(fields: list[str]) -> None:
    problem = MatmulProblem.parse(dict(field.split("=", 1) for field in fields))
    record = stored(problem)
    entry = record.best(PALLAS)
    if entry is None:
        sys.exit(f"no Pallas kernel ran for {problem} on {record.key.hardware}; `tile-scheduler explain` says why")
    print(f"stored:   {entry.backend} {dict(entry.schedule)}, {entry.measurement.median_s * 1e6:.1f} us")

    a, b = problem.inputs(seed=1)
    for call in ("1st call", "2nd call"):
        started = time.perf_counter()
        # "error" instead of an answer without measuring: what comes back can only be the stored schedule.
        c = tuned_matmul(a, b, backends="pallas", on_miss="error").block_until_ready()
        print(f"{call}: found in the cache, {(time.perf_counter() - started) * 1e3:.1f} ms in all")

    tolerance = problem.tolerance()
    expected, actual = (np.asarray(x, np.float32) for x in (problem.reference(a, b), c))
    error = np.abs(actual - expected)
    if not np.all(error <= tolerance.absolute + tolerance.relative * np.abs(expected)):
        sys.exit(f"wrong: an element is off by {error.max():.3g}")
    against = np.abs(actual - np.asarray(jnp.matmul(a, b), np.float32)).max()
    print(f"numbers:  right; the largest difference from jnp.matmul is {against:.2g}")


def stored(problem: MatmulProblem) -> Record:
    """The record of `problem` on this machine, tuned now where there is none."""
    store = Store(default_url())
    record = store.get(key_of(MATMUL, problem, hardware.detect()))
    if record is None:
        print(f"nothing is stored for matmul {problem} here: tuning it now")
        record = tune(MATMUL, problem, budget=16, store=store)
    return record


if __name__ == "__main__":
    main(sys.argv[1:] or ["m=256", "n=256", "k=256", "dtype=float32"])
