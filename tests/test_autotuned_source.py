"""Which change of a file makes a decorated function another kernel; and static parameters as text."""

import enum
import functools
import importlib
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces import LOADED_FILE, load
from search_spaces.autotuned import names
from search_spaces.autotuned.source import Source
from search_spaces.autotuned.statics import spelled, value_of

pytestmark = pytest.mark.one_jax

FILE = '''
import numpy as np
import jax.numpy as jnp
import scheduler
import beside
from beside import helped

WIDE = 8
TABLE = {"one": (1, 2), "two": np.arange(3)}
UNUSED = 1


class Shape:
    sides = 4

    def area(self):
        return WIDE


def helper(x):
    return second(x) * WIDE


def second(x):
    return x + 1


def shifted(by):
    @scheduler.autotune(tile=(1, 2), reference=lambda x: x * 2)
    def inner(x, *, tile):
        return x + by

    return inner


by_closure = shifted(3)


@scheduler.autotune(tile=(1, 2), reference=lambda x: jnp.abs(x))
def kernel(x, *, tile):
    """A docstring."""

    def body(ref):
        return helper(ref) + TABLE["one"][0] + beside.read() + helped() + Shape().area()

    return jnp.asarray(body(x))
'''
BESIDE = "def read():\n    return 1\n\n\ndef helped():\n    return 2\n\n\ndef unread():\n    return 3\n"


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """The versions of a file's kernel, its reference and its closure, after a change of the file or of its module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(old="", new=""):
        assert not old or old in FILE + BESIDE
        for name, text in (("beside", BESIDE), ("own", FILE)):
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
        for name in [name for name in sys.modules if name.startswith(LOADED_FILE) or name == "beside"]:
            monkeypatch.delitem(sys.modules, name)
        names._taken.clear()
        importlib.invalidate_caches()
        own, closed = (load(f"{tmp_path / 'own.py'}:{function}") for function in ("kernel", "by_closure"))
        kernel, reference = own.kernels
        return {"kernel": kernel.version, "reference": reference.version, "closure": closed.kernels[0].version}

    return of


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("helper(ref) +", "helper(ref) -", {"kernel"}),  # within the function within
        ("(x, *, tile)", "(x, *, tile=1)", {"kernel", "closure"}),  # a default
        ("* WIDE\n", "* WIDE + 0\n", {"kernel"}),  # a function that it calls
        ("return x + 1", "return x + 2", {"kernel"}),  # one that that one calls
        ("WIDE = 8", "WIDE = 16", {"kernel"}),  # a global that only those read
        ('"one": (1, 2)', '"one": (1, 3)', {"kernel"}),  # within containers
        ("np.arange(3)", "np.arange(4)", {"kernel"}),  # the content of an array
        ("sides = 4", "sides = 5", {"kernel"}),  # a class
        ("return 1\n\n\ndef helped", "return 4\n\n\ndef helped", {"kernel"}),  # read of a module by its name
        ("return 2\n", "return 5\n", {"kernel"}),  # imported from it
        ("shifted(3)", "shifted(4)", {"closure"}),  # a closure's value
        ("jnp.abs(x)", "jnp.abs(-x)", {"reference"}),
    ],
)
def test_what_changes_the_answer_makes_another_version(versions, old, new, changed):
    before, after = versions(), versions(old, new)
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tile=(1, 2)", "tile=(1, 2, 4)"),  # the choices: what is stored is one of them, or holds no longer
        ('"""A docstring."""', '"""Another, of\n    two lines."""'),
        ("    def body(ref):", "\n    # a comment\n    def body(ref):  # and another"),
        ('helper(ref) + TABLE["one"][0] +', 'helper(ref) + TABLE["one"][\n            0\n        ] +'),
        ("UNUSED = 1", "UNUSED = 2"),
        ("return 3\n", "return 6\n"),  # of a module, what is not read
    ],
)
def test_what_does_not_leaves_it(versions, old, new):
    assert versions() == versions(old, new)


def test_what_was_typed_into_a_console_counts_by_its_bytecode():
    def typed(text):
        names = {}
        exec(text, names)
        return Source(names["f"]).version

    assert typed("def f(x):\n  return x") == typed("def f(x):\n\n    return x  # the same")
    assert typed("def f(x):\n  return x") != typed("def f(x):\n  return x + 1")


def test_wrapped_partial_and_builtin_functions_have_versions_too():
    def power(x, n):
        return x**n

    squared, cubed = functools.partial(power, n=2), functools.partial(power, n=3)
    assert Source(squared).version != Source(cubed).version
    assert Source(jax.jit(power)).version == Source(jax.jit(power)).version
    assert Source(jnp.matmul).version == Source(jnp.matmul).version != Source(jnp.add).version
    assert all(0 < Source(f).version < 2**31 for f in (abs, jnp.matmul, squared, np.tanh, jax.nn.relu))


class Side(enum.Enum):
    LEFT = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "True"),
        (1.0, "1.0"),
        (1e-6, "1e-06"),
        (-math.inf, "-1e999"),
        (None, "None"),
        ("gelu", "gelu"),
        ("1", "'1'"),
        ("None", "'None'"),
        ("true", "'true'"),
        (" 1", "' 1'"),
        ("", ""),
        ("it's", "it's"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, "a", (None, True)), "(1, 'a', (None, True))"),
    ],
)
def test_a_static_parameter_has_one_spelling_which_is_read_as_it_was(value, text):
    assert spelled("p", value) == text
    read = value_of(text)
    assert (read, type(read)) == (value, type(value))


def test_other_spellings_and_values_are_read_as_the_same():
    assert value_of("true") is True
    assert value_of("FALSE") is False
    assert spelled("p", value_of("(1,'a')")) == "(1, 'a')"
    assert spelled("p", np.float32(0.5)) == "0.5"
    assert spelled("p", np.bool_(True)) == "True"
    for dtype in (jnp.bfloat16, np.dtype("bfloat16"), jnp.dtype("bfloat16")):
        assert spelled("p", dtype) == "bfloat16"
    assert spelled("p", (jnp.float32, np.int8)) == "('float32', 'int8')"
    assert value_of("[1, 2]") == "[1, 2]"


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, Side.LEFT, abs, np.arange(3), 1j, b"x", (1, [2]), object()])
def test_what_no_key_can_spell_is_refused(value):
    with pytest.raises(TypeError, match=r"p=.* is a \w+.*; a static parameter is part of the key that sch"):
        spelled("p", value)
    if isinstance(value, list):
        with pytest.raises(TypeError, match="is a list: give a tuple"):
            spelled("p", value)
    with pytest.raises(TypeError, match="p=nan is never equal to itself"):
        spelled("p", math.nan)
