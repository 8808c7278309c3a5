"""Serialization of records, trials, sweeps and model constants as JSON that diffs and merges; validated when read."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from scheduler.core.records import Calibration, Failure, Imported, Key, Measurement, Record, Stage, Sweep, Trial
from search_spaces.space import Choice

# ------------------------------------------------------------------------------
# Decoding of parsed JSON into frozen dataclasses: field types determine the checks, and errors name the field.
#
# `msgspec` reads the same types, but its messages have the type of the value instead of the value, and do not list the
# allowed values. In addition, old names, problems and outcomes would each need a separate class.

T = TypeVar("T")
# Converts a parsed JSON value to a typed value, or raises a ValueError that says what is expected.
Check = Callable[[object], T]


# Limit for untrusted input: records, plans and jobs have only a few levels.
DEEPEST = 100


def require_shallow(value: object) -> None:
    """Raises a ValueError if `value` is nested deeper than `DEEPEST`; recursive code could overflow the stack."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"at most {DEEPEST} nested levels are allowed, found more")


def maker(cls: type[T], by_name: Mapping[str, Check[Any]]) -> Check[T]:
    """Returns a check that converts a JSON object to the dataclass `cls`; unknown names are ignored.

    Fields with defaults may be missing.

    Args:
      by_name: checks by field name, for `cls` and nested dataclasses; these override the field types.
    """
    hints = typing.get_type_hints(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    checks = {name: by_name.get(name) or _of_type(hints[name], name, by_name) for name in defaults}

    def make(value: object) -> T:
        fields = json_object(value)
        present = (name for name in checks if name in fields or defaults[name] is dataclasses.MISSING)
        return cls(**{name: field_of(fields, name, checks[name]) for name in present})

    return make


def field_of(fields: Mapping[str, object], name: str, check: Check[T]) -> T:
    if name not in fields:
        raise ValueError(f"{name} is missing")
    return _at(name, check, fields[name])


def list_of(check: Check[T]) -> Check[tuple[T, ...]]:
    numbers = isinstance(check, Scalar) and check.read is _finite

    def check_list(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wanted("a list", value)
        if numbers and set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            return tuple(value)  # fast path for samples, which are most of a record
        return tuple(_at(f"item {index}", check, item) for index, item in enumerate(value))

    return check_list


def map_of(check: Check[T]) -> Check[dict[str, T]]:
    return lambda value: {name: _at(name, check, item) for name, item in json_object(value).items()}


def one_of(literal: Any) -> Scalar[Any]:
    """Returns a check for the values of a `Literal`."""
    values = typing.get_args(literal)
    return Scalar(f"one of {', '.join(values)}", lambda value: value if value in values else None)


def json_object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wanted("a JSON object", value)
    return value


def made_already(value: object) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Scalar(Generic[T]):
    """A check of one value.

    Attributes:
      wanted: description of valid values.
      read: returns the typed value, or None if the value is invalid.
    """

    wanted: str
    read: Callable[[Any], T | None]

    def __call__(self, value: object) -> T:
        if (found := self.read(value)) is None:
            raise _wanted(self.wanted, value)
        return found

    def or_null(self) -> Check[T | None]:
        other = Scalar(f"{self.wanted} or null", self.read)
        return lambda value: None if value is None else other(value)


def _finite(value: object) -> float | None:
    """Returns a finite float, or None; `json` also parses NaN, Infinity and 1e999."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def _encodable(value: object) -> str | None:
    """Returns a string without lone surrogates, or None; JSON can contain them, but databases and terminals cannot."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


text = Scalar("text", _encodable)
whole = Scalar(
    "an integer from 0 to 2^63 - 1", lambda value: value if type(value) is int and 0 <= value < 2**63 else None
)
_SCALARS: Mapping[Any, Scalar[Any]] = {str: text, int: whole, float: Scalar("a finite number", _finite)}
_SECONDS = Scalar("a finite number of seconds", _finite)


def _of_type(hint: Any, name: str, by_name: Mapping[str, Check[Any]]) -> Check[Any]:
    """Returns the check for the type of a field; names that end in ``_s`` are seconds."""
    if hint in _SCALARS:
        return _SECONDS if hint is float and name.endswith("_s") else _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return maker(hint, by_name)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return one_of(hint)
    if origin is tuple:
        return list_of(_of_type(arguments[0], name, by_name))
    if origin is types.UnionType and arguments[1:] == (types.NoneType,):
        return _SCALARS[arguments[0]].or_null()
    if origin is not None and issubclass(origin, Mapping):
        return map_of(_of_type(arguments[1], name, by_name))
    raise TypeError(f"{name}: there is no check for a field of type {hint}")


def _at(place: str, check: Check[T], value: object) -> T:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _wanted(wanted: str, found: object) -> ValueError:
    shown = repr(found)
    return ValueError(f"{wanted} is wanted, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


FORMAT = 1
SECOND_PASS = 2  # format of a sweep in which lines marked "again" may follow


def record_to_text(record: Record) -> str:
    """Returns one line of JSON, deterministic for the same record.

    Raises:
      ValueError: a time that is not finite, or another value that `record_from_text` would reject.
    """
    entries = [
        {
            "backend": entry.backend,
            "version": entry.version,
            "schedule": _sorted(entry.schedule),
            "predicted_s": entry.predicted_s,
            "measurement": entry.measurement,
        }
        | ({"fingerprint": entry.fingerprint} if entry.fingerprint else {})
        for entry in record.entries
    ]
    fields = _given(record, ("excluded", "stopped")) | {"entries": entries, "versions": _sorted(record.versions)}
    del fields["key"]
    key = vars(record.key) | {"problem": problem_to_json(record.key.problem)}
    return line_of({"format": FORMAT} | key | fields, _record)


def record_from_text(line: str) -> Record:
    """Parses the result of `record_to_text`; unknown names are ignored.

    Raises:
      ValueError: `line` is not a record; the message has the path of the missing or invalid value.
    """
    return _record(parsed(line))


def trial_to_text(trial: Trial) -> str:
    """Returns one line of JSON; raises as `record_to_text` does."""
    fields = _given(trial) | {"schedule": _sorted(trial.schedule)}
    outcome = fields.pop("outcome")
    return line_of(fields | {"failure" if isinstance(outcome, Failure) else "measurement": outcome}, _trial)


def trial_from_text(line: str) -> Trial:
    """Parses the result of `trial_to_text`; raises as `record_from_text` does."""
    return _trial(parsed(line))


def again_to_text(trial: Trial) -> str:
    """Returns one line of JSON for a trial of the second pass; raises as `record_to_text` does."""
    return line_of({"again": True} | json.loads(trial_to_text(trial)), _trial)


def is_again(line: str) -> bool:
    """Whether a line of a recording belongs to its second pass."""
    fields = parsed(line)
    return isinstance(fields, dict) and fields.get("again") is True


def sweep_to_text(sweep: Sweep) -> str:
    """Returns one line of JSON; raises as `record_to_text` does."""
    fields = _given(sweep, ("again", "rounds")) | {
        "problem": problem_to_json(sweep.problem)
    }  # format 1: no second pass
    return line_of({"format": SECOND_PASS if sweep.again else FORMAT} | fields, _sweep)


def sweep_from_text(line: str) -> Sweep:
    """Parses the result of `sweep_to_text`; raises as `record_from_text` does."""
    return _sweep(parsed(line))


def calibration_to_text(calibration: Calibration) -> str:
    """Returns one line of JSON; raises as `record_to_text` does."""
    fields = vars(calibration) | {
        "constants": _sorted(calibration.constants),
        "observations": [vars(o) | {"problem": problem_to_json(o.problem)} for o in calibration.observations],
    }
    return line_of({"format": FORMAT} | fields, _calibration)


def calibrations_from_text(text: str) -> tuple[Calibration, ...]:
    """Parses a JSON list of calibrations; raises as `record_from_text` does."""
    return list_of(_calibration)(parsed(text))


def calibration_from_text(line: str) -> Calibration:
    """Parses the result of `calibration_to_text`; raises as `record_from_text` does."""
    return _calibration(parsed(line))


def _given(value: Any, together: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields without those at their defaults; the fields `together` are at their defaults all, or none."""
    required = object()
    given = {name for name, item in vars(value).items() if item != getattr(type(value), name, required)}
    given |= set(together) if given & set(together) else set()
    return {name: item for name, item in vars(value).items() if name in given}


def _plain(value: Any) -> dict[str, object]:
    """Returns the fields of a nested value, without a worst time if there is none."""
    return {name: item for name, item in vars(value).items() if name != "worst_s" or item is not None}


def _sorted(values: Mapping[str, T]) -> dict[str, T]:
    return dict(sorted(values.items()))


def line_of(fields: Mapping[str, object], check: Check[object]) -> str:
    line = json.dumps(fields, allow_nan=False, default=_plain)
    check(json.loads(line))  # Reject unreadable text when it is written, not when it is read.
    return line


def parsed(line: str) -> object:
    if not isinstance(line, str):  # an SQLite column of type text may hold other types
        raise ValueError(f"text is wanted, found {type(line).__name__}")
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply for a record") from None
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    if line.count("[") + line.count("{") > DEEPEST:
        require_shallow(value)
    return value


def problem_to_json(problem: str) -> object:
    """Returns the problem as a JSON object, for readable diffs, or as text if the object would not restore the text."""
    try:
        fields = json.loads(problem)
        return fields if isinstance(fields, dict) and _canonical(fields) == problem else problem
    except (ValueError, RecursionError):
        return problem


def _canonical(fields: Mapping[str, object], *, allow_nan: bool = True) -> str:
    """Returns the text that `Problem.canonical` would return."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan)


# Decoding follows the types of the fields, except for these names, which mean the same wherever they occur.


def _choice(value: object) -> Choice:
    """Converts lists to tuples, which JSON does not have."""
    if isinstance(value, list):
        return tuple(map(_choice, value))
    if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"a finite number, true, false, null, text or a list of these is wanted, found {value!r:.100}")


def _problem(value: object) -> str:
    if not isinstance(value, dict):
        return text(value)
    try:
        return _canonical(value, allow_nan=False)
    except ValueError:
        raise ValueError(f"finite numbers are wanted, found {_canonical(value)}") from None


BY_NAME: Mapping[str, Check[Any]] = {
    "problem": _problem,
    "backend": text,
    "library": text,
    "schedule": map_of(_choice),
    "versions": map_of(whole),
    "refused": map_of(text),
    "tied": list_of(text),
    "stage": one_of(Stage),
    "key": made_already,
    "outcome": made_already,
}
_KEY = maker(Key, BY_NAME)
_RECORD = maker(Record, {**BY_NAME, "imported": maker(Imported, BY_NAME)})
_TRIAL, _SWEEP, _CALIBRATION = maker(Trial, BY_NAME), maker(Sweep, BY_NAME), maker(Calibration, BY_NAME)
_OUTCOMES: Mapping[str, Check[Any]] = {"failure": maker(Failure, BY_NAME), "measurement": maker(Measurement, BY_NAME)}


def _record(value: object) -> Record:
    fields = formatted(value)
    record = _RECORD({**fields, "key": _KEY(fields)})
    if not record.entries:
        raise ValueError("entries: at least the winner is wanted, found none")
    return record


def _trial(value: object) -> Trial:
    fields = json_object(value)
    name = "failure" if "failure" in fields else "measurement"
    return _TRIAL({**fields, "outcome": field_of(fields, name, _OUTCOMES[name])})


def _sweep(value: object) -> Sweep:
    return _SWEEP(formatted(value, (FORMAT, SECOND_PASS)))


def _calibration(value: object) -> Calibration:
    return _CALIBRATION(formatted(value))


def formatted(value: object, known: tuple[int, ...] = (FORMAT,)) -> Mapping[str, object]:
    fields = json_object(value)
    if (version := field_of(fields, "format", whole)) not in known:
        names = " or ".join(map(str, known))
        raise ValueError(f"this version reads format {names}, found format {version}: upgrade tile-scheduler")
    return fields
