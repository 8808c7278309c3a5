"""JAX settings under which this package traces and runs code, independent of the caller's settings.

JAX keeps the settings of a context per thread, so each thread that traces or runs must enter a context itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def formulas() -> Iterator[None]:
    """Context in which formulas and kernels are traced as part of a caller's program.

    Ranks and dtypes of arrays promote, and constants may be transferred. Settings that decide what the caller's program
    means keep the caller's values: `jax_default_matmul_precision`, `jax_enable_x64`, and the debugging modes.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), jax.transfer_guard("allow"):
        yield


@contextlib.contextmanager
def comparisons() -> Iterator[None]:
    """Context in which functions of a user are compiled, run, compared and timed.

    JAX does not check for NaN or infinity, compiles jitted functions, and may move results to the host. Settings that
    affect tracing keep the user's values, so that what the user compiled before is not compiled again.
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
    """Context in which the programs of a search run: operands, references, candidates, their comparison and timing.

    Some of these programs produce NaN on purpose. They are the same programs on the same operands under all of the
    caller's settings except `jax_enable_x64` and `jax_default_matmul_precision`.
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


# ------------------------------------------------------------------------------
# Pallas interpreters of whole kernels on a CPU: a kernel runs there, slowly, without its chip.


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Context in which kernels for TPUs are interpreted when traced; uninitialized memory is NaN."""
    from jax.experimental.pallas import tpu as pltpu  # takes 60 ms, and only workers interpret

    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # an interpreter that raised leaves its memory behind
