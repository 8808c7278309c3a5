"""Programs that only check kernels: who compiles them, and who loads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from search_spaces import reference_programs
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
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
