"""What an optimized function says while it decides and afterwards, and that it decides at once on a CPU."""

import io
import logging
import threading
import warnings

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.core import status_line
from scheduler.core.status_line import StatusLine
from scheduler.rewriting import trial
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Replaced
from search_spaces.matmul import MATMUL

COMPILED = "/jax/core/compile/backend_compile_duration"


class Terminal(io.StringIO):
    """A terminal that counts what is written to it."""

    def __init__(self):
        super().__init__()
        self.written = 0
        self.third = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        self.written += 1
        if self.written == 3:
            self.third.set()
        return super().write(text)


@pytest.fixture
def as_stderr(monkeypatch):
    """Returns a function that makes standard error a terminal; pytest sets it again before the test runs."""

    def made():
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        return terminal

    return made


@pytest.fixture
def compilations():
    found = []

    def listen(event, duration, **kwargs):
        if event == COMPILED:
            found.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def cross_entropy_step(weights, x, labels):
    """A step with products, a row program and a scatter."""

    def loss(weights):
        logs = jax.nn.log_softmax(jnp.tanh(x @ weights["in"]) @ weights["out"])
        return -jnp.take_along_axis(logs, labels[:, None], -1).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - g, weights, gradient)


@pytest.mark.parametrize("keep", ["faster", "tuned"])
def test_on_a_cpu_a_step_is_compiled_once_and_nothing_is_timed_or_compared(keep, compilations, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr(trial.interleaved, "time_interleaved", never)
    monkeypatch.setattr(trial.comparison, "disagreement", never)
    args = {"in": normal(8, 12), "out": normal(12, 32)}, normal(16, 8), jnp.arange(16)
    expected = jax.jit(lambda *args: cross_entropy_step(*args))(*args)
    fast = scheduler.optimize(cross_entropy_step, keep=keep)
    jnp.zeros(())
    compilations.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = jax.block_until_ready(fast(*args))
    assert len(compilations) == 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), actual, expected)
    (decided,) = fast.decisions
    assert (decided.kept, decided.plain, decided.plain_bytes, decided.changes) == ("plain", None, None, ())
    assert "XLA's version is used: there is no kernel for a CPU" in fast.report()
    assert "kinds of products stay with XLA: no kernel for a CPU" in fast.report()


def test_equal_kernels_are_one_line_with_their_number():
    def step(x, w):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x @ w[:, :4]

    fast = scheduler.optimize(step, backends="interpret", keep="tuned")
    fast(normal(8, 8), normal(8, 8, seed=1))
    (decided,) = fast.decisions
    assert sorted(each.times for each in decided.replaced) == [1, 3]
    assert decided.reason.startswith("uses 2 kernels: not timed")
    lines = [line for line in fast.report().splitlines() if "by a kernel: matmul" in line]
    assert [", 3 times, by interpret" in line for line in lines].count(True) == 1
    assert len(lines) == 2


def decided(plain_s, tuned_s, rounds=12, **given):
    """What `FunctionTrial` decides for these times of one call, with a kernel for a product."""
    problem, schedule = MATMUL.problem(m=8, n=8, k=8, dtype="float32"), (("tile_m", 8),)
    replaced = (Replaced("matmul", problem, "interpret", schedule, "tried"),)
    times = {"plain": Seconds((plain_s,) * rounds), "tuned": Seconds((tuned_s,) * rounds)}
    return Decided("step", "x", None, "", replaced, **times, **given)


def test_a_gain_is_a_sentence_of_speed_and_memory(monkeypatch):
    outcome = {"plain": Seconds((1.93e-3,) * 12), "tuned": Seconds((1e-3,) * 12)}
    monkeypatch.setattr(trial.interleaved, "time_interleaved", lambda runs, **_: outcome)
    sizes = iter((100 * 2**20, 60 * 2**20))
    monkeypatch.setattr(trial.decided, "peak_bytes", lambda compiled: next(sizes))
    fast = scheduler.optimize(lambda a, b: a @ b, backends="interpret")
    fast(normal(8, 8), normal(8, 8, seed=1))
    assert fast.decisions[0].reason == "uses 1 kernel: 1.93 times as fast, 40 % less memory"
    _, first, times, memory, *_ = fast.report().splitlines()
    assert first == "  uses 1 kernel: 1.93 times as fast, 40 % less memory"
    assert "with 1 kernel 1.00 ms, XLA 1.93 ms" in times
    assert "1.930 to 1.930 times as fast (99 % confidence, 12 rounds)" in times
    assert memory == "  peak memory: with 1 kernel 60 MiB, XLA 100 MiB"


def test_no_sure_gain_says_what_was_tried_and_how_fast_it_was(monkeypatch):
    outcome = {"plain": Seconds((0.98e-3,) * 12), "tuned": Seconds((1e-3,) * 12)}
    monkeypatch.setattr(trial.interleaved, "time_interleaved", lambda runs, **_: outcome)
    fast = scheduler.optimize(lambda a, b: a @ b, backends="interpret")
    fast(normal(8, 8), normal(8, 8, seed=1))
    reason = "XLA's version is used: no sure gain (the version with 1 kernel is 0.98 times as fast)"
    assert (fast.decisions[0].kept, fast.decisions[0].reason) == ("plain", reason)
    assert "tried, and not used: matmul" in fast.report()
    assert "round by round" not in fast.report()


def test_too_few_rounds_have_no_interval():
    assert "2 rounds are too few for an interval" in str(decided(2e-3, 1e-3, rounds=2))


def test_reasons_that_differ_in_numbers_alone_are_one_line():
    left = {f"matmul: a gain with probability {n}%": 2 for n in (31, 32.5)} | {"matmul: no room": 1, "rows: a mean": 3}
    text = str(Decided("step", "x", None, "because", left=left))
    assert text.splitlines()[2:] == [
        "  4 kinds of matmul stay with XLA: for example, a gain with probability 31%",
        "  1 kind of matmul stays with XLA: no room",
        "  3 kinds of rows stay with XLA: a mean",
    ]


def test_the_line_is_shown_at_once_redrawn_with_the_time_and_erased(as_stderr, monkeypatch):
    terminal = as_stderr()
    monkeypatch.setattr(status_line, "EVERY_S", 0.001)
    status = StatusLine()
    with status.shown("optimize(step)"):
        status.step("tracing")
        assert terminal.getvalue().startswith("\roptimize(step): tracing, 0 s")
        assert terminal.third.wait(60)
    assert terminal.getvalue().endswith("\r\x1b[K\r")
    assert "\n" not in terminal.getvalue()
    after = terminal.written
    status.step("more")
    assert terminal.written == after


def test_the_line_names_each_step_of_a_decision(as_stderr):
    terminal = as_stderr()

    def step(x):
        return x @ x

    fast = scheduler.optimize(step, backends="interpret", seconds=0.0)
    fast(normal(8, 8))
    shown = terminal.getvalue().split("\r")
    steps = [line.split(": ")[1].rpartition(",")[0] for line in shown if line.startswith("optimize(step): ")]
    assert list(dict.fromkeys(steps)) == [
        "tracing",
        "selecting kernels",
        "comparing each kernel with its equations",
        "compiling the tuned version",
        "comparing the results of both versions",
        "timing both versions",
    ]
    assert shown[-2:] == ["\x1b[K", ""]


def test_an_error_of_the_function_erases_the_line(as_stderr):
    terminal = as_stderr()
    with pytest.raises(TypeError, match="contracting dimension"):
        scheduler.optimize(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert terminal.getvalue().endswith("\r\x1b[K\r")


def test_without_a_terminal_the_steps_go_to_the_logger_alone(caplog, capsys):
    with caplog.at_level(logging.INFO, "scheduler"):
        scheduler.optimize(lambda a: jnp.tanh(a @ a))(normal(8, 8))
    assert "optimize(<lambda>): selecting kernels" in caplog.messages
    assert capsys.readouterr().err == ""
