"""Functions of one factory have keys of their own; names are taken once; and a name that is bound anew is noticed."""

import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import scheduler
from scheduler.dispatch import calls
from search_spaces import DeclarationError
from search_spaces.autotuned import names
from search_spaces.autotuned.names import captured
from search_spaces.bindings import Bindings

X = jnp.arange(16.0)


def times(x, s, target):
    return pl.pallas_call(lambda r, o: o.__setitem__(..., r[...] * s), out_shape=x, interpret=target.platform == "cpu")(
        x
    )


def make(s, **told):
    @scheduler.autotune(tile=(1, 2), reference=lambda x: x * s, **told)
    def kernel(x, *, tile, target):
        return times(x, s, target)

    return kernel


def by_default(s):
    @scheduler.autotune(tile=(1, 2), reference=lambda x, s: x * s)
    def kernel(x, *, tile, target, s=s):
        return times(x, s, target)

    return kernel


def by_decorator(s):
    def decorate(f):
        @functools.wraps(f)
        def g(x, **named):
            return f(x, **named) * s

        return g

    @scheduler.autotune(tile=(1, 2), reference=lambda x: x * s)
    @decorate
    def kernel(x, *, tile, target):
        return times(x, 1.0, target)

    return kernel


def by_lambda(s):
    return scheduler.autotune(tile=(1, 2), reference=lambda x: x * s)(lambda x, *, tile, target: times(x, s, target))


@pytest.fixture(autouse=True)
def _fresh(_own_cache):
    scheduler.reload()


@pytest.mark.parametrize("factory", [make, functools.partial(make, name="named"), by_default, by_decorator, by_lambda])
def test_functions_of_one_factory_have_keys_of_their_own(factory):
    three, four = factory(3.0), factory(4.0)
    assert three.operation.name.endswith("(s=3.0)")
    assert four.operation.name == three.operation.name.replace("3.0", "4.0")


def test_functions_of_one_factory_are_tuned_and_answered_apart():
    three, four = make(3.0), make(4.0)
    records = [scheduler.tune(f, f.problem(X), budget=2) for f in (three, four)]
    for f, s, record in zip((three, four), (3.0, 4.0), records, strict=True):
        assert jnp.array_equal(f(X, on_miss="error"), X * s)
        assert scheduler.tune(f, f.problem(X), budget=2) == record  # nothing is searched


def test_the_same_values_make_the_same_name():
    assert make(3.0).operation.name == make(3.0).operation.name == f"{__name__}.make.kernel(s=3.0)"


def holding(value):
    def kernel(x):
        return value

    return kernel


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        ((1, 2.0), None),
        ("gelu", "gelu"),
        ("two words", None),
        (jnp.bfloat16, "bfloat16"),
        (jnp.sin, "jax.sin"),
        (times, f"{__name__}.times"),
        (types.SimpleNamespace(a=1), None),
        (np.arange(3), None),
        (lambda x: x + 1, None),
        (functools.partial(times, s=3), None),
        ({"a": [1]}, None),
        (dict, None),
    ],
)
def test_what_is_captured_is_named_or_has_a_digest(value, text):
    def of(value):
        return captured(holding(value), holding(None), ())

    found = of(value)
    assert found == of(value)
    assert found.startswith("(value=")
    assert set(found) <= set("()#.,=_<>") | {c for c in found if c.isalnum()}
    if text is not None:
        assert found == f"(value={text})"


def test_values_that_differ_have_names_that_differ():
    values = [
        *(1, 1.0, True, "1", None, (1,), "a b", "a c", {"a": 1}, {"a": 2}, np.arange(3), np.arange(4)),
        *(jnp.arange(3) + 1, jnp.arange(3.0)),
        *(jnp.sin, jnp.cos, times, make, functools.partial(times, s=1), functools.partial(times, s=2)),
        *(lambda x: x + 1, lambda x: x + 2, holding(1), holding(2), types.SimpleNamespace(a=1)),
    ]  # fmt: skip
    texts = [captured(holding(value), holding(value), ()) for value in values]
    assert len(set(texts)) == len(values)


LAMBDAS = """
import scheduler
def one(f, **told): return scheduler.autotune(tile=(1,), reference=lambda x: x, **told)(f)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes and imports, or reloads, a module of this text."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "declared_twice", raising=False)

    names._taken.clear()  # by files of other tests

    def load(text):
        (tmp_path / "declared_twice.py").write_text(LAMBDAS + text)
        importlib.invalidate_caches()
        if "declared_twice" in sys.modules:
            return importlib.reload(sys.modules["declared_twice"])
        return importlib.import_module("declared_twice")

    return load


@pytest.mark.parametrize(
    "text",
    [
        "a = one(lambda x, *, tile: x, name='n')\nb = one(lambda x, *, tile: x + 1, name='n')",
        "a, b = one(lambda x, *, tile: x, name='n'), one(lambda x, *, tile: x, name='n')",
        "a, b = one(lambda x, *, tile: x), one(lambda x, *, tile: x)",
        "@one\ndef f(x, *, tile): return x\ng = f\n@one\ndef f(x, *, tile): return x",
        "def f(x, *, tile): return x\ndef g(x, *, tile): return x\na, b = one(f, name='n'), one(g, name='n')",
        "def f(x, *, tile): return x\ndef by(s): return __import__('functools').wraps(f)(lambda x, *, tile: f(x) * s)\n"
        "a, b = one(by(1)), one(by(2))",
    ],
)
def test_two_functions_of_one_name_in_one_file_are_an_error(module, text):
    with pytest.raises(DeclarationError, match=r"already names .* of .*declared_twice.py:\d+, .* name="):
        module(text)


def test_a_module_can_be_loaded_again_edited_or_not(module):
    text = "@one\ndef f(x, *, tile): return x\n@one\ndef g(x, *, tile): return x + 1\nh = one(lambda x, *, tile: x)"
    kept = [module(text), module(text)]
    kept += [vars(module("# moved down by a line\n" + text.replace("+ 1", "+ 2")))]
    assert kept[-1]["g"].operation.name == "declared_twice.g"


@pytest.mark.parametrize("name", ["<stdin>", "cell"])
def test_a_statement_of_a_console_and_a_cell_of_a_notebook_can_run_again(name):
    space = {"__name__": "__main__"}
    exec(LAMBDAS, space)

    def run(text, place):
        exec(compile(text, place, "exec"), space)

    places = ["<stdin>"] * 4 if name == "<stdin>" else ["cell 1", "cell 1", "cell 2", "cell 3"]
    texts = ["@one\ndef f(x, *, tile): return x"] * 2 + ["@one\ndef f(x, *, tile): return x + 1"]
    texts += ["f = one(lambda x, *, tile: x, name='f')"]
    for place, text in zip(places, texts, strict=True):
        run(text, place)
    if name == "cell":
        with pytest.raises(DeclarationError, match="already names"):
            run("a, b = one(lambda x, *, tile: x, name='g'), one(lambda x, *, tile: x, name='g')", "cell 4")


# Names that are bound anew.

NOTEBOOK = """
import functools, jax, scheduler
from jax.experimental import pallas as pl
S, OTHER, TRACES, LISTED = 2.0, 1, 0, [2.0]
def body(r, o): o[...] = r[...] * S
def helper(): return body
def counted():
    global TRACES
    TRACES += 1
@scheduler.autotune(tile=(8, 16), reference=lambda x: x * S)
def k(x, *, tile, target):
    counted()
    return pl.pallas_call(helper(), out_shape=x, interpret=target.platform == "cpu")(x)
"""


@pytest.fixture
def notebook():
    space = {"__name__": "a_notebook"}
    exec(NOTEBOOK, space)
    return space


@pytest.mark.parametrize("how", [{"backends": "pallas"}, {"backends": "xla"}, {"schedule": {"tile": 8}}])
def test_an_eager_call_uses_the_value_that_a_name_has_now(notebook, how):
    k = notebook["k"]
    assert jnp.array_equal(k(X, **how), X * 2)
    notebook["S"] = 3.0
    assert jnp.array_equal(k(X, **how), X * 3)
    exec("def body(r, o): o[...] = r[...] * S + 1", notebook)
    exec("S = 5.0", notebook)
    expected = X * 5 + (0 if how == {"backends": "xla"} else 1)
    assert jnp.array_equal(k(X, **how), expected)


def test_what_changes_nothing_traces_nothing_anew(notebook):
    k = notebook["k"]
    k(X, backends="pallas")
    traces = notebook["TRACES"]  # which the kernel itself changes
    for edit in ("S = 1.0 + 1.0", "OTHER = 7", "LISTED[0] = 3.0", "import jax", "NEW = 1"):
        exec(edit, notebook)
        k(X, backends="pallas")
    assert notebook["TRACES"] == traces


def test_of_a_thousand_names_an_eager_call_looks_at_a_few():
    space = {"__name__": "a_notebook"} | {f"V{i}": float(i) for i in range(1000)}
    exec("def near(): return V0\ndef far(): return " + " + ".join(f"V{i}" for i in range(1, 1000)), space)
    exec("def f(x): return near() + far()", space)
    bindings = Bindings(space["f"])
    first = bindings.generation()
    assert len(bindings._globals) <= 50
    space["V0"] = -1.0
    assert bindings.generation() == first + 1 == bindings.generation()


def test_what_is_changed_in_place_is_read_anew_after_a_reload(notebook):
    exec("def body(r, o): o[...] = r[...] * LISTED[0]", notebook)
    k = notebook["k"]
    assert jnp.array_equal(k(X, backends="pallas"), X * 2)
    notebook["LISTED"][0] = 3.0
    scheduler.reload()
    assert jnp.array_equal(k(X, backends="pallas"), X * 3)


def test_a_change_forgets_the_answers_of_that_function_alone(notebook):
    other = make(2.0)
    other(X), notebook["k"](X)
    assert len({key[0].operation for key in calls._compiled}) == 2
    held = [compiled for key, compiled in calls._compiled.items() if key[0].operation is other.operation]
    notebook["S"] = 3.0
    notebook["k"](X)
    assert [compiled for key, compiled in calls._compiled.items() if key[0].operation is other.operation] == held


def test_a_tuned_answer_no_longer_holds_once_a_name_is_bound_anew(notebook):
    k = notebook["k"]
    scheduler.tune(k, k.problem(X), budget=3)
    assert jnp.array_equal(k(X, on_miss="error"), X * 2)
    notebook["S"] = 3.0
    with pytest.warns(RuntimeWarning, match="has changed since it was measured"):
        assert jnp.array_equal(k(X), X * 3)
    with pytest.raises(scheduler.CacheMiss):
        k(X, on_miss="error")
    notebook["S"] = 2.0
    assert jnp.array_equal(k(X, on_miss="error"), X * 2)


def test_a_closure_that_is_bound_anew_is_noticed_too():
    def outer():
        s = 2.0

        @scheduler.autotune(tile=(1, 2), reference=lambda x: x * s)
        def kernel(x, *, tile, target):
            return times(x, s, target)

        def bind(value):
            nonlocal s
            s = value

        return kernel, bind

    kernel, bind = outer()
    assert jnp.array_equal(kernel(X, backends="pallas"), X * 2)
    bind(3.0)
    assert jnp.array_equal(kernel(X, backends="pallas"), X * 3)
    assert jnp.array_equal(jax.jit(lambda x: kernel(x, backends="pallas"))(X), X * 3)


def test_a_reference_that_returns_another_dtype_now_is_another_result():
    space = {"__name__": "a_notebook", "jnp": jnp, "scheduler": scheduler, "DTYPE": "float32"}
    exec("k = scheduler.autotune(tile=(8,), reference=lambda x: x.astype(DTYPE))(lambda x, *, tile: x)", space)
    problem = space["k"].problem(X)
    assert problem.result().dtype == "float32"
    space["DTYPE"] = "float16"
    assert problem.result().dtype == "float16"


ROWS = """
import jax, scheduler
S, LISTED = 2.0, [2.0]
class Config: scale = 2.0
def helper(x): return x * S
@jax.jit
def jitted(x): return x * S
functions = [
    scheduler.rows(lambda x: x * S), scheduler.rows(lambda x: helper(x)), scheduler.rows(lambda x: jitted(x)),
]
in_place = [scheduler.rows(lambda x: x * LISTED[0]), scheduler.rows(lambda x: x * Config.scale)]
"""


def test_a_row_function_reads_each_name_as_it_is_bound_now():
    space, x = {"__name__": "a_notebook"}, jnp.ones((2, 8))
    exec(ROWS, space)
    for value in (2.0, 5.0, 0.0, -0.0):
        space["S"] = value
        for f in space["functions"]:
            found = [f(x), jax.jit(lambda x, f=f: f(x))(x), jax.grad(lambda x, f=f: f(x).sum())(x)]
            found += [f(x, backends="interpret")] if value else []
            for each in found:
                np.testing.assert_array_equal(each, np.full((2, 8), value))
            assert (np.signbit(found[0]) == np.signbit(value)).all()


def test_what_a_row_function_reads_in_place_is_read_by_a_new_trace_and_after_a_reload():
    space, x = {"__name__": "a_notebook"}, jnp.ones((2, 8))
    exec(ROWS, space)
    assert all((f(x) == 2).all() for f in space["in_place"])
    space["LISTED"][0] = space["Config"].scale = 5.0
    assert all((jax.jit(lambda x, f=f: f(x))(x) == 5).all() for f in space["in_place"])
    scheduler.reload()
    assert all((f(x) == 5).all() for f in space["in_place"])


def test_a_row_function_is_not_traced_again_for_nothing():
    traces = []

    @scheduler.rows
    def f(x, *, s=2.0):
        traces.append(s)
        return x * s

    x = jnp.ones((2, 8))
    f(x), f(x, s=3.0)
    before = len(traces)
    for _ in range(3):
        f(x), f(x, s=3.0)
    assert len(traces) == before


def divided(x, *, s):
    return x / (s if isinstance(s, float) else 1.0) if not isinstance(s, tuple) else x * (1 + isinstance(s[0], float))


def test_static_arguments_of_other_types_or_signs_are_other_programs():
    f, x = scheduler.rows(divided), jnp.ones((2, 8))
    for s in (0.0, -0.0, 1, True, 1.0, (2,), (2.0,), (True,)):
        wanted = divided(x, s=s)
        assert jnp.array_equal(f(x, s=s), wanted), s
        assert jnp.array_equal(jax.jit(lambda x, s=s: f(x, s=s))(x), wanted), s
    both = jax.jit(lambda x: (f(x, s=0.0), f(x, s=-0.0)))(x)
    assert jnp.array_equal(both[0], -both[1])
