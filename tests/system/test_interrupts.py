"""Ctrl-C and SIGTERM end what runs wherever they come, also in code that drops what is raised in it."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import typer.testing

import scheduler
from scheduler.cli import arguments
from scheduler.cli.app import app
from scheduler.core import interrupts
from scheduler.core.interrupts import Threads, Watch, interruptible
from scheduler.store.database import Database
from scheduler.store.store import Store
from search_spaces.rows.formulas import SOFTMAX

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def _in_collector(call):
    def callback(phase, info):
        if phase == "stop":
            gc.callbacks.remove(callback)
            call()

    gc.callbacks.append(callback)
    gc.collect()


def _in_del(call):
    class Dies:
        def __del__(self):
            call()

    Dies()


def _in_weakref(call):
    class Dies:
        pass

    dies = Dies()
    kept = weakref.ref(dies, lambda _: call())
    del dies
    assert kept() is None


def _in_ctypes(call):
    ctypes.CFUNCTYPE(None)(call)()


def _in_bare_except(call):
    with contextlib.suppress(BaseException):
        call()


def _in_context_that_converts(call):
    try:
        call()
    except BaseException as error:
        raise RuntimeError("INTERNAL: the callback failed") from error


SWALLOWING = [_in_collector, _in_del, _in_weakref, _in_ctypes, _in_bare_except]
by_name = pytest.mark.parametrize("swallow", SWALLOWING, ids=lambda swallow: swallow.__name__)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def run_for_ever():
    while True:
        time.sleep(0.001)


@by_name
def test_an_interrupt_that_is_swallowed_ends_python_code_and_calls_under_way(swallow, capfd):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), Watch():  # noqa: PT012
        swallow(ctrl_c)
        run_for_ever()
    with pytest.raises(KeyboardInterrupt), Watch(), Threads(1, stop=lambda: None) as threads:  # noqa: PT012
        swallow(ctrl_c)
        threads.call(lambda _: None, None)
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_was_swallowed_last_or_became_another_error_is_raised_as_the_context_ends():
    @interruptible()
    def swallows():
        _in_del(ctrl_c)
        return 1

    @interruptible()
    def converts():
        _in_context_that_converts(ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        swallows()
    with pytest.raises(KeyboardInterrupt):
        converts()


def test_what_handles_an_interrupt_is_not_interrupted_again_but_by_another_ctrl_c():
    handled = []
    with pytest.raises(KeyboardInterrupt), Watch() as watch:  # noqa: PT012
        try:
            ctrl_c()
        finally:
            for _ in range(3):
                watch._again = True  # as the thread does that polls
                ctrl_c()
            handled.append(True)
    with pytest.raises(KeyboardInterrupt), Watch():  # noqa: PT012
        try:
            ctrl_c()
        finally:
            ctrl_c()
            handled.append("again")
    assert handled == [True]


def test_a_program_that_ignores_ctrl_c_or_has_a_handler_of_its_own_keeps_it():
    own = []
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, lambda *_: own.append(True)):
            signal.signal(signal.SIGINT, handler)
            with Watch():
                ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert own == [True]


def test_what_code_raises_itself_is_no_interrupt():
    with Watch():
        interrupts.reraise(KeyboardInterrupt())
        interrupts.check()


def test_an_import_is_left_to_its_end_and_no_longer(tmp_path, monkeypatch):
    # Native modules, in which an exception ends the process, are imported as others are.
    (tmp_path / "takes_a_while.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    (tmp_path / "takes_for_ever.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\nwhile True: time.sleep(0.001)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), Watch():  # noqa: PT012
        import takes_a_while

        run_for_ever()
    assert takes_a_while.whole
    with pytest.raises(KeyboardInterrupt), Watch():
        import takes_for_ever  # noqa: F401


@by_name
def test_a_search_in_python_ends_by_keyboard_interrupt_and_keeps_its_trials(swallow):
    store, done = Store(":memory:"), []

    def progress(step):
        done.append(step.done)
        if step.done == 2:
            swallow(ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        scheduler.tune(
            SOFTMAX, {"rows": 8, "columns": 128}, store=store, budget=50, backends="interpret", progress=progress
        )
    assert done[-1] == 2
    ((_, kept),) = store.unfinished().items()
    assert len(kept) == 2


JOB = 'operation = "softmax"\nbackends = "interpret"\nbudget = 3\n[[problem]]\nrows = 8\ncolumns = 128\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize(
    "command",
    [
        "tune softmax rows=8 columns=128 --budget 3",
        "tune-job job.toml",
        "tune-missed",
        "sweep softmax rows=8 columns=128 --out sweep.jsonl.gz",
        "verify",
        "report --out page.html",
        "list",
        "doctor",
    ],
)
def test_every_command_ends_by_a_signal_that_was_swallowed(command, number, tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    # At the limit the process ends, and this is the process of the tests: imports take long on a busy host.
    monkeypatch.setattr(interrupts, "MOST_PUT_OFF", sys.maxsize)
    sent = []

    def swallowed(call):
        def asked(*args, **options):
            if not sent:
                sent.append(True)
                _in_collector(lambda: signal.raise_signal(number))
            return call(*args, **options)

        return asked

    for of, name in ((Database, "__init__"), (Store, "__init__"), (arguments, "problem_of")):
        monkeypatch.setattr(of, name, swallowed(getattr(of, name)))
    ended = typer.testing.CliRunner().invoke(app, command.split())
    assert sent
    assert ended.exit_code == 128 + number, ended.output
    assert "tile-scheduler: interrupted" in ended.stderr
    assert "Traceback" not in ended.stderr


SECOND = """
import os, signal, time
from scheduler.core.interrupts import Watch
with Watch(command=True):
    try:
        os.kill(os.getpid(), signal.{number})
    finally:
        os.kill(os.getpid(), signal.{number})
        time.sleep(600)
"""
# The importer that sends a signal as the command line is imported.
BEGINNING = """
import os, signal, sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "scheduler.cli.{module}":
            os.kill(os.getpid(), signal.{number})
sys.meta_path.insert(0, Sends())
sys.argv = ["tile-scheduler", "list"]
from tile_scheduler.__main__ import main
main()
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("program", [SECOND, BEGINNING.replace("{module}", "app")], ids=["second", "beginning"])
def test_a_second_signal_and_one_while_the_program_begins_end_it_at_once(program, number):
    ended = subprocess.run(
        [sys.executable, "-c", program.format(number=number)], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert (ended.returncode, ended.stderr) == (-getattr(signal, number), "")
