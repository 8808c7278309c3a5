"""What a user's own callable raises, or returns, is one sentence that names the callable and the line."""

import functools
import re
import traceback

import jax
import jax.numpy as jnp
import pytest
import typer.testing
from jax.experimental import io_callback

import scheduler
from scheduler import NoCandidate
from scheduler.cli.app import app
from search_spaces.space import DeclarationError

RAISING = {
    "tile": ("tile=lambda x: (1, 1 // 0)", "the choice tile"),
    "rules": ("rules={'fits': lambda x, tile: 1 // 0}", "the rule 'fits'"),
    "footprint": ("footprint=lambda x: 1 // 0", "the footprint of f"),
    "supports": ("supports=lambda x: 1 // 0", "the supports of f"),
    "inputs": ("inputs=lambda rng, x: 1 // 0", "the inputs of f"),
    "flops": ("flops=lambda x: 1 // 0", "the flops of f"),
    "bytes_moved": ("bytes_moved=lambda x: 1 // 0", "the bytes_moved of f"),
    "tolerance": ("tolerance=lambda x: 1 // 0", "the tolerance of f"),
}
RETURNING = {
    "tile": ("tile=lambda x: 5", "the choices of tile are 5"),
    "footprint": ("footprint=lambda x: 'much'", "the footprint of f is a str"),
    "supports": ("supports=lambda x: True", "supports of f returns True"),
    "inputs": ("inputs=lambda rng, x: 'abc'", "the inputs of f are str instead of float32[2]"),
    "flops": ("flops=lambda x: 'many'", "the flops of f are 'many'"),
    "bytes_moved": ("bytes_moved=lambda x: float('nan')", "the bytes_moved of f are nan"),
    "tolerance": ("tolerance=lambda x: 'none'", "tolerance='none'"),
}
PROGRAM = """
import scheduler
# a line before it
@scheduler.autotune(name="{name}", reference=lambda x: x + 1, {choices}
    {given})
def f(x, *, tile):
    return x + 1
"""


def written(tmp_path, given):
    name = f"own.{tmp_path.name}"
    choices = "" if given.startswith("tile") else "tile=(1, 2),"
    file = tmp_path / "own.py"
    file.write_text(PROGRAM.format(name=name, choices=choices, given=given))
    return file


def run(*words):
    ended = typer.testing.CliRunner().invoke(app, list(map(str, words)))
    assert isinstance(ended.exception, SystemExit), "".join(traceback.format_exception(ended.exception))
    assert ended.exit_code == 1
    return " ".join(ended.stderr.split())


@pytest.mark.parametrize(("given", "who"), RAISING.values(), ids=RAISING)
def test_what_it_raises_names_it_and_its_line(given, who, tmp_path):
    file = written(tmp_path, given)
    said = run("tune", f"{file}:f", "x=float32[2]")
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "1 // 0" in text)
    assert f"{who} raised ZeroDivisionError:" in said
    assert re.search(rf"\({file}:{line}\)", said)


@pytest.mark.parametrize(("given", "said"), RETURNING.values(), ids=RETURNING)
def test_what_it_returns_amiss_names_it(given, said, tmp_path):
    assert said in run("tune", f"{written(tmp_path, given)}:f", "x=float32[2]")


MADE = "def made(x, *, tile, target): return x * 2"


@pytest.mark.parametrize("namespace", [{}, {"__name__": "elsewhere"}], ids=["no module", "a module that is not loaded"])
def test_a_kernel_made_by_exec_is_tuned_and_may_be_made_again(namespace):
    x = jnp.ones((8, 8))
    for _ in range(2):
        exec(MADE, namespace)
        made = scheduler.autotune(tile=(2, 4), reference=eval("lambda x: x * 2", namespace))(namespace["made"])
        assert (made(x) == 2).all()
    module = namespace.get("__name__", "__main__")
    assert made.tune(x, budget=2).key.operation == f"{module}.made"


def test_a_partial_is_no_kernel_and_told_what_to_write():
    bound = functools.partial(lambda x, scale, *, tile: x * scale, scale=2.0)
    with pytest.raises(DeclarationError, match=r"autotune decorates a function, not functools.* write a function that"):
        scheduler.autotune(tile=(2,), reference=lambda x: x * 2)(bound)


@pytest.mark.parametrize("callback", [jax.pure_callback, io_callback], ids=["pure", "io"])
def test_what_a_callback_raises_is_the_reason(callback):
    def raises(x):
        raise ValueError("not 42\nbut more")

    @scheduler.autotune(name=f"raising_{callback.__name__}", tile=(1, 2), reference=lambda x: x + 1)
    def f(x, *, tile):
        return callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.warns(RuntimeWarning, match="not 42"):
        record = f.tune(jnp.ones(4), budget=2)
    assert record.failed[0].failure.detail == "ValueError: not 42"


def test_a_number_of_tolerances_that_is_not_that_of_the_results_is_named():
    @scheduler.autotune(name="two_tolerances", tile=(1,), reference=lambda x: x + 1, tolerance=(1e-3, 1e-3))
    def f(x, *, tile):
        return x + 1

    with pytest.raises(NoCandidate, match="tolerance has 2 values for 1 results"):
        f.tune(jnp.ones(2), budget=2)


def test_in_python_what_was_raised_is_the_cause():
    @scheduler.autotune(name="own.chained", tile=(1, 2), reference=lambda x: x + 1, flops=lambda x: {}["nothing"])
    def f(x, *, tile):
        return x + 1

    with pytest.raises(
        DeclarationError, match=r"the flops of f raised KeyError: 'nothing' \(.*test_own_callables"
    ) as e:
        scheduler.tune(f, f.problem(jnp.ones(2)), store=scheduler.Store(":memory:"))
    assert isinstance(e.value.__cause__, KeyError)


def test_an_empty_result_is_refused_and_so_are_choices_that_cannot_be_stored():
    @scheduler.autotune(name="own.empty", tile=(1, 2), reference=lambda x: x + 1)
    def f(x, *, tile):
        return x + 1

    with pytest.raises(NoCandidate, match="has an empty result"):
        scheduler.tune(f, {"x": "float32[0]"}, store=scheduler.Store(":memory:"))
    with pytest.raises(DeclarationError, match="is no text that can be stored"):
        scheduler.autotune(name="own.letters", tile=("a", "\ud800"), reference=lambda x: x)(lambda x, *, tile: x)


def test_a_candidate_whose_words_cannot_be_encoded_costs_itself_alone():
    @scheduler.autotune(name="own.surrogate", tile=(1, 2), reference=lambda x: x + 1)
    def f(x, *, tile):
        if tile == 2:
            raise ValueError("no \ud800 text\x00 at all")
        return x + 1

    store = scheduler.Store(":memory:")
    found = scheduler.tune(f, f.problem(jnp.ones(2)), store=store)
    assert store.get(found.key) == found
    words = [str(trial.outcome) for trial in store.last_trials(found.key) if trial.schedule == {"tile": 2}]
    assert len(words) == 1
    assert "no \\ud800 text\\x00 at all" in words[0]
