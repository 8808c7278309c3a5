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
from typing import Any, TypeVar

import jax
from jax.experimental import serialize_executable

Program = Callable[..., Any]

Turn = Callable[[], contextlib.AbstractContextManager[None]]

_DIRECTORY: ContextVar[Path | None] = ContextVar("directory", default=None)
_TURN: ContextVar[Turn] = ContextVar("turn", default=contextlib.nullcontext)
_WAITS: ContextVar[bool] = ContextVar("waits", default=True)
_RAN: dict[Any, Program] = {}

T = TypeVar("T")


class _Busy(BaseException):
    """Another process is compiling this program now."""


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


def turn() -> contextlib.AbstractContextManager[None]:
    """One for several runs, of programs that are compiled."""
    return _TURN.get()()


def run(function: Any, *args: jax.Array, **statics: Any) -> Any:
    """`function` of these, jitted and with `statics` by name, once it is ready: so operands are drawn."""
    run = program(function, *args, **statics)
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
    if which not in _RAN:
        name = f"{function.__module__}.{function.__qualname__} {which[1:]}"
        _RAN[which] = _shared(name, lambda: function.lower(*args, **statics))
    return _RAN[which]


def _shape_of(x: Any) -> Any:
    """What a program is compiled for of an argument: an array, a number or None."""
    return (x.shape, str(x.dtype)) if hasattr(x, "dtype") else type(x).__name__


def together(wanted: Sequence[Callable[[], Any]], meanwhile: Callable[[], T]) -> tuple[list[Any], T]:
    """What each of `wanted` makes by `compiled` or `program`, and what `meanwhile` returns.

    Processes that come here at the same time compile a program each: what another one is at is passed over, and waited
    for when all else is done, `meanwhile` too.
    """
    made: dict[int, Any] = {}
    token = _WAITS.set(False)
    try:
        for number, make in enumerate(wanted):
            with contextlib.suppress(_Busy):
                made[number] = make()
    finally:
        _WAITS.reset(token)
    result = meanwhile()
    return [made[number] if number in made else make() for number, make in enumerate(wanted)], result


def compiled(lowered: Any) -> Program:
    """The program of a `jax.stages.Lowered`. XLA takes the first algorithm that is right: it tries none on a GPU.

    The gradients of attention in float32 take XLA 5 s on an H200's host; 15 workers that compile them beside each other
    took 9 to 13 s, and loading takes a hundredth.
    """
    if _DIRECTORY.get() is None:
        return _compile(lowered)
    return _shared(lowered.as_text(), lambda: lowered)


def _shared(name: str, lower: Callable[[], Any]) -> Program:
    """The program of that name: of what `lower` returns, where no process has compiled it."""
    directory = _DIRECTORY.get()
    assert directory is not None
    path = directory / hashlib.sha256(name.encode()).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        _lock(lock.fileno())  # who comes second waits for the first, and then loads
        if not path.exists():
            program = _compile(lower())
            # Not every backend of XLA can: then each process compiles for itself.
            with contextlib.suppress(Exception):
                written = path.with_suffix(".part")
                written.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
                os.replace(written, path)
            return program
    try:
        stored, in_tree, out_tree = pickle.loads(path.read_bytes())
        here = jax.local_devices()[:1]
        return serialize_executable.deserialize_and_load(stored, in_tree, out_tree, execution_devices=here)
    except Exception:
        return _compile(lower())


def _lock(file: int) -> None:
    """Raises `_Busy` where another process has it, and that is not to be waited for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if _WAITS.get() else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _Busy from None


def _compile(lowered: Any) -> Any:
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return lowered.compile(compiler_options=options)
