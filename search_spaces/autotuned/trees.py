"""Operands of several arrays: nested tuples and dicts of arrays, as text, ``{w:float32[8,8],b:float32[8]}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

# An array type, a name before a colon, or a bracket; "(x,)" is a tuple of one.
_WORD = re.compile(r"[\w.]+(?:\s*\[[\d,\s]*\])?|[(){}:,]")


def leaves_of(x: Any) -> list[Any]:
    """Returns the arrays of an operand, in JAX's order; none if the operand is left out."""
    leaves: list[Any] = jax.tree.leaves(x)
    return leaves


def named_leaves(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of an operand with their names: ``params['w']``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        yield f"{name}{jax.tree_util.keystr(path)}", leaf


def require_tree(name: str, x: Any) -> None:
    """Raises a TypeError if an operand, or a part of it, is a container that schedule keys do not support."""
    if type(x) is dict:
        for key, part in x.items():
            if not isinstance(key, str) or not key.isidentifier():
                raise TypeError(f"{name} has the key {key!r}: give its arrays names that are identifiers")
            require_tree(f"{name}[{key!r}]", part)
    elif type(x) is tuple:
        for place, part in enumerate(x):
            require_tree(f"{name}[{place}]", part)
    elif isinstance(x, tuple | dict) or (x is not None and not jax.tree_util.all_leaves([x])):
        raise TypeError(
            f"{name} must be an array, or a tuple or dict of arrays, not {type(x).__name__}: its arrays are part of a "
            "key as text, which tells no other classes"
        )


def tree_text(x: Any, text: Callable[[Any], str]) -> str:
    """Formats an operand as text, with `text` for each array."""
    if type(x) is dict:
        return f"{{{','.join(f'{key}:{tree_text(x[key], text)}' for key in sorted(x))}}}"
    if type(x) is tuple:
        return f"({','.join(tree_text(part, text) for part in x)}{',' * (len(x) == 1)})"
    return text(x)


def tree_of(name: str, text: str, array: Callable[[str, str], Any]) -> Any:
    """Parses the result of `tree_text`; `array` parses each array, given its name.

    Raises:
      ValueError: `text` has another format.
    """
    if not text.lstrip().startswith(("(", "{")):
        return array(name, text)
    words = _WORD.findall(text)
    if "".join("".join(words).split()) != "".join(text.split()):
        raise _wrong(name, text)
    try:
        found = _read(name, words, array)
    except (IndexError, RecursionError):
        raise _wrong(name, text) from None
    if words:
        raise _wrong(name, text)
    return found


def _read(name: str, words: list[str], array: Callable[[str, str], Any]) -> Any:
    """Parses an operand from the front of `words`, and removes its words."""
    word = words.pop(0)
    if word not in ("(", "{"):
        if word in (")", "}", ":", ","):
            raise IndexError
        return array(name, word)
    close, parts = ")" if word == "(" else "}", dict[Any, Any]()
    while words[0] != close:
        key: Any = len(parts)
        if word == "{":
            key = words.pop(0)
            if not key.isidentifier() or key in parts or words.pop(0) != ":":
                raise IndexError
        parts[key] = _read(f"{name}[{key!r}]", words, array)
        if words[0] == ",":
            words.pop(0)
        elif words[0] != close:
            raise IndexError
    words.pop(0)
    return tuple(parts.values()) if word == "(" else parts


def _wrong(name: str, text: str) -> ValueError:
    return ValueError(
        f"{name}={text} is no type of a tuple or dict of arrays: write it as (float32[8],float32[8]) or "
        "{w:float32[8,8],b:float32[8]}, in quotes on a shell"
    )
