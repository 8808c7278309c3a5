"""Every attack: a row of the table in docs/robustness.md each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import candidates
import clerks
import code_in_text
import damage
import gpu_kernels
import hostile_rows
import random_calls
import random_problems
import surroundings
from attack import Attack, Run, Tried


def _shifts(run: Callable[[clerks.Shift, int], Tried], restarts: int) -> Run:
    """So many processes: up to 4 for 5 s, more of them for a minute."""

    def work(seed: int, processes: int) -> Tried:
        long = processes > 4
        shift = clerks.Shift(
            processes, 60.0 if long else 5.0, 100 if long else 4, restarts if long else min(restarts, 1)
        )
        return run(shift, seed)

    return work


ATTACKS = (
    Attack("processes-sqlite", "what an SQLite file acknowledged is there, though writers are killed",
           _shifts(clerks.on_sqlite, 0), quick=4, long=16),
    Attack("processes-postgres", "what a server acknowledged is there, though writers are killed and it is restarted",
           _shifts(clerks.on_postgres, 2), quick=4, long=16),
    Attack("broken-files", "a cache that is cut short or has bits flipped fails no call", damage.broken_files, 8, 300),
    Attack("hostile-rows", "rows that say anything fail no call, run nothing illegal, and are told once",
           hostile_rows.tries, 12, 300),
    Attack("code-in-text", "no command runs code that only text of others names", code_in_text.tries, 16, 96),
    Attack("candidates", "candidates are blamed each for its own fault, and no innocent is",
           candidates.tries, 1, 10),
    Attack("threads", "16 threads at once get right answers", surroundings.threads, 5, 100),
    Attack("forks", "processes forked after the import get right answers", surroundings.forks, 4, 16),
    Attack("many-calls", "so many calls leave no memory, thread or file behind", surroundings.many, 1000, 20_000),
    Attack("places", "no home and no directory to stand in fail no call and no command", surroundings.places, 2, 13),
    *(
        Attack(maker.__name__.removeprefix("a_").replace("_", "-"), "random problems agree with float64",
               functools.partial(random_problems.tries, maker), 6, 500, numbers=True)
        for maker in random_calls.MAKERS
    ),
    *(
        Attack(name, "random row programs compute what jax.jit of the function does",
               functools.partial(random_problems.row_programs, kernels), quick, long, numbers=True)
        for name, kernels, quick, long in (("row-programs", False, 20, 10_000), ("row-kernels", True, 2, 300))
    ),
    Attack("row-gradients", "random backward passes compute what jax.vjp of the function does",
           random_problems.row_gradients, 2, 1000, numbers=True),
    Attack("gpu-kernels", "random problems of the Hopper kernels, interpreted, agree with float64",
           gpu_kernels.tries, 2, 60, numbers=True),
)  # fmt: skip
