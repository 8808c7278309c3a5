"""Programs that only check kernels: compiled without autotuning, once for all processes that share a directory."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from search_spaces.fingerprint import digest

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
def in_turns(turn: Turn) -> Iterator[None]:
    """Context in which `run` enters a `turn` for each run on a device that others use for timing, and for nothing else.

    It may be entered within another one.
    """
    token = _TURN.set(turn)
    try:
        yield
    finally:
        _TURN.reset(token)


@contextlib.contextmanager
def compiled_for(device: jax.Device) -> Iterator[None]:
    """Context in which programs are compiled and stored for a device that need not be present, and are not run.

    Results of `run` are then arrays without content (`jax.ShapeDtypeStruct`).
    """
    token = _ELSEWHERE.set(jax.sharding.SingleDeviceSharding(device))
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def turn() -> contextlib.AbstractContextManager[None]:
    """Returns one turn for several runs of compiled programs."""
    return _TURN.get()()


def run(function: Any, *args: jax.Array, **statics: Any) -> Any:
    """Runs `function`, jitted with `statics` by name, and waits for the result; used to draw operands."""
    run = program(function, *args, **statics)
    if _ELSEWHERE.get() is not None:
        return jax.eval_shape(functools.partial(function, **statics), *args)
    with turn():
        return jax.block_until_ready(run(*args))


def program(function: Any, *args: Any, **statics: Any) -> Program:
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


def compiled(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> Program:
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
    with open(path.with_suffix(".lock"), "w") as lock:
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
    options = {"xla_gpu_autotune_level": 0} if devices[0].platform in ("gpu", "cuda") else None
    return lowered.compile(compiler_options=options)
