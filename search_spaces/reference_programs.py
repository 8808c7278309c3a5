"""Programs that only check kernels: compiled without autotuning, and once for all processes that share a directory."""

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
    """Within it, what one process has compiled, the others that share `directory` load; "" shares nothing.

    They are of one version of JAX and have devices of one kind, and nobody else can write there.
    """
    token = _DIRECTORY.set(Path(directory) if directory else None)
    try:
        yield
    finally:
        _DIRECTORY.reset(token)


@contextlib.contextmanager
def in_turns(turn: Turn) -> Iterator[None]:
    """Within it `run` enters a `turn` for each run on the device, which others are timing on, and for nothing else.

    It may be entered within another one.
    """
    token = _TURN.set(turn)
    try:
        yield
    finally:
        _TURN.reset(token)


@contextlib.contextmanager
def compiled_for(device: jax.Device) -> Iterator[None]:
    """Within this context, programs are compiled for a device that need not be here, stored, and not run.

    Results of `run` are then arrays without content (`jax.ShapeDtypeStruct`).
    """
    token = _ELSEWHERE.set(jax.sharding.SingleDeviceSharding(device))
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def turn() -> contextlib.AbstractContextManager[None]:
    """One for several runs, of programs that are compiled."""
    return _TURN.get()()


def run(function: Any, *args: jax.Array, **statics: Any) -> Any:
    """`function` of these, jitted and with `statics` by name, once it is ready: so operands are drawn."""
    run = program(function, *args, **statics)
    if _ELSEWHERE.get() is not None:
        return jax.eval_shape(functools.partial(function, **statics), *args)
    with turn():
        return jax.block_until_ready(run(*args))


def program(function: Any, *args: Any, **statics: Any) -> Program:
    """`function`, jitted and with `statics` by name, for such arrays as `args`.

    In a process that shares programs it is compiled when this returns, and is one of them: by the function's name, so
    that it is traced and lowered, which takes longer than to load it, by the process that compiles it alone.
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
    """An argument of a program that is compiled for another device."""
    if not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_ELSEWHERE.get())


def _shape_of(x: Any) -> Any:
    """What a program is compiled for of an argument: an array, a number or None."""
    return (x.shape, str(x.dtype)) if hasattr(x, "dtype") else type(x).__name__


def compiled(function: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """`function` for such operands. XLA takes the first algorithm that is right: it tries none on a GPU.

    The gradients of attention in float32 take XLA 5 s on an H200's host, and loading takes a hundredth.
    """
    traced = jax.jit(function).trace(*(operands if _ELSEWHERE.get() is None else map(_placed, operands)))
    if _DIRECTORY.get() is None:
        return _compile(traced.lower())
    return _shared(f"{digest(traced.jaxpr)} {tuple(map(_shape_of, operands))}", traced.lower)


def _shared(name: str, lower: Callable[[], Any]) -> Program:
    """The program of that name: of what `lower` returns, where no process has compiled it."""
    directory = _DIRECTORY.get()
    assert directory is not None
    path = directory / hashlib.sha256(name.encode()).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)  # who comes second waits for the first, and then loads
        if not path.exists():
            program = _compile(lower())
            # Not every backend of XLA can: then each process compiles for itself.
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
