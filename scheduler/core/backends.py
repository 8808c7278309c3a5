"""Which backends of an operation a caller allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from search_spaces.operation import Operation


def named_backends(operation: Operation[Any], wanted: str | Sequence[str] | None) -> frozenset[str] | None:
    """The backends that `wanted` names: None for all; "pallas" is all but the libraries', among other names, too.

    Raises:
      TypeError: `wanted` is neither a name nor several.
      ValueError: an unknown backend, or none at all; the message names those there are.
    """
    if wanted is None:
        return None
    pallas = [kernel.backend for kernel in operation.kernels if not (kernel.library or kernel.vendor)]
    others = " and ".join(backend for backend in operation.backends if backend not in pallas)
    known = f'(there are: {", ".join(operation.backends)}; "pallas" is all but {others})'
    if isinstance(wanted, Mapping) or not isinstance(wanted, Iterable):
        raise TypeError(f"backends={wanted!r} is neither a name nor several {known}")
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if not names:
        raise ValueError(f"backends is empty: nothing could run {known}")
    return frozenset(
        backend for name in names for backend in (pallas if name == "pallas" else [operation.kernel(name).backend])
    )


def backends_of_each(
    operations: Sequence[Operation[Any]], wanted: str | Sequence[str] | None
) -> list[Sequence[str] | None]:
    """For each of these operations, which of the backends that `wanted` names it has; its library where it has none.

    Raises:
      TypeError, ValueError: as `named_backends`; of a name, where no operation has it.
    """
    if wanted is None:
        return [None] * len(operations)
    if isinstance(wanted, Mapping) or not isinstance(wanted, Iterable) or not wanted:
        named_backends(operations[0], wanted)  # says what is wrong
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if not any(_has(operation, name) for operation in operations):
            named_backends(operations[0], name)
    return [
        [name for name in names if _has(operation, name)] or [operation.library.backend] for operation in operations
    ]


def _has(operation: Operation[Any], name: str) -> bool:
    try:
        return bool(named_backends(operation, name))
    except ValueError:
        return False


def backends_of_another(
    other: Operation[Any], operation: Operation[Any], allowed: frozenset[str] | None
) -> frozenset[str] | None:
    """What a caller of `operation` who allows these backends allows of `other`, which a rule of `operation` calls.

    The library's answers where it may here, alone where it alone may or `other` has nothing else, and of the rest those
    that are not left out by their names.
    """
    if allowed is None:
        return None
    if allowed == {operation.library.backend} or other.backends == (other.library.backend,):
        return frozenset({other.library.backend})
    left_out = set(operation.backends) - allowed
    kernels = {kernel.backend for kernel in other.kernels if not kernel.library} - left_out
    libraries = {other.library.backend} if operation.library.backend in allowed else set()
    return frozenset(kernels | libraries)


def allowed_backends(operation: Operation[Any], backends: frozenset[str] | None) -> frozenset[str]:
    """`backends` by name, where None stands for all of the operation."""
    return frozenset(operation.backends) if backends is None else backends
