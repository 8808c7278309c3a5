"""Spaces of schedules: named choices, and named rules that legal combinations satisfy."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

# A tuple contains choices, too.
Choice = int | bool | float | str | tuple[Any, ...] | None
Column = npt.NDArray[Any]


class DeclarationError(TypeError):
    """A kernel's declaration is invalid: the message names the kernel, rule or field, and suggests a correction."""


S = TypeVar("S")


class NoColumn(AttributeError):
    """The requested column does not exist."""


class OneByOne(Exception):
    """Many schedules were evaluated at once on a choice that no numeric column holds: a tuple or None."""


class Columns:
    """Many schedules at once: one NumPy array per choice, read as attributes.

    ``p.m % s.tile_m == 0`` works both if ``s`` is one schedule and if it is a ``Columns`` of thousands. So rules,
    footprints and costs are written once and evaluated on whole spaces in milliseconds. In a ``Columns`` of a single
    schedule, a tuple or None is returned as it is.
    """

    __slots__ = ("_arrays", "_length")

    def __init__(self, arrays: Mapping[str, Any], length: int | None = None) -> None:
        self._arrays: dict[str, Column] = {name: _column(array) for name, array in arrays.items()}
        lengths = {len(array) for array in self._arrays.values()} | ({length} if length is not None else set())
        if len(lengths) != 1:
            raise ValueError(f"columns of one length are needed, found lengths {sorted(lengths)}")
        self._length = lengths.pop()

    def __getattr__(self, name: str) -> Column:
        try:
            found = self._arrays[name]
        except KeyError:
            raise NoColumn(f"no column {name!r}; there are {', '.join(self._arrays) or 'none'}") from None
        if found.dtype != object:
            return found
        if self._length != 1:
            raise OneByOne
        return found[0]

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self._arrays, self._length)

    def take(self, which: Column) -> Columns:
        """Returns the rows selected by a boolean mask or an index array."""
        rows = np.arange(self._length)[which]
        return Columns({name: array[rows] for name, array in self._arrays.items()}, len(rows))

    def row(self, index: int) -> dict[str, Choice]:
        """Returns row `index` as plain Python values, by name."""
        return {
            name: array[index] if array.dtype == object else array[index].item() for name, array in self._arrays.items()
        }

    def values(self) -> dict[str, Any]:
        """Returns the values of each choice: an array, or a list of tuples or None."""
        return {name: array.tolist() if array.dtype == object else array for name, array in self._arrays.items()}

    def each(self) -> Iterator[Columns]:
        """Yields the rows one by one."""
        for index in range(self._length):
            yield Columns({name: array[index : index + 1] for name, array in self._arrays.items()}, 1)

    @classmethod
    def of(cls, schedules: Sequence[Any]) -> Columns:
        """Returns columns of dataclass instances of one type."""
        if not schedules:
            raise ValueError("at least one schedule is needed to know the columns")
        names = [field.name for field in dataclasses.fields(schedules[0])]
        return cls({name: [getattr(s, name) for s in schedules] for name in names}, len(schedules))


def of_each(function: Callable[[Columns], Any], points: Columns) -> Any:
    """Evaluates `function` on all points at once, or one by one if it reads tuples or None."""
    try:
        return function(points)
    except OneByOne:
        return _stacked([function(point) for point in points.each()])


def _stacked(answers: Sequence[Any]) -> Any:
    """Stacks results of single points; a value that is the same in all of them stays as it is."""
    if not answers:
        return np.zeros(0)
    first = answers[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(first, **{name: _stacked([getattr(one, name) for one in answers]) for name in names})
    if isinstance(first, tuple) and all(isinstance(one, tuple) and len(one) == len(first) for one in answers):
        return tuple(map(_stacked, zip(*answers, strict=True)))
    if not isinstance(first, np.ndarray) and all(type(one) is type(first) and one == first for one in answers):
        return first
    return np.concatenate([np.atleast_1d(one) for one in answers])


Rule = Callable[[Any], Any]
# Limit on combinations of choices, before and after rules; each takes at least one byte per combination.
MOST_POINTS = 20_000_000


@dataclasses.dataclass(frozen=True)
class Space(Generic[S]):
    """The schedules of one kernel for one problem.

    Attributes:
      schedule: the frozen dataclass of a point; its field names are the names of `choices`. A field added after
        schedules were stored has a default: the value with which the stored ones ran. That default never changes.
      choices: field -> the values it may take, in the order in which they are tried if all else is equal.
      rules: reason, as text -> a predicate that holds for legal points. It gets one schedule or a `Columns`, and must
        work for both (`&`, `|`, `np.where`; no `and`, `or`, `if`).

    Raises:
      DeclarationError: choices are no tuple of int, bool, float, str, None or tuples. Methods raise it for a rule that
        needs the truth value of an array or returns None, and for too many points.
    """

    schedule: type[S]
    choices: Mapping[str, Sequence[Choice]]
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.choices.items():
            if not isinstance(values, tuple | list | range):
                raise DeclarationError(f"the choices of {name} are {values!r}: write them as a tuple, as in (64, 128)")
            if isinstance(values, range):
                continue
            kinds = {type(value): value for value in values if value is not None}
            for value in values:
                if wrong := _no_choice(value):
                    raise DeclarationError(f"{name}={value!r} {wrong}")
            if len(kinds) > 1:
                first, other, *_ = kinds.values()
                raise DeclarationError(
                    f"{name} has {first!r} and {other!r} to choose: give values of one type, int, bool, float, str or "
                    "tuple, and None beside them"
                )

    @property
    def size(self) -> int:
        """Number of points before any rule."""
        return math.prod(len(values) for values in self.choices.values())

    def points(self) -> Columns:
        """Returns the full product of the choices, the last choice varying fastest."""
        points = Columns({}, length=1)
        for name, values in self.choices.items():
            points = _times(points, name, values)
        return points

    def legal(self) -> tuple[Columns, dict[str, int]]:
        """Returns the points that satisfy all rules, in the order of `points`, and the number that each rule drops.

        The product is built field by field. A rule is evaluated as soon as the fields that it reads exist, so that only
        a small part of a large product is ever built. A point counts once, for the first rule it breaks. Rules that
        drop points are in the order of evaluation.
        """
        points = Columns({}, length=1)
        waiting = dict(self.rules)
        dropped: dict[str, int] = {}
        left = list(self.choices.items())
        while left or waiting:
            if left:
                points = _times(points, *left.pop(0))
            for reason, rule in list(waiting.items()):
                try:
                    holds = _holds(reason, rule, points)
                except NoColumn:
                    if left:
                        continue
                    raise
                del waiting[reason]
                if lost := len(points) - int(holds.sum()):
                    dropped[reason] = lost * math.prod(len(values) for _, values in left)
                    points = points.take(holds)
        return points, dropped

    def schedules(self, points: Columns) -> Iterator[S]:
        for index in range(len(points)):
            yield self.schedule(**points.row(index))

    def broken(self, schedule: S) -> str | None:
        """Returns why `schedule` is not a legal point of this space, or None if it is one."""
        for name, values in self.choices.items():
            value = getattr(schedule, name)
            # (1,) equals (True,).
            if value not in values or (isinstance(value, tuple) and repr(value) not in map(repr, values)):
                return f"{name}={choice_text(value)} is not among {', '.join(map(choice_text, values))}"
        one = Columns.of([schedule]) if self.choices else Columns({}, length=1)
        for reason, rule in self.rules.items():
            if not np.all(rule(one)):
                return f"breaks the rule {reason!r}"
        return None

    @property
    def defaults(self) -> dict[str, Choice]:
        """Field -> default, of the fields that have one."""
        fields = dataclasses.fields(self.schedule)  # type: ignore[arg-type]
        return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}

    def encode(self, values: Mapping[str, Choice]) -> dict[str, Choice]:
        """A point as stores keep it, fields at their defaults left out: one schedule has one spelling."""
        defaults = self.defaults
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    def decode(self, values: Mapping[str, Choice]) -> S:
        """Returns the schedule with these field values, with defaults for fields left out: the inverse of `encode`.

        Raises:
          ValueError: a field is missing, unknown or of another type; the message lists the correct names.
        """
        fields = [field.name for field in dataclasses.fields(self.schedule)]  # type: ignore[arg-type]
        for name in values:
            if name not in fields:
                raise ValueError(f"a schedule has no field {unknown(name, fields)}")
        whole = self.defaults | {name: as_choice(value) for name, value in values.items()}
        if missing := [name for name in fields if name not in whole]:
            raise ValueError(f"the schedule lacks {', '.join(missing)}")
        for name, allowed in self.choices.items():
            kind = type(whole[name])
            if allowed and kind is not type(allowed[0]) and kind not in set(map(type, allowed)):
                wanted = " or ".join(dict.fromkeys(_kind(value) for value in allowed))
                raise ValueError(f"{name}={whole[name]!r} is not {wanted}")
        return self.schedule(**whole)


def choice_text(value: Choice) -> str:
    """Formats a choice for display, without spaces: ``(64,128)``."""
    if not isinstance(value, tuple):
        return str(value)
    items = [repr(item) if isinstance(item, str) else choice_text(item) for item in value]
    return f"({','.join(items)}{',' * (len(items) == 1)})"


def as_choice(value: Any) -> Any:
    """Returns `value` with lists, which JSON uses in place of tuples, converted to tuples."""
    return tuple(map(as_choice, value)) if isinstance(value, list | tuple) else value


def _kind(value: Choice) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _no_choice(value: Any) -> str | None:
    """Returns why `value` cannot be stored and read back unchanged, as the end of a sentence; None if it can."""
    if isinstance(value, tuple):
        wrong = next((wrong for item in value if (wrong := _no_choice(item))), None)
        return wrong and f"has an item that {wrong}"
    if type(value) not in (int, bool, float, str, type(None)):
        return f"is a {type(value).__name__}: choices are int, bool, float, str, None, or tuples of these"
    if isinstance(value, float) and (not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0)):
        return "is no number that is stored as it is: choose finite numbers, and 0.0 for -0.0"
    if isinstance(value, str) and not _encodable(value):
        return "is no text that can be stored: choose other letters"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "does not fit into 64 bits, which choices are kept in"
    return None


def _column(values: Any) -> Column:
    """Returns the values of all schedules as an array; of objects if a tuple or None is among them."""
    if isinstance(values, np.ndarray):
        return values
    if not {tuple, type(None)}.isdisjoint(map(type, values)):
        objects = np.empty(len(values), dtype=object)
        objects[:] = list(values)
        return objects
    return np.asarray(values)


def _encodable(text: str) -> bool:
    """Returns whether `text` has no unpaired surrogate, which databases reject."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


@contextlib.contextmanager
def one_truth_value(who: str) -> Iterator[None]:
    """Adds instructions to NumPy's error about the truth value of an array, in code evaluated on many schedules.

    Raises:
      DeclarationError: `who` needs the truth value of a whole column.
    """
    try:
        yield
    except ValueError as error:
        if not wants_one_truth_value(error):
            raise
        raise DeclarationError(
            f"{who} wants one truth value and gets those of many schedules: write (a) & (b), (a) | (b), ~(a) and "
            "np.where in place of `and`, `or`, `not` and `if`, and a < b < c as (a < b) & (b < c)"
        ) from error


def wants_one_truth_value(error: Exception) -> bool:
    """Returns whether this is NumPy's error about the truth value of an array."""
    return isinstance(error, ValueError) and "truth value of an" in str(error)


def _holds(reason: str, rule: Rule, points: Columns) -> npt.NDArray[np.bool_]:
    """Returns for which points a rule holds."""
    with one_truth_value(f"the rule {reason!r}"):
        if (answer := of_each(rule, points)) is None:
            raise DeclarationError(f"the rule {reason!r} returns None: it says whether it holds")
        return np.broadcast_to(np.asarray(answer, dtype=bool), (len(points),))


def _times(points: Columns, name: str, values: Sequence[Choice]) -> Columns:
    """Returns every point combined with every value of a further field `name`, which varies fastest."""
    count = len(points) * len(values)
    if count > MOST_POINTS:
        raise DeclarationError(
            f"{count:,} combinations of choices up to {name} are more than the {MOST_POINTS:,} that are looked at: "
            "offer fewer values, or rules of the choices before it"
        )
    repeated = points.take(np.repeat(np.arange(len(points)), len(values)))
    return Columns({**repeated._arrays, name: np.tile(_column(values), len(points))}, count)


def unknown(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the name, the closest known name, and all known names."""
    known = list(known)
    close = meant(str(name), known)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{name!r}{hint} (there are: {', '.join(known) or 'none'})"


# Names that other libraries use.
_ELSEWHERE = MappingProxyType(
    {
        "dim": "axis", "epsilon": "eps", "sm_scale": "scale", "softmax_scale": "scale", "gamma": "weight",
        "window_size": "window", "sliding_window": "window", "logits_soft_cap": "softcap", "trials": "budget",
        "num_trials": "budget", "n_trials": "budget", "max_trials": "budget", "timeout": "seconds",
        "random_seed": "seed", "query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths",
        "act": "activation", "seq_lens": "q_lengths",
        "approximate": "activation", "config": "schedule", "backend": "backends", "dtype": "preferred_element_type",
    }
)  # fmt: skip


def meant(name: str, known: Iterable[str]) -> str | None:
    """Returns which of `known` `name` refers to, ignoring case: by other libraries' names, or by similar spelling."""
    lower = {each.lower(): each for each in known}
    word = name.lower()
    if (elsewhere := _ELSEWHERE.get(word)) in lower:
        return lower[elsewhere]
    if close := difflib.get_close_matches(word, lower, n=1):
        return lower[close[0]]
    parts = [each for each in lower if min(len(each), len(word)) > 2 and (each in word or word in each)]
    return lower[max(parts, key=len)] if parts else None


def cdiv(a: Any, b: Any) -> Any:
    """Returns ``a / b`` rounded up, for integers or columns."""
    return -(-a // b)


def round_up(a: Any, b: Any) -> Any:
    """Returns the least multiple of `b` that is not below `a`."""
    return cdiv(a, b) * b
