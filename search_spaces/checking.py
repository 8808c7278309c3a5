"""What checks kernels: reference programs, and operands with special values."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable

from search_spaces.fingerprint import digest

# ------------------------------------------------------------------------------
# Programs that only check kernels: compiled without autotuning, once for all processes that share a directory.

Program = Callable[..., Any]

Turn = Callable[[], contextlib.AbstractContextManager[None]]

_DIRECTORY: ContextVar[Path | None] = ContextVar("directory", default=None)
_TURN: ContextVar[Turn] = ContextVar("turn", default=contextlib.nullcontext)
_ELSEWHERE: ContextVar[jax.sharding.Sharding | None] = ContextVar("elsewhere", default=None)
_RAN: dict[Any, Program] = {}


@contextlib.contextmanager
def shared_in(directory: str) -> Iterator[None]:
    """Context in which programs compiled by one process are loaded by others that share `directory`.

    "" disables sharing. The processes use the same version of JAX and the same kind of device. Only they can write to
    the directory.
    """
    token = _DIRECTORY.set(Path(directory) if directory else None)
    try:
        yield
    finally:
        _DIRECTORY.reset(token)


@contextlib.contextmanager
def compile_in_turn(turn: Turn) -> Iterator[None]:
    """Context in which `run` enters a `turn` for each run on a device that others use for timing, and for nothing else.

    It may be entered within another one.
    """
    token = _TURN.set(turn)
    try:
        yield
    finally:
        _TURN.reset(token)


@contextlib.contextmanager
def program_compiled_for(device: jax.Device) -> Iterator[None]:
    """Context in which programs are compiled and stored for a device that need not be present, and are not run.

    Results of `run` are then arrays without content (`jax.ShapeDtypeStruct`).
    """
    token = _ELSEWHERE.set(jax.sharding.SingleDeviceSharding(device))
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def compile_turn() -> contextlib.AbstractContextManager[None]:
    """Returns one turn for several runs of compiled programs."""
    return _TURN.get()()


def run_program(function: Any, *args: jax.Array, **statics: Any) -> Any:
    """Runs `function`, jitted with `statics` by name, and waits for the result; used to draw operands."""
    run = program_of(function, *args, **statics)
    if _ELSEWHERE.get() is not None:
        return jax.eval_shape(functools.partial(function, **statics), *args)
    with compile_turn():
        return jax.block_until_ready(run(*args))


def program_of(function: Any, *args: Any, **statics: Any) -> Program:
    """Returns `function`, jitted with `statics` by name, for arguments with the shapes of `args`.

    In a process that shares programs, the returned program is already compiled and shared by the function's name. So
    only the process that compiles it traces and lowers it, which takes longer than loading it.
    """
    if _DIRECTORY.get() is None:
        return functools.partial(function, **statics)
    which = function, tuple(map(_shape_of, args)), tuple(sorted(statics.items()))
    name = f"{function.__module__}.{function.__qualname__} {which[1:]}"
    if _ELSEWHERE.get() is not None:
        return _shared(name, lambda: function.lower(*map(_placed, args), **statics))
    if which not in _RAN:
        _RAN[which] = _shared(name, lambda: function.lower(*args, **statics))
    return _RAN[which]


def _placed(x: Any) -> Any:
    """Returns an argument of a program that is compiled for another device."""
    if not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_ELSEWHERE.get())


def _shape_of(x: Any) -> Any:
    """Returns the properties of an argument for which a program is compiled: an array, a number or None."""
    return (x.shape, str(x.dtype)) if hasattr(x, "dtype") else type(x).__name__


def compiled_program(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Compiles `function` for operands of these shapes. On a GPU, XLA takes the first correct algorithm and tries none.

    On an H200's host, XLA takes 5 s for the gradients of attention in float32; loading takes a hundredth of that.
    """
    traced = jax.jit(function).trace(*(operands if _ELSEWHERE.get() is None else map(_placed, operands)))
    if _DIRECTORY.get() is None:
        return _compile(traced.lower())
    return _shared(f"{digest(traced.jaxpr)} {tuple(map(_shape_of, operands))}", traced.lower)


def _shared(name: str, lower: Callable[[], Any]) -> Program:
    """Returns the program of that name: loaded, or compiled from the result of `lower` if no process has done so."""
    directory = _DIRECTORY.get()
    assert directory is not None
    path = directory / hashlib.sha256(name.encode()).hexdigest()
    try:
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below)
    except OSError:  # the directory is full, or was removed: each process compiles for itself
        return _compile(lower()) if _ELSEWHERE.get() is None else _not_here
    with lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)  # a second process waits for the first, and then loads
        if not path.exists():
            program = _compile(lower())
            # Not every backend of XLA can serialize programs: then each process compiles for itself.
            with contextlib.suppress(Exception):
                written = path.with_suffix(".part")
                written.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
                os.replace(written, path)
            return program
    if _ELSEWHERE.get() is not None:
        return _not_here
    try:
        stored, in_tree, out_tree = pickle.loads(path.read_bytes())
        here = jax.local_devices()[:1]
        return serialize_executable.deserialize_and_load(stored, in_tree, out_tree, execution_devices=here)
    except Exception:
        return _compile(lower())


def _not_here(*args: Any) -> Any:
    raise RuntimeError("this program was compiled for a device that is not here")


def _compile(lowered: Any) -> Any:
    elsewhere = _ELSEWHERE.get()
    devices: list[Any] = list(elsewhere.device_set) if elsewhere is not None else jax.devices()
    # A reference keeps each rounding: by default XLA drops a conversion to a narrower dtype and back.
    options = {"xla_allow_excess_precision": False} | without_autotuning(devices[0].platform)
    return lowered.compile(compiler_options=options)


def without_autotuning(platform: str) -> dict[str, Any]:
    """Returns compiler options for a program that only checks: on a GPU, XLA takes the first correct algorithm."""
    return {"xla_gpu_autotune_level": 0} if platform in ("gpu", "cuda") else {}


def widened(x: jax.Array) -> jax.Array:
    """Converts an operand of a reference to float32; of 8-bit floats by a table, which XLA sees as no conversion.

    XLA may multiply operands that it sees to be converted from float8 in float8 (jax 0.11.2, H200, k of 65,536).
    """
    if x.dtype.itemsize > 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float32)
    table = np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float32)
    return jnp.asarray(table)[lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)]


# ------------------------------------------------------------------------------
# Operands with values that typical ones lack: magnitudes, ties, NaN, infinities, and the extremes of integers.

# The changes to typical operands. Floating-point numbers: up to 2^20 times as large (as far as the dtype holds their
# squares), or 2^30 times as small, with zeros of both signs; small multiples of 1/2 with rows of equal elements and of
# zeros; one NaN in every fourth row; one infinity in every fourth row, and every eighth row all infinite; a mean of
# 5,700 of the first operand and of those of its shape, so that their differences cancel, with a standard deviation of
# 0.1, or of `COARSE` units in the last place if that is more. Integers: the extremes of their dtype; -1, 0 and 1; small
# ones. Complex numbers have no infinities, because there are several definitions of their products.
FINITE = ("large", "tiny", "halves")
VALUE_KINDS = (*FINITE, "nan", "inf", "-inf", "offset")

# Kinds for which a correct kernel may differ: another order of sums gives other overflows and other infinities.
DISPUTED = frozenset({"large", "nan", "inf", "-inf"})

# Kinds for products: without "offset", with which all of their terms are alike and none cancel.
PRODUCT_KINDS = VALUE_KINDS[:-1]

LARGE, TINY = 20, 30
COARSE = 16


def kinds_of(dtypes: Sequence[Any]) -> tuple[str, ...]:
    """Returns the kinds that change operands of these dtypes."""
    if any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return VALUE_KINDS
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return (*FINITE, "nan", "offset")
    return FINITE if any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes) else ()


def with_special_values(operands: Sequence[jax.Array], kind: str, *, integers: bool = True) -> tuple[jax.Array, ...]:
    """Changes typical operands to special ones of this kind.

    Args:
      kind: one of `VALUE_KINDS`.
      integers: whether integers are changed, too: they may be lengths or indices.
    """
    made = [*operands]
    for number, first, in_offset in changed(operands, integers=integers):
        if kind != "offset" or in_offset:
            how = jnp.int32(VALUE_KINDS.index(kind)), jnp.uint32(number)
            made[number] = run_program(altered, operands[number], *how, first=first)
    return tuple(made)


def changed(operands: Sequence[Any], *, integers: bool) -> Iterator[tuple[int, bool, bool]]:
    """Yields the index of each operand that changes, whether it is the first, and whether it does for "offset"."""
    first = True
    shape = next((x.shape for x in operands if jnp.issubdtype(x.dtype, jnp.inexact)), None)
    for number, x in enumerate(operands):
        floats = jnp.issubdtype(x.dtype, jnp.inexact)
        if floats or (integers and jnp.issubdtype(x.dtype, jnp.integer)):
            # With a mean in both factors of a product, the rounding of its sum would hide everything else.
            yield number, first, x.shape == shape
        # With a NaN in each row of a product's second factor, all results would be NaN.
        first = first and not floats


@functools.partial(jax.jit, static_argnames="first")
def altered(x: jax.Array, kind: jax.Array, number: jax.Array, *, first: bool) -> jax.Array:
    """Changes the operand of this number to special values of this kind.

    Args:
      kind: the index in `VALUE_KINDS`.
      first: whether it is the first operand that changes (`changed`).
    """
    if not x.size:
        return x
    columns = x.shape[-1] if x.ndim else 1
    flat = x.reshape(-1, columns)
    row, column = (lax.broadcasted_iota(jnp.uint32, flat.shape, axis) for axis in (0, 1))
    # Operands differ, or gradients by them would cancel.
    drawn = mixed_bits(row * np.uint32(0x9E3779B9) + column + number * np.uint32(0x85EBCA6B))
    made = _integers if jnp.issubdtype(x.dtype, jnp.integer) else _floats
    return lax.switch(kind, made(flat, row, column, drawn, first)).reshape(x.shape)


def _integers(x: jax.Array, row: jax.Array, column: jax.Array, drawn: jax.Array, first: bool) -> list[Any]:
    info = jnp.iinfo(x.dtype)
    signed = int(info.min) < 0
    extremes = (int(info.min), int(info.max), 0, 1, -1 if signed else int(info.max) - 1)

    def large() -> jax.Array:
        which, result = drawn % np.uint32(8), x
        for number, value in enumerate(extremes):
            result = jnp.where(which == np.uint32(number), jnp.asarray(value, x.dtype), result)
        return result

    def among(least: int, most: int) -> jax.Array:
        least, most = max(least, int(info.min)), min(most, int(info.max))
        return ((drawn % np.uint32(most - least + 1)).astype(jnp.int32) + np.int32(least)).astype(x.dtype)

    return [large, lambda: among(-1, 1), lambda: _with_equal_rows(among(-8, 8), row, 3), *[lambda: x] * 4]


def _floats(x: jax.Array, row: jax.Array, column: jax.Array, drawn: jax.Array, first: bool) -> list[Any]:
    info = jnp.finfo(x.dtype)
    wide = jnp.promote_types(x.dtype, jnp.float32) if info.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    real = jnp.finfo(wide).dtype
    # Squares still fit the dtype, or float32.
    up = min(LARGE, math.floor(math.log2(float(info.max)) / 2))
    down = min(TINY, math.floor(-math.log2(float(info.smallest_subnormal)) / 2))
    values = x.astype(wide)

    def with_zeros(values: jax.Array) -> jax.Array:
        zero = jnp.where(drawn & np.uint32(16), jnp.asarray(-0.0, real), jnp.asarray(0.0, real)).astype(wide)
        return jnp.where(drawn % np.uint32(16) == np.uint32(0), zero, values)

    def large() -> jax.Array:
        power = ((drawn >> np.uint32(8)) % np.uint32(up + 1)).astype(real)
        return with_zeros(values * jnp.exp2(power).astype(wide))

    def tiny() -> jax.Array:
        return with_zeros(values * jnp.asarray(2.0**-down, wide))

    def halves() -> jax.Array:
        half = ((drawn % np.uint32(17)).astype(real) - jnp.asarray(8, real)) * jnp.asarray(0.5, real)
        if jnp.issubdtype(wide, jnp.complexfloating):
            other = ((drawn >> np.uint32(8)) % np.uint32(17)).astype(real) - jnp.asarray(8, real)
            half = lax.complex(half, other * jnp.asarray(0.5, real))
        return with_zeros(_with_equal_rows(half, row, 1.5))

    def holding(value: float) -> jax.Array:
        rows, columns = x.shape
        place = mixed_bits(row + np.uint32(77)) % np.uint32(columns)
        chosen = row % np.uint32(4) == np.uint32(0) if first else row == np.uint32(rows // 3)
        there = chosen & (column == place)
        if first and math.isinf(value):
            there = there | (row % np.uint32(8) == np.uint32(4))
        return jnp.where(there, jnp.asarray(value, wide), values)

    def offset() -> jax.Array:
        mean = jnp.asarray(5.7 * min(1e3, float(info.max) / 32), real)
        deviation = jnp.maximum(jnp.asarray(0.1, real), mean * jnp.asarray(COARSE * float(info.eps), real))
        return mean + jnp.minimum(deviation, mean / 8).astype(wide) * values

    def made(values: jax.Array) -> jax.Array:
        return values.astype(x.dtype)

    return [
        lambda: made(large()),
        lambda: made(tiny()),
        lambda: made(halves()),
        *[lambda value=value: made(holding(value)) for value in (math.nan, math.inf, -math.inf)],
        lambda: made(offset()),
    ]


def _with_equal_rows(values: jax.Array, row: jax.Array, equal: float) -> jax.Array:
    """Sets every eighth row to equal elements, and another eighth to zeros."""
    which = row % np.uint32(8)
    some = jnp.where(which == np.uint32(3), jnp.asarray(equal, values.dtype), values)
    return jnp.where(which == np.uint32(5), jnp.zeros_like(values), some)


def mixed_bits(bits: jax.Array) -> jax.Array:
    """Mixes bits so that each input bit counts (Chris Wellons, "Prospecting for Hash Functions", lowbias32)."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))
