"""A space of schedules: named choices, and named rules that a legal combination obeys."""

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

from search_spaces.errors import DeclarationError

# A tuple is of choices, too.
Choice = int | bool | float | str | tuple[Any, ...] | None
Column = npt.NDArray[Any]
S = TypeVar("S")


class NoColumn(AttributeError):
    """A column was asked for that is not there."""


class OneByOne(Exception):
    """What no column of numbers holds, a tuple or None, was asked of many schedules at once."""


class Columns:
    """Many schedules at once: one NumPy array per choice, read as attributes; of a single one a tuple or None as it is.

    ``p.m % s.tile_m == 0`` reads the same whether ``s`` is one schedule or a ``Columns`` of thousands, so rules,
    footprints and costs are written once and evaluated on whole spaces in milliseconds.
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
        """The rows that a boolean mask or an index array selects."""
        rows = np.arange(self._length)[which]
        return Columns({name: array[rows] for name, array in self._arrays.items()}, len(rows))

    def row(self, index: int) -> dict[str, Choice]:
        """Row `index` as plain Python values, by name."""
        return {
            name: array[index] if array.dtype == object else array[index].item() for name, array in self._arrays.items()
        }

    def each(self) -> Iterator[Columns]:
        """The rows, one by one."""
        for index in range(self._length):
            yield Columns({name: array[index : index + 1] for name, array in self._arrays.items()}, 1)

    @classmethod
    def of(cls, schedules: Sequence[Any]) -> Columns:
        """Columns of dataclass instances of one type."""
        if not schedules:
            raise ValueError("at least one schedule is needed to know the columns")
        names = [field.name for field in dataclasses.fields(schedules[0])]
        return cls({name: [getattr(s, name) for s in schedules] for name in names}, len(schedules))


def of_each(function: Callable[[Columns], Any], points: Columns) -> Any:
    """What `function` says of all points: asked of all at once, or of one by one where it looks at tuples or None."""
    try:
        return function(points)
    except OneByOne:
        return _stacked([function(point) for point in points.each()])


def _stacked(answers: Sequence[Any]) -> Any:
    """Answers of single points as one of many; what is the same in all of them stays as it is."""
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
# Combinations of some choices that are looked at, before and after rules: as many bytes for each, and more.
MOST_POINTS = 20_000_000


@dataclasses.dataclass(frozen=True)
class Space(Generic[S]):
    """The schedules of one kernel for one problem.

    Attributes:
      schedule: the frozen dataclass that a point becomes; its field names are the names of `choices`. A field that came
        later than stored schedules has a default: the value with which these ran, so it never changes.
      choices: field -> the values it may take, in the order they are to be tried when all else is equal.
      rules: the reason in words -> a test that holds for legal points. A test gets one schedule or a `Columns` and is
        written so that both work (`&`, `|`, `np.where`; no `and`, `or`, `if`).

    Raises:
      DeclarationError: choices that are no tuple of int, bool, float, str, None or tuples; while it is asked about its
        points, a rule that wants one truth value of many, or says nothing, or too many points.
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
        """The whole product of the choices, the last choice varying fastest."""
        points = Columns({}, length=1)
        for name, values in self.choices.items():
            points = _times(points, name, values)
        return points

    def legal(self) -> tuple[Columns, dict[str, int]]:
        """The points that break no rule, in the order of `points`, and how many the others lost to each rule.

        The product is built field by field, and a rule is asked as soon as the fields that it looks at are there: few
        of a large product are ever made. A point counts once, for the first rule that its fields so far break; rules
        that some lost to are in the order in which they were asked.
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
        """Why `schedule` is no legal point of this space, in words, or None where it is one."""
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
        """The schedule with these field values, those with a default where they are left out: undoes `encode`.

        Raises:
          ValueError: a field is missing, unknown or of another type, with the right names in the message.
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
    """A choice as a person reads it, without spaces: ``(64,128)``."""
    if not isinstance(value, tuple):
        return str(value)
    items = [repr(item) if isinstance(item, str) else choice_text(item) for item in value]
    return f"({','.join(items)}{',' * (len(items) == 1)})"


def as_choice(value: Any) -> Any:
    """`value` with tuples for lists, which JSON has in their place."""
    return tuple(map(as_choice, value)) if isinstance(value, list | tuple) else value


def _kind(value: Choice) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _no_choice(value: Any) -> str | None:
    """Why `value` is none that is stored and read again as it is, as the end of a sentence; None where it is one."""
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
    """One value of each schedule as an array; of objects, where there is a tuple or None among them."""
    if isinstance(values, np.ndarray):
        return values
    if not {tuple, type(None)}.isdisjoint(map(type, values)):
        objects = np.empty(len(values), dtype=object)
        objects[:] = list(values)
        return objects
    return np.asarray(values)


def _encodable(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair, which no database takes."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


@contextlib.contextmanager
def one_truth_value(who: str) -> Iterator[None]:
    """Says, for what is asked about many schedules at once, how to write what NumPy refuses.

    Raises:
      DeclarationError: `who` wants the truth value of a whole column.
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
    """Whether NumPy refuses the truth value of many."""
    return isinstance(error, ValueError) and "truth value of an" in str(error)


def _holds(reason: str, rule: Rule, points: Columns) -> npt.NDArray[np.bool_]:
    """For which points a rule holds."""
    with one_truth_value(f"the rule {reason!r}"):
        if (answer := of_each(rule, points)) is None:
            raise DeclarationError(f"the rule {reason!r} returns None: it says whether it holds")
        return np.broadcast_to(np.asarray(answer, dtype=bool), (len(points),))


def _times(points: Columns, name: str, values: Sequence[Choice]) -> Columns:
    """Every point with every value of a further field `name`, which varies fastest."""
    count = len(points) * len(values)
    if count > MOST_POINTS:
        raise DeclarationError(
            f"{count:,} combinations of choices up to {name} are more than the {MOST_POINTS:,} that are looked at: "
            "offer fewer values, or rules of the choices before it"
        )
    repeated = points.take(np.repeat(np.arange(len(points)), len(values)))
    return Columns({**repeated._arrays, name: np.tile(_column(values), len(points))}, count)


def unknown(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is none of `known`: it, the one that was meant, and all others."""
    known = list(known)
    close = meant(name, known)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{name!r}{hint} (there are: {', '.join(known) or 'none'})"


# What other libraries call it.
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
    """Which of `known` was meant by `name`: in any case, by what other libraries call it, or by its letters."""
    lower = {each.lower(): each for each in known}
    word = name.lower()
    if (elsewhere := _ELSEWHERE.get(word)) in lower:
        return lower[elsewhere]
    if close := difflib.get_close_matches(word, lower, n=1):
        return lower[close[0]]
    parts = [each for each in lower if min(len(each), len(word)) > 2 and (each in word or word in each)]
    return lower[max(parts, key=len)] if parts else None


def cdiv(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, of integers or columns of them."""
    return -(-a // b)


def round_up(a: Any, b: Any) -> Any:
    """The least multiple of `b` that is not below `a`."""
    return cdiv(a, b) * b
