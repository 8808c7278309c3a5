"""Validates the arguments of public calls: numbers, flags, names and backends, with the same messages everywhere."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from search_spaces.operation import Operation

# ------------------------------------------------------------------------------
# Validation of arguments and settings, with the same checks and messages in every public call.
#
# Two traps are handled here: comparisons with NaN are false, so a check such as `x <= 0` accepts NaN; and True is an
# integer in Python.

T = TypeVar("T", bound=str)

# The largest count and the largest seed that all libraries accept.
MOST = 2**31 - 1
MOST_SEED = 2**32 - 1


def checked_integer(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """Returns `value` as an integer from `least` to `most`.

    Raises:
      TypeError: `value` is not an integer.
      ValueError: `value` is out of range.
    """
    wanted = f"an integer from {least} to {most}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise _type_error(name, value, wanted)
    if not least <= (found := int(value)) <= most:
        raise _value_error(name, value, wanted)
    return found


def checked_integer_or_none(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int | None:
    """Returns None for None, otherwise the result of `checked_integer`."""
    return None if value is None else _or_none(checked_integer, name, value, least=least, most=most)


# Trials of a search, by effort: the model's top predictions; enough for most spaces; until nothing improves.
EFFORTS = {"quick": 8, "default": 64, "full": 4096}


def checked_budget(value: Any) -> int:
    """Returns the number of trials of a word of `EFFORTS`, otherwise the result of `checked_integer`."""
    if isinstance(value, str) and value in EFFORTS:
        return EFFORTS[value]
    try:
        return checked_integer("budget", value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, or {', '.join(EFFORTS)}") from None


def checked_seed(value: Any) -> int:
    """Returns `value` as the seed of a random draw, from 0 to 2^32 - 1; raises as `checked_integer` does."""
    return checked_integer("seed", value, least=0, most=MOST_SEED)


def positive(name: str, value: Any) -> float:
    """Returns `value` as a finite number above 0; raises as `checked_number` does."""
    return checked_number(name, value, above=True)


def checked_positive_or_none(name: str, value: Any) -> float | None:
    """Returns None for None, otherwise the result of `positive`."""
    return None if value is None else _or_none(positive, name, value)


def checked_number(name: str, value: Any, *, above: bool = False) -> float:
    """Returns `value` as a finite number, 0 or more.

    Args:
      above: also reject 0.

    Raises:
      TypeError: `value` is not a number.
      ValueError: `value` is negative, NaN or infinite.
    """
    wanted = "a finite number above 0" if above else "a finite number, 0 or more"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise _type_error(name, value, wanted)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (found > 0 if above else found >= 0) or not math.isfinite(found):
        raise _value_error(name, value, wanted)
    return found


def checked_flag(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False; other truthy values, such as "no", are rejected.

    Raises:
      TypeError: `value` is not a bool.
    """
    if not isinstance(value, bool):
        raise _type_error(name, value, "True or False")
    return value


def checked_choice(name: str, value: Any, words: Sequence[T]) -> T:
    """Returns `value` if it is one of `words`.

    Raises:
      ValueError: `value` is not one of `words`.
    """
    for word in words:
        if isinstance(value, str) and value == word:
            return word
    raise ValueError(f"{name}={reprlib.repr(value)} is not one of {', '.join(words)}")


def checked_text(name: str, value: Any) -> str:
    """Returns `value` if it is a string.

    Raises:
      TypeError: `value` is not a string.
    """
    if not isinstance(value, str):
        raise _type_error(name, value, "a text")
    return value


def _or_none(check: Any, name: str, value: Any, **bounds: int) -> Any:
    try:
        return check(name, value, **bounds)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, or None") from None


def _type_error(name: str, value: Any, wanted: str) -> TypeError:
    return TypeError(f"{name}={reprlib.repr(value)} is a {type(value).__name__}; give {wanted}")


def _value_error(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{name}={reprlib.repr(value)} is out of range; give {wanted}")


# ------------------------------------------------------------------------------
# Selection of the backends of an operation that a caller allows.


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
        raise TypeError(f"backends must be a name or several, found {wanted!r} {known}")
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if not names:
        raise ValueError(f"backends must not be empty {known}")
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
    other: Operation[Any],
    operation: Operation[Any],
    allowed: frozenset[str] | None,
    excluded: frozenset[str] | None = None,
) -> frozenset[str] | None:
    """Returns the backends of `other` that a rule of `operation` may call if the caller allows `allowed` of it.

    The library of `other` is included if `allowed` includes that of `operation`. It is the only one if `allowed`
    contains only the library, or if `other` has no other backend. Kernels of `other` are included unless `operation`
    has a backend of the same name that `allowed` excludes.

    Args:
      excluded: what the caller of an `operation` without kernels excludes, in place of what `allowed` excludes.
    """
    if allowed is None:
        return None
    only_library = excluded is None and allowed == {operation.library.backend}
    if only_library or other.backends == (other.library.backend,):
        return frozenset({other.library.backend})
    left_out = set(operation.backends) - allowed if excluded is None else excluded
    kernels = set(other.backends) - {other.library.backend} - left_out
    libraries = set() if operation.library.backend in left_out else {other.library.backend}
    return frozenset(kernels | libraries)


def excluded_backends(
    other: Operation[Any], operation: Operation[Any], allowed: frozenset[str] | None, excluded: frozenset[str] | None
) -> frozenset[str] | None:
    """Returns the backends that the rules of `other`, an operation without kernels, may not call; None if it has some.

    The tangent of an operation is one without kernels. Its transpose, the gradient, may have kernels.
    """
    if allowed is None or other.backends != (other.library.backend,):
        return None
    if excluded is not None or allowed == {operation.library.backend}:
        return excluded
    return frozenset(operation.backends) - allowed


def allowed_backends(operation: Operation[Any], backends: frozenset[str] | None) -> frozenset[str]:
    """Returns `backends`, or all backends of the operation if `backends` is None."""
    return frozenset(operation.backends) if backends is None else backends
