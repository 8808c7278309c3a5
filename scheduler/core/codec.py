"""Serialization of records, trials, sweeps and model constants as JSON that diffs and merges; validated when read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from scheduler.core.decoding import (
    DEEPEST,
    Check,
    Scalar,
    field_of,
    json_object,
    list_of,
    made_already,
    maker,
    map_of,
    one_of,
    require_shallow,
    text,
    whole,
)
from scheduler.core.records import (
    LIBRARY,
    Calibration,
    Entry,
    Failure,
    Key,
    Measurement,
    Record,
    Stage,
    Sweep,
    Trial,
    Verdict,
)
from search_spaces.space import Choice

FORMAT = 1
SECOND_PASS = 2  # format of a sweep in which lines marked "again" may follow

T = TypeVar("T")


def record_to_text(record: Record) -> str:
    """Returns one line of JSON, deterministic for the same record.

    Raises:
      ValueError: a time that is not finite, or another value that `record_from_text` would reject.
    """
    return line_of(
        {
            "format": FORMAT,
            "operation": record.key.operation,
            "hardware": record.key.hardware,
            "problem": problem_to_json(record.key.problem),
            "entries": [
                {
                    "backend": entry.backend,
                    "version": entry.version,
                    "schedule": _sorted(entry.schedule),
                    "predicted_s": entry.predicted_s,
                    "measurement": vars(entry.measurement),
                }
                | _given(fingerprint=entry.fingerprint)
                for entry in record.entries
            ],
            "versions": _sorted(record.versions),
            "environment": vars(record.environment),
            "budget": record.budget,
            "tried": record.tried,
            "space": record.space,
        }
        | ({"confidence": vars(record.confidence)} if record.confidence != Verdict() else {})
        | ({"excluded": record.excluded, "stopped": record.stopped} if (record.excluded or record.stopped) else {})
        | (
            {"failed": [vars(lost) | {"failure": vars(lost.failure)} for lost in record.failed]}
            if record.failed
            else {}
        )
        | ({"library": record.library} if record.library != LIBRARY else {})
        | ({"brief": True} if record.brief else {})
        | _given(reference=record.reference),
        _record,
    )


def record_from_text(line: str) -> Record:
    """Parses the result of `record_to_text`; unknown names are ignored.

    Raises:
      ValueError: `line` is not a record; the message has the path of the missing or invalid value.
    """
    return _record(parsed(line))


def trial_to_text(trial: Trial) -> str:
    """Returns one line of JSON; raises as `record_to_text` does."""
    outcome = trial.outcome
    return line_of(
        {
            "number": trial.number,
            "backend": trial.backend,
            "version": trial.version,
            "schedule": _sorted(trial.schedule),
            "predicted_s": trial.predicted_s,
        }
        | _given(fingerprint=trial.fingerprint)
        | {"failure" if isinstance(outcome, Failure) else "measurement": vars(outcome)},
        _trial,
    )


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
    fields = vars(sweep) | {"problem": problem_to_json(sweep.problem), "environment": vars(sweep.environment)}
    if not (sweep.again or sweep.rounds):  # format 1 has no second pass
        fields = {name: value for name, value in fields.items() if name not in ("again", "rounds")}
    if sweep.library == LIBRARY:
        del fields["library"]
    return line_of({"format": SECOND_PASS if sweep.again else FORMAT} | fields, _sweep)


def sweep_from_text(line: str) -> Sweep:
    """Parses the result of `sweep_to_text`; raises as `record_from_text` does."""
    return _sweep(parsed(line))


def calibration_to_text(calibration: Calibration) -> str:
    """Returns one line of JSON; raises as `record_to_text` does."""
    fields = vars(calibration) | {
        "constants": _sorted(calibration.constants),
        "environment": vars(calibration.environment),
        "observations": [vars(o) | {"problem": problem_to_json(o.problem)} for o in calibration.observations],
        "variants": list(calibration.variants),
    }
    return line_of({"format": FORMAT} | fields, _calibration)


def calibrations_from_text(text: str) -> tuple[Calibration, ...]:
    """Parses a JSON list of calibrations; raises as `record_from_text` does."""
    return list_of(_calibration)(parsed(text))


def calibration_from_text(line: str) -> Calibration:
    """Parses the result of `calibration_to_text`; raises as `record_from_text` does."""
    return _calibration(parsed(line))


def _given(**texts: str) -> dict[str, str]:
    """Returns the items with a nonempty text."""
    return {name: value for name, value in texts.items() if value}


def _sorted(values: Mapping[str, T]) -> dict[str, T]:
    return dict(sorted(values.items()))


def line_of(fields: Mapping[str, object], check: Check[object]) -> str:
    line = json.dumps(fields, allow_nan=False)
    check(json.loads(line))  # Reject unreadable text when it is written, not when it is read.
    return line


def parsed(line: str) -> object:
    if not isinstance(line, str):  # an SQLite column of type text may hold other types
        raise ValueError(f"text is wanted, found {type(line).__name__}")
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("JSON nested too deeply to be a record") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
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
    "brief": Scalar("true or false", lambda value: value if isinstance(value, bool) else None),
}
_ENTRIES = list_of(maker(Entry, BY_NAME, optional=("fingerprint",)))
_KEY = maker(Key, BY_NAME)
_RECORD = maker(
    Record,
    {**BY_NAME, "entries": _ENTRIES},
    optional=("confidence", "excluded", "stopped", "failed", "library", "brief", "reference"),
)
_TRIAL = maker(Trial, BY_NAME, optional=("fingerprint",))
_SWEEP = maker(Sweep, BY_NAME, optional=("again", "rounds", "library"))
_CALIBRATION = maker(Calibration, BY_NAME, optional=("observations", "variants"))
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
        raise ValueError(f"format {version} is not format {names}, which this version reads: upgrade tile-scheduler")
    return fields
