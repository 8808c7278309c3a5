"""Selection of the backends of an operation that a caller allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from search_spaces.operation import Operation


def named_backends(operation: Operation[Any], wanted: str | Sequence[str] | None) -> frozenset[str] | None:
    """Returns the backends that `wanted` names, or None if `wanted` is None, which allows all.

    "pallas" stands for all backends except libraries, and may be combined with other names.

    Raises:
      TypeError: `wanted` is neither a name nor a collection of names.
      ValueError: an unknown backend, or an empty collection; the message lists the available ones.
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
    """Returns, for each operation, the names in `wanted` that it has, or its library if it has none of them.

    Raises:
      TypeError, ValueError: as in `named_backends`; a name that no operation has.
    """
    if wanted is None:
        return [None] * len(operations)
    if isinstance(wanted, Mapping) or not isinstance(wanted, Iterable) or not wanted:
        named_backends(operations[0], wanted)  # raises the error
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
    """Returns the backends of `other` that a rule of `operation` may call if the caller allows `allowed` of it.

    The library of `other` is included if `allowed` includes that of `operation`. It is the only one if `allowed`
    contains only the library, or if `other` has no other backend. Kernels of `other` are included unless `operation`
    has a backend of the same name that `allowed` excludes.
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
    """Returns `backends`, or all backends of the operation if `backends` is None."""
    return frozenset(operation.backends) if backends is None else backends
