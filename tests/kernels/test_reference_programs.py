"""Programs that only check kernels: who compiles them, and who loads them."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import DoubleProblem

from scheduler.core.hardware import CPU
from scheduler.core.records import Measurement
from scheduler.measure import buffers
from scheduler.measure.bench import Bench
from scheduler.measure.buffers import PARTS, prepare
from search_spaces import checking
from search_spaces.checking import compiled_program, program_of, shared_in
from search_spaces.configuration import measurements
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import SOFTMAX, SoftmaxProblem

pytestmark = pytest.mark.slow

PROBLEM = FlashAttentionBackwardProblem(1, 32, 24, 2, 1, 16, causal=True, dtype="float32")


@pytest.fixture
def compilations(monkeypatch):
    """What was compiled rather than loaded."""
    made, compile_one = [], checking._compile
    monkeypatch.setattr(checking, "_compile", lambda lowered: made.append(lowered) or compile_one(lowered))
    return made


FORWARD = FlashAttentionProblem(1, 32, 24, 2, 1, 16, causal=True, dtype="float32")


def test_what_one_has_compiled_the_others_load_and_get_the_same_results(tmp_path, compilations):
    rows = np.arange(0, 32, 3)

    def reference(*args):
        return [x[:, :24][:, rows % 24] for x in PROBLEM.reference(*args)]

    inputs = PROBLEM.inputs(0)
    alone = compiled_program(reference, PROBLEM.operands())(*inputs)
    del compilations[:]
    with shared_in(str(tmp_path)):
        results = [compiled_program(reference, PROBLEM.operands())(*inputs) for _ in range(3)]
    assert len(compilations) == 1
    for result in results:
        assert all(jnp.array_equal(one, other) for one, other in zip(result, alone, strict=True))


def test_another_program_is_compiled_and_without_a_directory_each_is(tmp_path, compilations):
    x = jax.ShapeDtypeStruct((8,), "float32")
    with shared_in(str(tmp_path)):
        assert compiled_program(jnp.sin, [x])(jnp.zeros(8))[0] == 0
        assert compiled_program(jnp.cos, [x])(jnp.zeros(8))[0] == 1
    for directory in ("", str(tmp_path / "removed")):
        with shared_in(directory):
            assert compiled_program(jnp.sin, [x])(jnp.zeros(8))[0] == 0
    assert len(compilations) == 4


@pytest.mark.parametrize("content", [b"", b"not a program"])
def test_what_cannot_be_loaded_is_compiled(tmp_path, compilations, content):
    sine = jnp.sin, [jax.ShapeDtypeStruct((8,), "float32")]
    with shared_in(str(tmp_path)):
        compiled_program(*sine)
        (kept,) = (path for path in tmp_path.iterdir() if not path.suffix)
        kept.write_bytes(content)
        assert compiled_program(*sine)(jnp.zeros(8))[0] == 0
    assert len(compilations) == 2


def test_operands_are_drawn_by_programs_that_are_shared_and_are_the_same_without(tmp_path, compilations):
    problem = MatmulProblem(24, 16, 8, bias="bfloat16")
    alone = problem.inputs(3)
    checking._RAN.clear()
    with shared_in(str(tmp_path)):
        first = problem.inputs(3)
        count = len(compilations)
        checking._RAN.clear()  # as another process
        second = problem.inputs(3)
    assert len(compilations) == count == len({x.shape for x in first}) + 1, "one for each operand, one that scales"
    for drawn in (first, second):
        assert all(jnp.array_equal(one, other) for one, other in zip(drawn, alone, strict=True))


def test_what_another_process_has_compiled_by_name_is_not_even_traced(tmp_path):
    traced = []

    @functools.partial(jax.jit, static_argnames="factor")
    def scaled(x, *, factor):
        traced.append(factor)
        return factor * x

    with shared_in(str(tmp_path)):
        for factor in (2, 3, 2, 3):
            checking._RAN.clear()
            jax.clear_caches()  # as another process
            assert program_of(scaled, jnp.ones(4), factor=factor)(jnp.ones(4)).tolist() == [factor] * 4
        assert program_of(scaled, jnp.ones(5), factor=2)(jnp.ones(5)).tolist() == [2] * 5
    assert traced == [2, 3, 2]


def test_programs_run_in_turns_and_are_compiled_outside_of_them(tmp_path, monkeypatch):
    turns, within, compiled_within = [], [], []
    compile_one = checking._compile

    def compile_noted(lowered):
        compiled_within.append(bool(within))
        return compile_one(lowered)

    @contextlib.contextmanager
    def turn():
        outermost = not within
        within.append("turn")
        yield
        within.pop()
        if outermost:
            turns.append("one")

    monkeypatch.setattr(checking, "_compile", compile_noted)
    checking._RAN.clear()
    with shared_in(str(tmp_path)), checking.compile_in_turn(turn):
        MatmulProblem(16, 24, 8).inputs(0)
    assert turns == ["one"], "for both operands"
    assert compiled_within == [False, False]


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (MATMUL, MatmulProblem(24, 40, 56, bias="float32")),
        (SOFTMAX, SoftmaxProblem(24, 33)),
        (FLASH_ATTENTION, FORWARD),
    ],
    ids=str,
)
def test_what_one_process_prepares_another_only_loads(tmp_path, compilations, operation, problem):
    with measurements(), shared_in(str(tmp_path)):
        for part in range(PARTS):
            prepare(problem, jax.devices("cpu")[0], part)
        made = len(compilations)
        assert made >= 4, "operands, the reference, what compares, what is written over"
        checking._RAN.clear()
        bench = Bench(operation, problem, CPU)
        assert isinstance(bench.measure("xla", {}, 2), Measurement)
        for kind in problem.special():
            problem.special_inputs(kind, 1)
    assert len(compilations) == made


def test_to_prepare_runs_nothing_and_passes_over_operands_that_other_code_draws(tmp_path, compilations):
    @dataclasses.dataclass(frozen=True)
    class Drawn(DoubleProblem):
        def inputs(self, seed):
            return (jnp.asarray(np.random.default_rng(seed).normal(size=self.n), jnp.float32).block_until_ready(),)

        def special(self):
            return ()

    with shared_in(str(tmp_path)):
        for part in range(PARTS):
            prepare(Drawn(8), jax.devices("cpu")[0], part)
    assert len(compilations) >= 3, "the reference, what compares, what is written over"


def test_a_copy_is_an_array_of_its_own(tmp_path):
    x = jnp.arange(64.0)
    for directory in ("", str(tmp_path)):
        with shared_in(directory):
            (copy,) = buffers.copying([x])([x])
        assert copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
        assert jnp.array_equal(copy, x)
