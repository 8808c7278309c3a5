"""The settings of JAX that code of this package is traced and run under, whatever the caller's settings are.

JAX keeps the settings of a context by thread, so each thread that traces or runs enters a context itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def formulas() -> Iterator[None]:
    """Within this context, formulas and kernels are traced as part of a caller's program.

    Ranks and dtypes of their arrays promote, and their constants may be transferred. The settings that decide what the
    caller's program means stay the caller's: `jax_default_matmul_precision`, `jax_enable_x64`, and the debugging modes.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.transfer_guard("allow"):
        yield


@contextlib.contextmanager
def comparisons() -> Iterator[None]:
    """Within this context, functions of a user are compiled, run, compared and timed.

    JAX looks for no NaN or infinity, compiles what is jitted, and moves results to the host. What JAX traces functions
    under stays the user's: what the user compiled before is not compiled again.
    """
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.no_tracing(False),
        jax.transfer_guard("allow"),
    ):
        yield


@contextlib.contextmanager
def measurements() -> Iterator[None]:
    """Within this context, programs of a search run: operands, references, candidates, their comparison and timing.

    They meet NaN on purpose, and are the same programs on the same operands under all of the caller's settings but
    `jax_enable_x64` and `jax_default_matmul_precision`.
    """
    with (
        formulas(),
        comparisons(),
        jax.check_tracer_leaks(False),
        jax.enable_checks(False),
        jax.debug_key_reuse(False),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield
