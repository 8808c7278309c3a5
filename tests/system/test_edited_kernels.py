"""Which edit of a kernel, of its reference or of what they use makes a stored record a miss, and which does not."""

# Files with kernels are written, loaded, edited and loaded again. Records are made as a search makes them, without one.

import contextlib
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from operations import DOUBLE, Double, DoubleProblem

import scheduler
from scheduler.core import codec, fingerprints
from scheduler.core.errors import RecordingError
from scheduler.core.hardware import CPU
from scheduler.core.records import Entry, Environment, Measurement, Record, Trial, key_of
from scheduler.measure.buffers import timing_conditions
from scheduler.measure.protocol import Init, Request
from scheduler.measure.replay import Replay
from scheduler.measure.runner import InProcess
from scheduler.measure.worker import Measuring
from scheduler.prediction.transfer import recheck
from scheduler.search.sweep import sweep
from scheduler.store.store import Store
from search_spaces import load
from search_spaces.autotuned import names

pytestmark = pytest.mark.slow_but_first

ROOT = Path(__file__).parents[2]
X = jnp.arange(16.0)
HEAD = """
import contextlib, contextvars, dataclasses, enum, functools, operator, os, types
import jax, jax.numpy as jnp, numpy as np
import scheduler
from jax.experimental import pallas as pl
"""


def file(body, before="", *, decorator="", reference="lambda x: x * 2.0"):
    """A file with a kernel `k` of this body, after these lines."""
    return f"""{HEAD}{before}
@scheduler.autotune(tile=(8, 16), reference={reference})
{decorator}
def k(x, *, tile, target):
{textwrap.indent(textwrap.dedent(body), "    ")}
"""


def both(body, before="", **more):
    """A file before and after an edit of each ``{2.0|3.0}`` in it."""
    text = file(body, before, **more)
    return tuple(re.sub(r"\{\{(.*?)\|(.*?)\}\}", group, text, flags=re.DOTALL) for group in (r"\1", r"\2"))


def package(imports, body):
    """Likewise, of a kernel that uses a package, which is edited."""
    own = file(body, imports)
    files = ({"mypkg/__init__.py": "", "mypkg/h.py": f"S = {s}\ndef f(x):\n    return x * S\n"} for s in (2.0, 3.0))
    return tuple(each | {"kern.py": own} for each in files)


PALLAS = """
def body(r, o):
    o[...] = {value}
return pl.pallas_call(body, grid=({grid},), in_specs=[pl.BlockSpec((8,), lambda i: ({index},))],
    out_specs=pl.BlockSpec((8,), lambda i: (i,)), out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
    interpret=target.platform == "cpu", name="{name}"{more})(x)
"""


def pallas(**changed):
    """A kernel of Pallas before and after such a change."""
    told = {"value": "r[...] * 2.0", "grid": "2", "index": "i", "name": "one", "more": ""}
    return tuple(file(PALLAS.format(**each)) for each in (told, told | changed))


MOSAIC = """
layout = plgpu.Layout.WG_STRIDED((16,), vec_size=1)
def body(x_ref, o_ref, smem):
    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((16,), jnp.float32, layout))
    def code(ctx, a):
        return a * S
    o_ref[...] = code(load(x_ref, layout))
return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((16,), jnp.float32), grid=(1,), grid_names=("i",),
    scratch_types=[plgpu.SMEM((SCRATCH,), jnp.float32)], compiler_params=plgpu.CompilerParams(approx_math=FAST))(x)
"""


def mosaic(**changed):
    """A kernel of Mosaic GPU, with code of Mosaic's own, before and after such a change of a global."""
    imports = "from search_spaces.jax_compat import load, plgpu\n"
    told = {"S": "2.0", "SCRATCH": "128", "FAST": "False"}
    names = [imports + "\n".join(f"{name} = {each[name]}" for name in each) for each in (told, told | changed)]
    return tuple(file(MOSAIC, before) for before in names)


SCALED = """
def scaled(s):
    def decorate(f):
        @functools.wraps(f)
        def g(x, **named):
            return f(x, **named) * s
        return g
    return decorate
"""
EDITS = {
    "a global": both("return x * S", "S = {{2.0|3.0}}"),
    "a helper": both("return f(x)", "def f(x): return x * {{2.0|3.0}}"),
    "a helper's helper": both("return f(x)", "def g(x): return x * {{2.0|3.0}}\ndef f(x): return g(x)"),
    "an alias of a function seen before": both(
        "return F(x) + 0 * OPS['f'](x)",
        "def f(x): return x * 2\ndef g(x): return x * 3\nOPS = {'f': f, 'g': g}\nF = OPS['{{f|g}}']",
    ),
    "an argument of a helper's decorator": both("return f(x)", SCALED + "@scaled({{2.0|3.0}})\ndef f(x): return x"),
    "an argument of its own decorator": both("return x", SCALED, decorator="@scaled({{2.0|3.0}})"),
    "a decorator": both("return x", SCALED.replace("* s", "* {{2.0|3.0}}"), decorator="@scaled(0)"),
    "jit of a partial": both("return f(x)", "f = jax.jit(functools.partial(lambda s, x: x * s, {{2.0|3.0}}))"),
    "import mypkg.h; mypkg.h.S": package("import mypkg.h", "return x * mypkg.h.S"),
    "import mypkg.h; mypkg.h.f": package("import mypkg.h", "return mypkg.h.f(x)"),
    "from mypkg import h": package("from mypkg import h", "return h.f(x)"),
    "from mypkg.h import f": package("from mypkg.h import f", "return f(x)"),
    "an import within": package("", "import mypkg.h as h\nreturn h.f(x)"),
    "importlib": package("import importlib", "return importlib.import_module('mypkg.h').f(x)"),
    "a namespace": both("return x * C.s", "C = types.SimpleNamespace(s={{2.0|3.0}})"),
    "a callable instance": both("return C(x)", "class M:\n    def __call__(self, x): return x * {{2.0|3.0}}\nC = M()"),
    "an instance's method": both("return C.f(x)", "class M:\n    def f(self, x): return x * {{2.0|3.0}}\nC = M()"),
    "an instance's attribute": both("return x * C.s", "class M: pass\nC = M()\nC.s = {{2.0|3.0}}"),
    "a class's attribute": both("return x * M.s", "S = {{2.0|3.0}}\nclass M: s = S"),
    "a property": both("return x * M().s", "class M:\n    @property\n    def s(self): return {{2.0|3.0}}"),
    "a base class": both("return M().f(x)", "class B:\n    def f(self, x): return x * {{2.0|3.0}}\nclass M(B): pass"),
    "super()": both(
        "return M().f(x)",
        "class B:\n    def f(self, x): return x * {{2.0|3.0}}\nclass M(B):\n    def f(self, x): return super().f(x)",
    ),
    "a metaclass": both(
        "return x * M.s",
        "class T(type):\n    def __getattr__(cls, name): return {{2.0|3.0}}\nclass M(metaclass=T): pass",
    ),
    "a default from a global": both("return f(x)", "S = {{2.0|3.0}}\ndef f(x, s=S): return x * s"),
    "a nested function's default": both("def f(x, s=S): return x * s\nreturn f(x)", "S = {{2.0|3.0}}"),
    "globals()": both("return x * globals()['S']", "S = {{2.0|3.0}}"),
    "two lambdas of one line": both("return f(x)", "a, b = lambda x: x * 2.0, lambda x: x * 3.0\nf = {{a|b}}"),
    "the environment": both("return x * float(os.environ['EDITED'])", "os.environ['EDITED'] = '{{2|3}}'"),
    "an lru_cache": both("return x * f()", "@functools.lru_cache\ndef f(): return {{2.0|3.0}}"),
    "the axes of vmap": both(
        "return f(x.reshape(4, 4)).reshape(-1)", "f = jax.vmap(jnp.cumsum, in_axes={{0|1}}, out_axes={{0|1}})"
    ),
    "an array's content": both("return x * S[0]", "S = np.array([{{2.0|3.0}}, 1.0])"),
    "an array of JAX": both("return x * S", "S = jnp.full(16, {{2.0|3.0}})"),
    "a large array": both("return x + jnp.asarray(S)[:16]", "S = np.zeros(2**19, np.float32)\nS[-{{1|2}}] = 1"),
    "a value within containers": both("return x * S['a'][0]['b']", "S = {'a': ({'b': {{2.0|3.0}}},)}"),
    "a frozen dataclass": both(
        "return x * C().s", "@dataclasses.dataclass(frozen=True)\nclass C:\n    s: float = {{2.0|3.0}}"
    ),
    "an enum": both("return x * C.A.value", "class C(enum.Enum):\n    A = {{2.0|3.0}}"),
    "a context variable": both("return x * C.get()", "C = contextvars.ContextVar('C', default={{2.0|3.0}})"),
    "an operator": both("return F(x, x)", "F = operator.{{add|mul}}"),
    "an attribute by name": both("return getattr(jnp, F)(x)", "F = '{{sin|cos}}'"),
    "single dispatch": both(
        "return f(x)", "@functools.singledispatch\ndef f(x): return x\nf.register(object, lambda x: x * {{2.0|3.0}})"
    ),
    "text that is executed": both("return f(x)", "exec('def f(x): return x * {{2.0|3.0}}')"),
    "a file": both(
        "return x * float(F.read_text())",
        "import pathlib\nF = pathlib.Path(__file__ + '.txt')\nF.write_text('{{2|3}}')",
    ),
    "a dtype": both("return (x.astype({{'bfloat16'|'float16'}}) * 2).astype('float32')"),
    "a precision": both("return jnp.dot(x, x, precision='{{highest|default}}') * x"),
    "a seed": both("return jax.random.normal(jax.random.key({{0|1}}), x.shape)"),
    "a loop's count": both("for _ in range({{2|3}}): x = x + x\nreturn x"),
    "the order of operations": both("return {{(x + 1) * 2|x * 2 + 1}}"),
    "a host callback": both("return jax.pure_callback(lambda x: x * {{2|3}}, x, x)"),
    "a host callback's global": both("return jax.pure_callback(f, x, x)", "S = {{2|3}}\ndef f(x): return x * S"),
    "a kernel's body": pallas(value="r[...] * 3.0"),
    "a kernel's grid": pallas(grid="1"),
    "a kernel's index map": pallas(index="1 - i"),
    "a kernel's aliases": pallas(more=", input_output_aliases={0: 0}"),
    "a kernel's cost": pallas(more=", cost_estimate=pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=1)"),
    "inline code of Mosaic GPU": mosaic(S="3.0"),
    "scratch memory": mosaic(SCRATCH="256"),
    "parameters of a compiler": mosaic(FAST="True"),
    "one schedule alone": both("return x * ({{2.0|3.0}} if tile == 8 else 2.0)"),
    "the target": both("return x * (2.0 if target.platform == '{{cpu|cuda}}' else 3.0)"),
}
REFERENCES = {
    "the reference": both("return x * 2", reference="lambda x: x * {{2.0|4.0}}"),
    "the reference's helper": both("return x * 2", "def f(x): return x * {{2.0|4.0}}", reference="f"),
    "the reference's table": both("return x * 2", "T = [{{2.0|4.0}}]", reference="lambda x: x * T[0]"),
    "another function": both("return jnp.sin(x)", reference="jnp.{{sin|cos}}"),
}
NO_EDITS = {
    "comments and layout": both("{{|# a comment\n}}return (x\n    {{* 2|\n  *\n   2}})"),
    "a docstring": both("'''{{One.|Another,\n    of two lines.}}'''\nreturn x * 2"),
    "names of variables": both("{{a|b}} = x * 2\nreturn {{a|b}}"),
    "names of functions": both("return {{f|g}}(x)", "@jax.jit\ndef {{f|g}}(x): return x * 2"),
    "lines before": both("return x * 2", "{{|\n\n\n}}"),
    "a global that nothing reads": both("return x * 2", "UNREAD = {{1|2}}"),
    "an annotation": both("y{{|: jax.Array}} = x * 2\nreturn y"),
    "a constant's spelling": both("return x * {{2.0|(1.0 + 1.0)}}"),
    "what is printed": both("print('{{a|b}}')\nreturn x * 2"),
    "a function inlined": both("return {{f(x)|x * 2}}", "def f(x): return x * 2"),
    "an object without content": both("return x * 2 if M else x", "M = object()"),
    "the choices": both("return x * 2"),
    "a kernel's name": pallas(name="another"),
    "names within a host callback": both("return jax.pure_callback(lambda {{a|b}}: {{a|b}} * 2, x, x)"),
}


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Imports a file, or a dict of files, as the module `kern`, anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("EDITED", "")

    def load(files):
        names._taken.clear()  # by files of other tests
        for name, text in (files if isinstance(files, dict) else {"kern.py": files}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("kern", "mypkg")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return importlib.import_module("kern").k

    return load


def record_of(function, tile=8, jax_version=jax.__version__):
    """The record that a search of `function` would store, had it ended with this tile ahead of the reference."""
    operation, problem = function.operation, function.problem(X)
    kernel, library = operation.kernels
    measured = Measurement(1e-6, (1e-6,), "wall", "warm")
    print_of = fingerprints.of_schedule(kernel, problem, {"tile": tile}, CPU.target)
    return Record(
        key=key_of(operation, problem, CPU),
        entries=(
            Entry(kernel.backend, kernel.version, {"tile": tile}, measured, 1e-6, print_of),
            Entry(library.backend, library.version, {}, measured, 1e-6),
        ),
        versions={each.backend: each.version for each in operation.kernels},
        environment=Environment(jax_version, "", "", "2026-01-01T00:00:00Z"),
        budget=3,
        tried=3,
        space=3,
        reference=fingerprints.of_reference(operation, problem),
    )


def held(function, record):
    """What a record of `X` holds for a kernel today."""
    return recheck(function.operation, function.problem(X), CPU, record)


@pytest.mark.parametrize("name", [*EDITS, *REFERENCES])
def test_an_edit_changes_what_a_record_says_and_its_undoing_restores_it(name, loaded):
    before, after = (EDITS | REFERENCES)[name]
    record = record_of(loaded(before))
    said = held(loaded(after), record)
    what = "the reference" if name in REFERENCES else "the pallas kernel (pallas tile=8)"
    assert said == f"{what} has changed since it was measured"
    assert isinstance(said, fingerprints.Changed)
    assert held(loaded(before), record) == record.winner


@pytest.mark.parametrize("name", NO_EDITS)
def test_what_changes_no_answer_leaves_the_record_its_own(name, loaded):
    before, after = NO_EDITS[name]
    record = record_of(loaded(before))
    again = loaded(after.replace("tile=(8, 16)", "tile=(8, 16, 32)"))  # nor do other choices
    assert record_of(again) == record
    assert held(again, record) == record.winner


def test_a_record_is_stale_if_another_choice_or_rule_makes_other_schedules_legal(loaded):
    text = file("return x * 2")
    function = loaded(text)
    legal = fingerprints.of_legal(function.operation, function.problem(X), CPU.target)
    record = dataclasses.replace(record_of(function), legal=legal)
    assert held(loaded(text.replace("tile=(8, 16)", "tile=[8, 16]")), record) == record.winner
    assert held(
        loaded(text.replace("tile=(8, 16)", "tile=(8, 16), rules={'few': lambda tile: tile < 99}")), record
    ) == (record.winner)
    for changed in ("tile=(8, 16, 32)", "tile=(8, 16), rules={'few': lambda tile: tile < 9}"):
        said = held(loaded(text.replace("tile=(8, 16)", changed)), record)
        assert said == "the choices or rules have changed since it was measured"
        assert isinstance(said, fingerprints.Changed)
    assert held(loaded(text), record) == record.winner
    assert fingerprints.of_legal(DOUBLE, DoubleProblem(8), CPU.target) == ""


def called(function, **how):
    """What a call answers, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(X, **how)
    return result, [str(each.message) for each in caught]


@pytest.mark.parametrize("name", ["a decorator", "an import within", "a kernel's body", "the reference"])
def test_a_call_of_an_edited_kernel_is_a_miss_with_one_warning_and_the_references_answer(name, loaded, tmp_path):
    before, after = (EDITS | REFERENCES)[name]
    first = loaded(before)
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    store.put(record_of(first))
    store.close()
    scheduler.reload()
    answered, said = called(first, on_miss="error")  # by the record
    assert said == []
    scheduler.reload()
    edited = loaded(after)
    for jitted in (edited, jax.jit(edited)):
        result, more = called(jitted)
        said += more
        assert jnp.array_equal(result, edited.operation.problem.declared.reference(X))
    (warning,) = said
    what = "the reference" if name in REFERENCES else "the pallas kernel (pallas tile=8)"
    assert f"{what} has changed since it was measured; to measure it again, run: tile-s" in warning
    with pytest.raises(scheduler.CacheMiss, match="has changed since"):
        edited(X, on_miss="error")
    assert jnp.array_equal(loaded(before)(X, on_miss="error"), answered)


SCRIPT = """
import sys, warnings
import jax.numpy as jnp
import kern, scheduler
x = jnp.arange(16.0)
if sys.argv[1:] == ["tune"]:
    scheduler.tune(kern.k, kern.k.problem(x), budget=2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(kern.k(x).tolist() == (2 * x).tolist(), len(caught))
print(kern.k(x, on_miss="error").shape)
"""


@pytest.mark.slow
def test_processes_agree_on_what_is_an_edit_whatever_their_hashes(tmp_path):
    before, after = both("return x * S if 'a' in {'a', 'b', ('c', 1)} else x", "S = {{2.0|3.0}}")

    def run(text, seed, *args):
        (tmp_path / "kern.py").write_text(text)
        (tmp_path / "script.py").write_text(SCRIPT)
        told = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "script.py", *args], cwd=tmp_path, env=told, capture_output=True, text=True, check=False
        )
        return done.stdout.splitlines(), done.stderr

    assert run(before, 1, "tune")[0] == ["True 0", "(16,)"]
    assert run(before.replace("return x", "# a comment\n    return x"), 2)[0] == ["True 0", "(16,)"]
    said, error = run(after, 3)
    assert said == ["True 1"]  # a warning, the reference's answer, and then
    assert "CacheMiss" in error
    assert "has changed since it was measured" in error


def test_a_fingerprint_does_not_depend_on_where_or_under_which_settings_it_is_made(loaded):
    function = loaded(file("return (x @ jnp.ones((16, 16)) + jnp.arange(16)[None])[0] * 2"))
    kernel, problem = function.operation.kernels[0], function.problem(X)
    made, mesh = [], jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))

    def make(*_):
        made.append(fingerprints.of_schedule(kernel, problem, {"tile": 8}, CPU.target))
        made.append(fingerprints.of_reference(function.operation, problem))
        return X

    make()
    jax.jit(make)(X)
    jax.vmap(jax.grad(lambda x: make(x).sum() * x))(X)
    for settings in (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.disable_jit(True),
        jax.debug_nans(True),
        jax.transfer_guard("disallow"),
        jax.set_mesh(mesh),
        scheduler.target("NVIDIA H200"),
    ):
        with settings:
            make()
    assert len(made) == 24
    assert not any(each.startswith("raises") for each in made)
    assert set(made[::2]) == {made[0]}
    assert set(made[1::2]) == {made[1]}


def test_a_call_within_an_import_waits_for_no_lock_of_that_import(loaded):
    text = file("import kern\nreturn x * kern.S", "S = 2.0")
    loaded(text + "\nfrom test_edited_kernels import thread_of\nTHREAD = thread_of(k)\n")
    assert sys.modules["kern"].THREAD is threading.current_thread()
    assert thread_of(loaded(file("return x"))) is not threading.current_thread()


def thread_of(function):
    """The thread in which `function` is traced for its fingerprint."""
    kernel, problem, seen = function.operation.kernels[0], function.problem(X), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_traced", lambda *_: seen.append(threading.current_thread()) or "")
        fingerprints.of_schedule(kernel, problem, {"tile": 8}, CPU.target)
    return seen[0]


def test_what_another_version_of_jax_measured_is_compared_only_where_it_agrees(loaded):
    before, after = EDITS["a global"]
    record = record_of(loaded(before), jax_version="0.0.1")
    assert held(loaded(after), record) == record.winner  # nobody can tell
    verified = dataclasses.replace(record, environment=dataclasses.replace(record.environment, jax=jax.__version__))
    assert isinstance(held(loaded(after), verified), fingerprints.Changed)


def test_a_record_as_text_keeps_its_fingerprints_and_one_without_them_is_spelled_as_before(loaded):
    record = record_of(loaded(file("return x * 2")))
    assert codec.record_from_text(codec.record_to_text(record)) == record
    plain = dataclasses.replace(
        record, reference="", entries=tuple(dataclasses.replace(entry, fingerprint="") for entry in record.entries)
    )
    text = codec.record_to_text(plain)
    assert "fingerprint" not in text
    assert '"reference"' not in text
    assert codec.record_from_text(text) == plain


def test_a_kernel_that_can_no_longer_be_traced_is_an_edit(loaded):
    before, after = both("{{|raise ValueError('not today')}}\nreturn x * 2")
    record = record_of(loaded(before))
    assert isinstance(held(loaded(after), record), fingerprints.Changed)


def test_a_search_takes_over_no_trial_of_an_edited_kernel(loaded):
    before, after = EDITS["a global"]
    first = loaded(before)
    store = Store(os.environ["TILE_SCHEDULER_CACHE"])
    kernel, problem = first.operation.kernels[0], first.problem(X)
    here = InProcess()
    clock, l2 = timing_conditions(problem, here.hardware, "cold")
    print_of = fingerprints.of_schedule(kernel, problem, {"tile": 8}, here.hardware.target)
    trial = Trial(0, "pallas", 0, {"tile": 8}, Measurement(1e-6, (1e-6,), clock, l2), 1e-6, print_of)
    store.save_trials(key_of(first.operation, problem, here.hardware), [trial], here.environment)
    for text, resumed in ((after, 0), (before, 1)):
        function, seen = loaded(text), []
        with contextlib.suppress(StopSearch):
            scheduler.tune(function, function.problem(X), store=store, budget=4, progress=stopping(seen))
        assert seen[0].resumed == resumed
    store.close()


class StopSearch(Exception):
    pass


def stopping(seen):
    def progress(reached):
        seen.append(reached)
        raise StopSearch

    return progress


def test_a_sweep_goes_on_with_no_recording_of_an_edited_kernel(loaded, tmp_path):
    before, after = EDITS["a global"]
    path = tmp_path / "recording.jsonl.gz"

    def swept(text):
        function = loaded(text)
        return sweep(function.operation, function.problem(X), path, InProcess(), repetitions=1)[1]

    trials = swept(before)
    assert swept(before) == trials
    assert [bool(trial.fingerprint) for trial in trials if trial.backend == "pallas"] == [True, True]
    with pytest.raises(RecordingError, match="an earlier version of the pallas kernel"):
        swept(after)
    replay = Replay(path)
    replayed = scheduler.tune(loaded(before), replay.fields, runner=replay)
    assert {entry.fingerprint for entry in replayed.entries} <= {trial.fingerprint for trial in trials}


# Classes: version 0 leaves it to the program.


def test_a_kernel_of_a_class_without_a_version_of_its_own_is_known_by_its_program(monkeypatch):
    class Doubled(Double):
        version, factor = 0, 2.0

        def run(self, problem, schedule, target, /, *args, **params):
            return args[0] * self.factor

    operation, problem = dataclasses.replace(DOUBLE, kernels=(Doubled(), DOUBLE.library)), DoubleProblem(8)
    schedule = {"tile": 1, "behave": "ok"}

    def made(of):
        first = fingerprints.of_schedule(of.kernels[0], problem, schedule, CPU.target)
        return first, fingerprints.of_reference(of, problem)

    before = made(operation)
    monkeypatch.setattr(Doubled, "factor", 3.0)
    kernel_changed = made(operation)
    monkeypatch.setattr(DoubleProblem, "reference", lambda self, x: x * 3)
    assert [len({*each}) for each in zip(before, kernel_changed, made(operation), strict=True)] == [2, 2]
    assert made(DOUBLE) == ("", "")  # whose versions are kept by hand


def test_a_worker_confirms_no_other_kernel_than_the_process_has_that_tunes_it(tmp_path):
    operation, target = load("own_kernels:sum_and_max"), CPU.target
    problem = operation.problem.parse({"x": "float32[16,5]"})
    schedule = {"tile": 8}
    own = fingerprints.of_candidate(operation, problem, "pallas", schedule, target)
    worker = Measuring(Init("cpu", "cpu", str(tmp_path)), lambda step: None)

    def confirmed(fingerprint):
        named = "own_kernels:sum_and_max", problem.canonical(), "pallas", schedule
        return worker.answer(Request("confirm", *named, 1, "warm", None, False, (), fingerprint)).outcome

    assert confirmed(own) is None
    refused = confirmed("another")
    assert refused.stage == "verify"
    assert "loads another version of own_kernels:sum_and_max than the process that traced it first" in refused.detail
