"""Row programs of random functions: NaN, infinities, signs and integers are those of `jax.jit` of the function."""

import random_rows


def test_random_row_programs_compute_what_the_function_does():
    """The long run is ``python -m tests.hostile row-programs row-kernels row-gradients``."""
    tried = [*random_rows.in_batches(0, 190), *random_rows.in_batches(190, 10, kernels=True)]
    assert len(tried) == 200
    assert not [f"{seed}: {reason}" for seed, reason in tried if reason]


def test_random_backward_passes_compute_what_jax_does():
    assert not [reason for seed in range(12) if (reason := random_rows.wrong_gradients(10 * seed))]
