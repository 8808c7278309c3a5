"""Parameters of a function (arrays by position; static parameters and choices by name), and functions of these."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import reprlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.problem import Problem, array_type, did_you_mean
from search_spaces.space import DeclarationError, one_truth_value, wants_one_truth_value

# ------------------------------------------------------------------------------
# Operands of several arrays: nested tuples and dicts of arrays, as text, ``{w:float32[8,8],b:float32[8]}``.

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


# ------------------------------------------------------------------------------
# Static parameters as text, with one form per value: part of a key, and of a command line.

Static = int | float | bool | str | tuple[Any, ...] | None

WANTED = "int, float, bool, str, None, a dtype, or a tuple of these"


@dataclasses.dataclass(frozen=True)
class Spelled:
    """A static parameter as text, which distinguishes 1 from True, although Python treats them as equal."""

    text: str


def static_to_text(name: str, value: Any) -> str:
    """Returns the text of a static parameter; a dtype becomes its name, which the function then gets.

    Raises:
      TypeError: the value has another type, or is NaN, which never equals itself.
    """
    if isinstance(value, Spelled):
        return value.text
    text = value if isinstance(value, str) else _dtype_name(value)
    if text is not None:
        return text if _is_own_text(text) else repr(text)
    return _literal(name, value)


def value_of(text: str) -> Static:
    """Returns the inverse of `static_to_text`; also reads `true` and `(1,2)`. Text that is no literal is unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | str | tuple | None) else text


def _is_own_text(text: str) -> bool:
    value = value_of(text)
    return isinstance(value, str) and value == text


def _literal(name: str, value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise TypeError(f"{name}=nan is never equal to itself, so no schedule could be stored for it")
        return "1e999" if value > 0 else "-1e999"  # Python parses it as an infinity
    if isinstance(value, bool | int | float | None):
        return repr(value)
    if isinstance(value, tuple):
        items = [repr(text) if (text := _text(item)) is not None else _literal(name, item) for item in value]
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    instead = ": give a tuple" if isinstance(value, list) else ""
    raise TypeError(
        f"{name}={reprlib.repr(value)} is a {type(value).__name__}{instead}; a static parameter is part of the key "
        f"that schedules are stored under: {WANTED}"
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else _dtype_name(value)


def _dtype_name(value: Any) -> str | None:
    """Returns the name of a NumPy or JAX dtype; None for any other value."""
    if isinstance(value, type):
        value = np.dtype(value) if issubclass(value, np.generic) else getattr(value, "dtype", None)
    return value.name if isinstance(value, np.dtype) else None


# Name of the parameter by which a function, a rule or a footprint gets the chip.
TARGET = "target"
# Name of the parameter by which `inputs` gets a key of `jax.random`.
RANDOM = "rng"
# Parameters of a call besides those of its function.
HOW = ("on_miss", "backends", "schedule")
ABSENT = "None"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The parameters of a function, by kind.

    Attributes:
      arrays: names of the arrays, in order.
      optional: names of arrays that may be left out, or None.
      statics: name -> the default as text, None if there is none.
      choices: names of the parameters that the search chooses.
      wants_target: whether the function has a parameter `target`.
    """

    arrays: tuple[str, ...]
    optional: frozenset[str]
    statics: Mapping[str, str | None]
    choices: tuple[str, ...]
    wants_target: bool

    @property
    def known(self) -> tuple[str, ...]:
        """Names that rules, footprints and similar functions may use as parameters."""
        return *self.arrays, *self.statics, *self.choices, TARGET


def arguments_of(function: Callable[..., Any], choices: Collection[str]) -> Arguments:
    """Returns the parameters of `function`, given the names of its `choices`.

    Raises:
      DeclarationError: a parameter is invalid; the message says what to write instead.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if (wrong := next((p for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)) is not None:
        raise DeclarationError(f"{name} takes *{wrong.name}: give each array a parameter of its own")
    for choice in choices:
        if choice not in parameters and not takes_any:
            raise DeclarationError(f"{choice} is no parameter of {name}, which has {', '.join(parameters)}")
        if choice in parameters and parameters[choice].kind is inspect.Parameter.POSITIONAL_ONLY:
            raise DeclarationError(f"{name} takes the choice {choice} by place alone: move the / before it")
    arrays, optional, statics = [], set(), {}
    if TARGET in parameters and parameters[TARGET].kind is not inspect.Parameter.KEYWORD_ONLY:
        raise DeclarationError(
            f"{TARGET} is among the arrays of {name}, and is how a function is told the chip: call the array otherwise"
        )
    for p in parameters.values():
        if p.name in choices or p.name == TARGET or p.kind is p.VAR_KEYWORD:
            continue
        if p.kind is p.KEYWORD_ONLY:
            statics[p.name] = None if p.default is p.empty else static_to_text(p.name, p.default)
        else:
            arrays.append(p.name)
            if p.default is None:
                optional.add(p.name)
            elif p.default is not p.empty:
                raise DeclarationError(
                    f"{p.name}={p.default!r} is among the arrays of {name}: what is no array is keyword-only, after a "
                    "*, and an array that may be left out has the default None"
                )
    if not set(arrays) - optional:
        raise DeclarationError(f"{name} has no array that every call gives: by the arrays' types schedules are stored")
    for parameter in (*arrays, *statics):
        if parameter in HOW or parameter == "declared" or hasattr(Problem, parameter):
            what = "says how a call is answered" if parameter in HOW else "is what every problem has"
            raise DeclarationError(f"{name} has a parameter {parameter}, which {what}: give it another name")
    return Arguments(tuple(arrays), frozenset(optional), statics, tuple(choices), TARGET in parameters)


def by_name(function: Any, what: str, known: Collection[str]) -> Callable[[Mapping[str, Any]], Any]:
    """Converts `function` to a function of a mapping, from which its parameters are taken by name.

    Args:
      what: description for messages: "the rule 'tile_m divides m'".
      known: the parameter names that it may use.

    Raises:
      DeclarationError: `function` is no function, or has a parameter of another name. The returned function raises it
        for any exception of `function`.
    """
    if not callable(function):
        raise DeclarationError(f"{what} is {function!r}: write a function of {', '.join(known)}, or of some of these")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise DeclarationError(f"{what} does not tell its parameters: write a lambda that names them") from None
    names = [p.name for p in parameters]
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise DeclarationError(f"{what} takes {p}: it gets by name what it names, among {', '.join(known)}")
        if p.name not in known:
            raise DeclarationError(f"{what} asks for {p.name!r}; there are {', '.join(known)}")

    def ask(values: Mapping[str, Any]) -> Any:
        given = {name: values[name] for name in names}
        with one_truth_value(what):
            try:
                return function(**given)
            except DeclarationError:
                raise
            except Exception as error:
                if wants_one_truth_value(error):
                    raise
                raise DeclarationError(f"{what} raised {_told(error)}") from error

    return ask


def _told(error: Exception) -> str:
    """Formats an exception of a user's function: its type, its first line, and its location in that function's file."""
    try:
        said = str(error).partition("\n")[0]
    except Exception:  # its `__str__` may raise
        said = ""
    frames = traceback.extract_tb(error.__traceback__)
    own = frames[1].filename if len(frames) > 1 else ""  # the first frame is the call above
    place = next((f" ({frame.filename}:{frame.lineno})" for frame in reversed(frames) if frame.filename == own), "")
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}"


def operand_text(x: Any) -> str:
    """Formats the type of an operand: of an array by `array_text`, of a tuple or dict of arrays by `tree_text`."""
    return tree_text(x, array_text)


def operand_of(name: str, text: str) -> Any:
    """Parses the result of `operand_text`; raises as `array_of` does."""
    return tree_of(name, text, array_of)


def array_text(x: Any) -> str:
    """Formats the type of an array, ``float32[200,256]``; ``None`` for an array that is left out."""
    return ABSENT if x is None else f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def array_of(name: str, text: str) -> jax.ShapeDtypeStruct | None:
    """Parses the result of `array_text`.

    Raises:
      ValueError: `text` is no such type.
    """
    if text == ABSENT:
        return None
    if (found := array_type(text)) is None:
        raise ValueError(f"{name}={text} is no type of an array: write it as float32[200,256], in quotes on a shell")
    kind, extents = found
    try:
        dtype = jnp.dtype(kind)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name != kind:  # NumPy accepts type codes, too: i8 is int64
        raise ValueError(f"{name}={text}: there is no dtype {kind!r}{did_you_mean(kind)}")
    return jax.ShapeDtypeStruct(tuple(int(extent) for extent in extents.split(",") if extent.strip()), dtype)
