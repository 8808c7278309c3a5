"""Programs that only check kernels: who compiles them, and who loads them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.measure import buffers
from search_spaces import reference_programs
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
from search_spaces.matmul import MatmulProblem
from search_spaces.reference_programs import compiled, shared_in

PROBLEM = FlashAttentionBackwardProblem(1, 32, 24, 2, 1, 16, causal=True, dtype="float32")


@pytest.fixture
def compilations(monkeypatch):
    """What was compiled rather than loaded."""
    made, compile_one = [], reference_programs._compile
    monkeypatch.setattr(reference_programs, "_compile", lambda lowered: made.append(lowered) or compile_one(lowered))
    return made


def lowered(function, *operands):
    return jax.jit(function).lower(*operands)


def test_what_one_has_compiled_the_others_load_and_get_the_same_results(tmp_path, compilations):
    rows = np.arange(0, 32, 3)
    reference = lowered(lambda *args: [x[:, :24][:, rows % 24] for x in PROBLEM.reference(*args)], *PROBLEM.operands())
    inputs = PROBLEM.inputs(0)
    alone = compiled(reference)(*inputs)
    del compilations[:]
    with shared_in(str(tmp_path)):
        results = [compiled(reference)(*inputs) for _ in range(3)]
    assert len(compilations) == 1
    for result in results:
        assert all(jnp.array_equal(one, other) for one, other in zip(result, alone, strict=True))


def test_another_program_is_compiled_and_without_a_directory_each_is(tmp_path, compilations):
    x = jax.ShapeDtypeStruct((8,), "float32")
    with shared_in(str(tmp_path)):
        assert compiled(lowered(jnp.sin, x))(jnp.zeros(8))[0] == 0
        assert compiled(lowered(jnp.cos, x))(jnp.zeros(8))[0] == 1
    for _ in range(2):
        compiled(lowered(jnp.sin, x))
    assert len(compilations) == 4


@pytest.mark.parametrize("content", [b"", b"not a program"])
def test_what_cannot_be_loaded_is_compiled(tmp_path, compilations, content):
    sine = lowered(jnp.sin, jax.ShapeDtypeStruct((8,), "float32"))
    with shared_in(str(tmp_path)):
        compiled(sine)
        (kept,) = (path for path in tmp_path.iterdir() if not path.suffix)
        kept.write_bytes(content)
        assert compiled(sine)(jnp.zeros(8))[0] == 0
    assert len(compilations) == 2


def test_operands_are_drawn_by_programs_that_are_shared_and_are_the_same_without(tmp_path, compilations):
    problem = MatmulProblem(24, 16, 8, bias="bfloat16")
    alone = problem.inputs(3)
    reference_programs._RAN.clear()
    with shared_in(str(tmp_path)):
        first = problem.inputs(3)
        count = len(compilations)
        reference_programs._RAN.clear()  # as another process
        second = problem.inputs(3)
    assert len(compilations) == count == len({x.shape for x in first}) + 1, "one for each operand, one that scales"
    for drawn in (first, second):
        assert all(jnp.array_equal(one, other) for one, other in zip(drawn, alone, strict=True))


def test_programs_run_in_turns_and_are_compiled_outside_of_them(tmp_path, monkeypatch):
    turns, compiled_within = [], []
    compile_one = reference_programs._compile

    def compile_noted(lowered):
        compiled_within.append(bool(turns and turns[-1] == "begin"))
        return compile_one(lowered)

    @contextlib.contextmanager
    def turn():
        turns.append("begin")
        yield
        turns.append("end")

    monkeypatch.setattr(reference_programs, "_compile", compile_noted)
    reference_programs._RAN.clear()
    with shared_in(str(tmp_path)), reference_programs.in_turns(turn):
        MatmulProblem(16, 24, 8).inputs(0)
    assert turns == ["begin", "end"] * 2
    assert compiled_within == [False, False]


def test_a_copy_is_an_array_of_its_own(tmp_path):
    x = jnp.arange(64.0)
    for directory in ("", str(tmp_path)):
        with shared_in(directory):
            (copy,) = buffers.copying([x])()
        assert copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
        assert jnp.array_equal(copy, x)
