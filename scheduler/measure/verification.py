"""Compares results with their reference, each in its own dtype, and describes the errors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.configuration import measurements
from search_spaces.problem import Problem, Tolerance
from search_spaces.space import DeclarationError

# Results with more elements than `MOST_COMPARED` (512 MiB of float32) are compared in that many elements only, in at
# most `MOST_ROWS` rows.
MOST_COMPARED = 2**27
MOST_ROWS = 2**20
# With fewer than this many elements, the largest may be small by accident. The scale is then multiplied by this number
# over the number of elements.
FEW = 8
# Factor of the change in the results when the operands are rounded differently.
SENSITIVITY = 8.0

# What a NaN probably is if neither the operands nor the reference have one.
UNWRITTEN = " (as where nothing was written)"

Rows = npt.NDArray[np.int32]


def compared_rows(problem: Problem) -> Rows | None:
    """Selects the rows of the results that are compared with the reference, in ascending order; None selects all.

    The rows are split into runs of equal length, and one row is drawn at random from each run. A tile with at least as
    many rows as a run is therefore checked in each of its columns. The first and the last row are always selected.
    """
    shapes, axes = [s.shape for s in problem.results()], problem.row_axes
    size = sum(map(math.prod, shapes))
    if size <= MOST_COMPARED or any(len(shape) < -axis for shape, axis in zip(shapes, axes, strict=True)):
        return None
    rows = shapes[0][axes[0]]
    count = min(max(2, MOST_COMPARED // (size // rows)), MOST_ROWS)
    if count >= rows:
        return None
    edges = np.linspace(0, rows, count + 1).astype(np.int32)
    drawn = np.random.default_rng(0).integers(edges[:-1], edges[1:]).astype(np.int32)
    drawn[0], drawn[-1] = 0, rows - 1
    return None if problem.at_rows(drawn) is None else drawn


def compared_elements(problem: Problem) -> int:
    """Returns how many elements of the results are compared with the reference."""
    rows = compared_rows(problem)
    count = 0
    for s, axis in zip(problem.results(), problem.row_axes, strict=True):
        size = math.prod(s.shape)
        count += size if rows is None else size // s.shape[axis] * len(rows)
    return count


def identical(was: jax.Array, now: jax.Array) -> bool:
    """Returns whether two arrays have the same elements; NaN equals NaN."""
    return bool(jnp.array_equal(was, now, equal_nan=jnp.issubdtype(was.dtype, jnp.inexact)))


@measurements()
def rounded_differently(x: Any, seed: int) -> Any:
    """Moves each element of an inexact array up or down by one unit in the last place, or not at all, at random."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return _rounded_differently(x, seed)


@jax.jit
def _rounded_differently(x: jax.Array, seed: int) -> jax.Array:
    step = jax.random.randint(jax.random.key(seed), x.shape, -1, 2)
    return x * (1 + step * float(jnp.finfo(x.dtype).eps))  # a Python float keeps weak types


def special_tolerance(problem: Problem, kind: str, own: Tolerance | tuple[Tolerance, ...]) -> tuple[Tolerance, ...]:
    """Returns the problem's tolerance for special operands, scaled like the kernel's own for typical operands.

    The factor is the ratio of the kernel's tolerance to the problem's usual tolerance, and at least 1.
    """
    each = zip(problem.special_tolerance(kind), *map(problem.for_each, (problem.tolerance(), own)), strict=True)
    return tuple(special.wider(mine.times(one)) for special, one, mine in each)


def with_rounding_of_operands(tolerance: Tolerance, expected: jax.Array, expected_when_rounded: jax.Array) -> Tolerance:
    """Returns a tolerance that also allows `SENSITIVITY` times the change of a result when operands are rounded.

    Correct kernels with another order of sums differ by this much: the normalized elements of a row with a mean of
    10,000 and a standard deviation of 0.1 have two correct digits in float32.

    Args:
      expected_when_rounded: the reference on operands rounded differently.
    """
    largest, change = map(float, _largest_and_change(expected, expected_when_rounded))
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return dataclasses.replace(tolerance, absolute=tolerance.absolute + SENSITIVITY * change)
    scale = min(max(largest * max(1.0, FEW / max(1, expected.size)), tolerance.scale[0]), tolerance.scale[1])
    return Tolerance(tolerance.absolute * scale + SENSITIVITY * change, tolerance.relative)


@jax.jit
def _largest_and_change(expected: jax.Array, rounded: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = expected.dtype if jnp.issubdtype(expected.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    wide = wide if wide.itemsize >= 4 else jnp.dtype(jnp.float32)
    expected, rounded = expected.astype(wide), rounded.astype(wide)
    both = jnp.isfinite(expected) & jnp.isfinite(rounded)
    size, change = (jnp.where(both, jnp.abs(x), 0) for x in (expected, rounded - expected))
    return jnp.max(size, initial=0), jnp.max(change, initial=0)


def has_stray_nan(
    problem: Problem, actual: Sequence[jax.Array], expected: Sequence[jax.Array], rows: Rows | None
) -> bool:
    """Returns whether a result has a NaN in a row in which the reference has neither a NaN nor an infinity.

    A column that is not finite in every row, as of a vector that all rows share, makes no row count as one with a NaN.
    If a result has fewer axes than an operand, each of its elements is a row.
    """
    most_axes = max(len(s.shape) for s in problem.operands())
    for got, right, axis in zip(actual, expected, problem.row_axes, strict=True):
        if not jnp.issubdtype(got.dtype, jnp.inexact) or not right.size:
            continue
        got = got if rows is None else jnp.take(got, rows, axis=axis)
        columns = right.shape[-1] if right.ndim and right.ndim == most_axes else 1
        special = ~jnp.isfinite(right.astype(got.dtype)).reshape(-1, columns)
        stray = jnp.isnan(got).reshape(-1, columns) & ~special
        shared = special.all(axis=0) if len(special) > 1 else jnp.zeros(columns, bool)
        if bool((stray & ~(special & ~shared).any(axis=1, keepdims=True)).any()):
            return True
    return False


def comparisons(
    problem: Problem, expected: Sequence[jax.Array | jax.ShapeDtypeStruct], rows: Rows | None = None
) -> tuple[Any, ...]:
    """Returns the programs that `mismatch` runs on each result, compiled if processes share programs.

    Args:
      expected: only the shapes and dtypes are used.
    """
    return tuple(
        checking.program_of(_compare, actual, right, rows, *_allowed(Tolerance(0.0, 0.0)), axis=axis)
        for actual, right, axis in zip(problem.results(), expected, problem.row_axes, strict=True)
    )


def mismatches(
    problem: Problem,
    actual: Sequence[jax.Array],
    expected: Sequence[jax.Array],
    tolerance: Tolerance | tuple[Tolerance, ...],
    rows: Rows | None = None,
    compare: Sequence[Any] | None = None,
) -> str | None:
    """Returns the message of `mismatch` for the first wrong result, or None if all results are correct.

    With several results, the message includes the number of the wrong one.

    Args:
      tolerance: one for each result, or one for all.
    """
    return start_comparison(problem, actual, expected, tolerance, rows, compare)()


def start_comparison(
    problem: Problem,
    actual: Sequence[jax.Array],
    expected: Sequence[jax.Array],
    tolerance: Tolerance | tuple[Tolerance, ...],
    rows: Rows | None = None,
    compare: Sequence[Any] | None = None,
) -> Callable[[], str | None]:
    """Starts the comparison that `mismatches` makes, and returns a function that waits for its result.

    The device thus compares several results while the host reads the result of the first comparison.
    """
    allowed = problem.for_each(tolerance)
    compiled = compare or (None,) * len(expected)
    each = zip(actual, expected, allowed, compiled, problem.row_axes, strict=True)
    started = [_started(got, right, within, rows, run, axis) for got, right, within, run, axis in each]

    def finish() -> str | None:
        for number, ended in enumerate(started):
            if wrong := ended():
                return wrong if len(started) == 1 else f"of result {number}, {wrong}"
        return None

    return finish


def mismatch(
    actual: jax.Array,
    expected: jax.Array,
    tolerance: Tolerance,
    rows: Rows | None = None,
    compare: Callable[..., Any] | None = None,
    *,
    axis: int = -2,
) -> str | None:
    """Returns None if `actual` is within `tolerance` of `expected`, else a description of the worst element.

    Floating-point and complex numbers are compared in float32, or in the dtype of either array if that is wider. The
    tolerance of a complex number follows from its modulus, and applies to both of its parts. Integers and booleans are
    compared as such. NaN is correct only where `expected` is NaN. An infinity is correct where `expected` is the same
    infinity, or where `expected` exceeds the range of the dtype of `actual`. Values that a chip may flush to zero may
    be zero: those below the smallest normal number of float32, or of float64 if the comparison is in float64.

    Args:
      actual: the result, of any dtype.
      expected: the reference, of the same shape. With `rows`, it contains those rows only. The other rows are only
        checked for being written, and only if the reference contains no NaN.
      rows: indices along `axis`.
      compare: one of `comparisons`, if compiled before.
      axis: counted from the end.

    Raises:
      DeclarationError: `actual` has an integer or boolean dtype, and `expected` another dtype.
    """
    return _started(actual, expected, tolerance, rows, compare, axis)()


def _started(
    actual: jax.Array,
    expected: jax.Array,
    tolerance: Tolerance,
    rows: Rows | None,
    compare: Callable[..., Any] | None,
    axis: int,
) -> Callable[[], str | None]:
    """Starts the comparison of one result; see `start_comparison`."""
    extents = list(actual.shape)
    if rows is not None:
        extents[axis] = len(rows)
    if (wanted := tuple(extents)) != expected.shape:
        different = f"the shape is {wanted} instead of {expected.shape}"
        return lambda: different
    run = compare or functools.partial(_compare, axis=axis)
    off, *found = run(actual, expected, rows, *_allowed(tolerance))
    return lambda: _description(actual, expected, rows, axis, found) if int(off) else None


def _description(
    actual: jax.Array, expected: jax.Array, rows: Rows | None, axis: int, found: Sequence[jax.Array]
) -> str:
    """Describes the error of a result, from the values that `_compare` returns after the first."""
    wrong, worst, got, right, allowed, unwritten = found
    if int(wrong):
        index = [int(i) for i in np.unravel_index(int(worst), expected.shape)]
        if rows is not None:
            index[axis] = int(rows[index[axis]])
        nothing = UNWRITTEN if np.isnan(got) and not np.isnan(right) else ""
        actual_text, instead = _number_texts(np.asarray(got).item(), np.asarray(right).item())
        return (
            f"{int(wrong)} of {expected.size} elements are off; the worst, at {tuple(index)}, is {actual_text}"
            f"{nothing} instead of {instead} (allowed: {float(allowed):.2g})"
        )
    return f"{int(unwritten)} of {actual.shape[axis]} rows hold elements that are NaN, as where nothing was written"


def _allowed(tolerance: Tolerance) -> tuple[float, float, float, float]:
    """Converts a tolerance to the arguments of `_compare`."""
    return tolerance.absolute, tolerance.relative, *tolerance.scale


def _number_texts(*numbers: complex) -> tuple[str, ...]:
    """Formats numbers, with enough digits to distinguish them; integers and booleans in full."""
    if any(isinstance(number, int) for number in numbers):
        return tuple(map(str, numbers))
    digits = next((n for n in (6, 9, 17) if len({f"{number:.{n}g}" for number in numbers}) == len(numbers)), 6)
    return tuple(f"{number:.{digits}g}" for number in numbers)


@functools.partial(jax.jit, static_argnames="axis")
def _compare(
    actual: jax.Array,
    expected: jax.Array,
    rows: jax.Array | None,
    absolute: float,
    relative: float,
    least: float,
    most: float,
    *,
    axis: int,
) -> tuple[jax.Array, ...]:
    """Returns the number of errors, which is all that is read of a correct result, and what describes them."""
    compared = (actual if rows is None else jnp.take(actual, rows, axis=axis)).ravel()
    right = expected.ravel()
    if not jnp.issubdtype(actual.dtype, jnp.inexact):
        if actual.dtype != expected.dtype:
            raise DeclarationError(
                f"the reference is {expected.dtype}, but the result is {actual.dtype}: integers and bools are compared "
                "exactly, so the reference must return the same dtype"
            )
        wrong, excess, got, wanted, allowed = _integers(compared, right, absolute, relative)
        worst, count = jnp.argmax(excess), wrong.sum()
        return count, count, worst, got(worst), wanted(worst), allowed(worst), jnp.int32(0)
    wrong, excess, got, wanted, allowed = _numbers(compared, right, absolute, relative, least, most)
    worst, count = jnp.argmax(excess), wrong.sum()
    unwritten = jnp.int32(0)
    if rows is not None:
        axes = tuple(other for other in range(actual.ndim) if other != actual.ndim + axis)
        unwritten = jnp.where(jnp.isnan(right).any(), 0, jnp.isnan(actual).any(axis=axes).sum())
    return count + unwritten, count, worst, got(worst), wanted(worst), allowed(worst), unwritten


# The wrong elements, their excess, and three functions of an index: the actual value, the expected value and the
# tolerance. They are functions because only one element is needed, so no full arrays are kept.
_Compared = tuple[jax.Array, jax.Array, Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]


def _integers(compared: jax.Array, right: jax.Array, absolute: float, relative: float) -> _Compared:
    signed, wide = jnp.issubdtype(compared.dtype, jnp.signedinteger), _is_wide(compared.dtype)
    kept, size = (jnp.int64, jnp.uint64) if wide else (jnp.int32, jnp.uint32)
    dtype, real = kept if signed else size, jnp.float64 if wide else jnp.float32

    def allowed(wanted: jax.Array) -> jax.Array:
        return jnp.asarray(absolute, real) + jnp.asarray(relative, real) * jnp.abs(wanted.astype(real))

    got, wanted = compared.astype(dtype), right.astype(dtype)
    # The difference of two integers may overflow their dtype, but never the unsigned dtype of the same width.
    distance = lax.bitcast_convert_type(jnp.where(got > wanted, got - wanted, wanted - got), size).astype(real)
    excess = distance - allowed(wanted)
    wrong = excess > 0
    return (
        wrong,
        jnp.where(wrong, excess, jnp.asarray(-1, real)),
        lambda at: compared[at] if compared.dtype == jnp.bool_ else compared[at].astype(dtype),
        lambda at: right[at] if right.dtype == jnp.bool_ else right[at].astype(dtype),
        lambda at: allowed(right[at].astype(dtype)),
    )


def _numbers(
    compared: jax.Array, right: jax.Array, absolute: float, relative: float, least: float, most: float
) -> _Compared:
    wide = any(_is_wide(x.dtype) for x in (compared, right))
    real = jnp.dtype(jnp.float64 if wide else jnp.float32)
    is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in (compared, right))
    dtype = jnp.dtype(jnp.complex128 if wide else jnp.complex64) if is_complex else real
    own = jnp.finfo(compared.dtype)
    flushed = max(float(own.smallest_subnormal), float(jnp.finfo(real).tiny))
    beside, share, at_least, at_most = (jnp.asarray(x, real) for x in (absolute, relative, least, most))
    got, wanted = compared.astype(dtype), right.astype(dtype)
    size = jnp.abs(wanted)
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, jnp.asarray(0, real)), initial=0)
    scale = jnp.clip(largest * max(1.0, FEW / max(1, right.size)), at_least, at_most)
    # The scaled tolerance is limited to a quarter of the largest element, whatever the dtype's eps.
    base = jnp.where(at_least > 0, beside * scale, jnp.minimum(beside * scale, largest / 4)) + flushed

    def allowed(size: jax.Array) -> jax.Array:
        return base + share * size

    def near(got: jax.Array, wanted: jax.Array) -> jax.Array:
        """Compares real numbers, or one part of complex numbers, with the tolerance of the complex number."""
        within = jnp.isfinite(got) & jnp.isfinite(wanted) & (jnp.abs(got - wanted) <= allowed(size))
        # A value outside the range of the result's dtype becomes infinity; a dtype without infinity gives NaN or its
        # largest number. The range is tested by a limit, because XLA drops a conversion to a narrower dtype and back
        # (xla_allow_excess_precision).
        exceeds = jnp.isfinite(wanted) & (
            jnp.abs(wanted) + allowed(size) >= jnp.asarray(_overflows_at(own, real), real)
        )
        if _has_infinity(_part(compared.dtype)):
            held = got == jnp.copysign(jnp.asarray(jnp.inf, real), wanted)
        else:
            held = jnp.isnan(got) | (got == jnp.copysign(float(own.max), wanted))
        return (got == wanted) | within | (exceeds & held)

    fits = near(got.real, wanted.real) & near(got.imag, wanted.imag) if is_complex else near(got, wanted)
    wrong = ~(fits | (jnp.isnan(got) & jnp.isnan(wanted)))
    # NaN gets an infinite excess, so that it is reported first.
    excess = jnp.nan_to_num(jnp.abs(got - wanted) - allowed(size), nan=jnp.inf)
    return (
        wrong,
        jnp.where(wrong, excess, jnp.asarray(-jnp.inf, real)),
        lambda at: compared[at].astype(dtype if jnp.issubdtype(compared.dtype, jnp.complexfloating) else real),
        lambda at: right[at].astype(dtype if jnp.issubdtype(right.dtype, jnp.complexfloating) else real),
        lambda at: allowed(jnp.abs(right[at].astype(dtype))),
    )


def _part(dtype: Any) -> Any:
    """Returns the dtype of the parts of complex numbers, or the dtype itself if it is real."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _overflows_at(info: Any, real: Any) -> float:
    """Returns the least number that rounds beyond the largest of a dtype; infinity if `real` cannot hold it."""
    largest = float(info.max)
    least = largest + float(info.eps) * math.ldexp(1.0, math.frexp(largest)[1] - 2)
    return least if least <= float(jnp.finfo(real).max) else math.inf


def _has_infinity(dtype: Any) -> bool:
    return bool(np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float64)))


def _is_wide(dtype: Any) -> bool:
    """Returns whether numbers of this dtype, or their parts, have 64 bits."""
    return bool(jnp.dtype(_part(dtype)).itemsize == 8)
