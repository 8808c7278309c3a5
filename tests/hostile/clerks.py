"""Many processes that tune, import, forget, list and call on one store, some of them killed, and a server restarted.

Each process writes down what the store acknowledged to it, after it did: all of that must be there in the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import postgres_server
from attack import Tried

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "hostile")


@dataclasses.dataclass(frozen=True)
class Shift:
    """How many processes for how many seconds, how many of them are killed meanwhile, and how often the server is."""

    clerks: int
    seconds: float
    kills: int
    restarts: int = 0


def on_sqlite(shift: Shift, seed: int) -> Tried:
    with tempfile.TemporaryDirectory() as place:
        return _worked(str(Path(place) / "cache.db"), shift, seed, lambda: None)


def on_postgres(shift: Shift, seed: int) -> Tried:
    with postgres_server.server() as server:

        def restart() -> None:
            server.stop()
            time.sleep(0.5)
            server.start()

        return _worked(server.url, shift, seed, restart)


def _worked(url: str, shift: Shift, seed: int, restart: Callable[[], None]) -> Tried:
    """A process of its own imports everything once, and forks the clerks: each would take seconds to import JAX."""
    with tempfile.TemporaryDirectory() as logs:
        office = subprocess.Popen(
            [sys.executable, __file__, url, logs, str(shift.clerks), str(shift.seconds), str(shift.kills), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"TILE_SCHEDULER_CACHE": url, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        )
        assert office.stdout is not None
        assert office.stdout.readline() == "open\n"
        for _ in range(shift.restarts):
            time.sleep(shift.seconds / (shift.restarts + 1))
            restart()
        said, _ = office.communicate()
        tried = Tried()
        tried.expect(office.returncode == 0, f"the office ended with {office.returncode}")
        refused = shift.restarts == 0  # nothing has an excuse to fail
        for log in sorted(Path(logs).glob("*.log")):
            _audit(log, url, tried, refused)
        tried.notes.append(f"{said.strip()} killed")
    return tried


def _audit(log: Path, url: str, tried: Tried, refused: bool) -> None:
    """What was acknowledged to one clerk is in the store, and in no other state than it was left in."""
    from scheduler.core.hardware import CPU
    from scheduler.core.records import Key
    from scheduler.store.store import Store

    state: dict[str, str | None] = {}  # problem -> the date of its record, "" once forgotten, None while being changed
    for line in log.read_text().splitlines():
        what, problem, date = (*line.split(" "), "", "")[:3]
        match what:
            case "acknowledged":
                state[problem] = date
                tried.tries += 1
            case "begins":
                state[problem] = None
            case "forgot":
                state[problem] = ""
                tried.tries += 1
            case "read" | "called":
                tried.tries += 1
            case "failed":
                tried.expect(not refused, f"{log.name}: {line}")
            case "wrong":
                tried.expect(False, f"{log.name}: {line}")
    with contextlib.closing(Store(url)) as store:
        for problem, date in state.items():
            record = store.get(Key("double", CPU.id, problem))
            if date is not None and (record.environment.date if record else "") != date:
                tried.failures.append(f"{log.name}: {problem} was acknowledged as of {date or 'forgotten'}: {record}")


class Clerk:
    def __init__(self, url: str, log: Path, number: int) -> None:
        self.url, self.number = url, number
        self.draw = random.Random(f"{number} {log}")
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._made = 0
        self.mine: set[str] = set()

    def note(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def work(self, closed: Path) -> None:
        import warnings

        warnings.simplefilter("error")  # a search that cannot store says so, and goes on
        deeds = (self.imports, self.imports, self.imports, self.tunes, self.forgets, self.lists, self.calls)
        while not closed.exists():
            deed = self.draw.choice(deeds)
            try:
                deed()
            except Exception as error:
                self.note("failed", deed.__name__, type(error).__name__, str(error).replace("\n", " ")[:300])
                time.sleep(0.05)

    def _problem(self) -> str:
        """One that only this process writes; sometimes one that it has written before."""
        if self.mine and self.draw.random() < 0.3:
            return self.draw.choice(sorted(self.mine))
        self._made += 1
        return f'{{"n":{8 * (1_000_000 * (self.number + 1) + self._made)}}}'

    def imports(self) -> None:
        from values import record

        from scheduler.core.hardware import CPU
        from scheduler.core.records import Key
        from scheduler.store import text_files

        made = record(Key("double", CPU.id, self._problem()))
        date = f"{time.time_ns()}"
        made = dataclasses.replace(made, environment=dataclasses.replace(made.environment, date=date))
        (read,) = text_files.import_text(text_files.export_text([made]), source="clerk")
        problem = read.key.problem
        self.note("begins", problem)
        with self._store() as store:
            store.put(read)
        self.note("acknowledged", problem, date)
        self.mine.add(problem)

    def tunes(self) -> None:
        from operations import DOUBLE, DoubleProblem
        from rehearsal import Rehearsal

        from scheduler.search import tuner

        problem = DoubleProblem.from_canonical(self._problem())
        self.note("begins", problem.canonical())
        with self._store() as store:
            record = tuner.tune(DOUBLE, problem, budget=3, store=store, runner=Rehearsal(), force=True, seconds=60)
        self.note("acknowledged", record.key.problem, record.environment.date)
        self.mine.add(record.key.problem)

    def forgets(self) -> None:
        if not self.mine:
            return
        from scheduler.core.hardware import CPU
        from scheduler.core.records import Key

        problem = self.draw.choice(sorted(self.mine))
        self.note("begins", problem)
        self.mine.discard(problem)
        with self._store() as store:
            store.forget(Key("double", CPU.id, problem))
        self.note("forgot", problem)

    def lists(self) -> None:
        with self._store() as store:
            there = {record.key.problem for record in store.records()}
        lost = self.mine - there
        self.note("wrong", "lost", *sorted(lost)) if lost else self.note("read", len(there))

    def calls(self) -> None:
        import jax.numpy as jnp
        from operations import DOUBLE

        import scheduler

        n = 8 * self.draw.randint(1, 30)
        x = jnp.arange(n, dtype="float32")
        right = bool((scheduler.tuned(DOUBLE)(x, backends="xla") == 2 * x).all())
        self.note("called" if right else "wrong", "call")

    @contextlib.contextmanager
    def _store(self) -> Iterator[Any]:
        from scheduler.store.store import Store

        with contextlib.closing(Store(self.url)) as store:
            yield store


def _office(url: str, logs: Path, clerks: int, seconds: float, kills: int, seed: int) -> None:
    """Forks the clerks, kills some at random moments, and another takes each one's place."""
    import jax  # noqa: F401
    import operations  # noqa: F401
    import rehearsal  # noqa: F401
    import values  # noqa: F401

    import scheduler  # noqa: F401
    from scheduler.search import search, tuner  # noqa: F401
    from scheduler.store import store  # noqa: F401

    draw, number = random.Random(seed), 0
    running: dict[int, int] = {}

    def hire() -> None:
        nonlocal number
        number += 1
        if not (pid := os.fork()):
            Clerk(url, logs / f"{number:04}.log", number).work(logs / "closed")
            os._exit(0)
        running[pid] = number

    started = time.time()
    for _ in range(clerks):
        hire()
    print("open", flush=True)
    killed = 0
    for moment in sorted(draw.uniform(0.05, 0.95) for _ in range(kills)):
        time.sleep(max(0.0, started + moment * seconds - time.time()))
        pid = draw.choice(sorted(running))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        del running[pid]
        hire()
    time.sleep(max(0.0, started + seconds - time.time()))
    (logs / "closed").touch()
    status = 0
    for pid in running:
        status |= os.waitpid(pid, 0)[1]
    print(killed)
    sys.exit(status != 0)


if __name__ == "__main__":
    _office(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
