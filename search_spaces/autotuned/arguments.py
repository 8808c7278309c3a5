"""Parameters of a function (arrays by position; static parameters and choices by name), and functions of these."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.autotuned.statics import spelled
from search_spaces.autotuned.trees import tree_of, tree_text
from search_spaces.dtypes import array_type, did_you_mean
from search_spaces.errors import DeclarationError
from search_spaces.problem import Problem
from search_spaces.space import one_truth_value, wants_one_truth_value

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
            statics[p.name] = None if p.default is p.empty else spelled(p.name, p.default)
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
