"""Records, trials, sweeps and the model's constants as text: JSON that diffs and merges, read back fully checked."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scheduler.core.aliases import STAGES
from scheduler.core.errors import StoreError
from scheduler.core.records import (
    L2,
    AllFailed,
    Calibration,
    Clock,
    Entry,
    Environment,
    Failure,
    Key,
    Measurement,
    Record,
    Schedule,
    Stage,
    Sweep,
    Trial,
    Verdict,
)
from search_spaces import aliases
from search_spaces.space import Choice

FORMAT = 1
SECOND_PASS = 2  # of a sweep: lines marked "again" may follow
_ERRORS_SHOWN = 10
_CONSTANTS = "constants.json"

T = TypeVar("T")
Check = Callable[[object], T]


def record_to_text(record: Record) -> str:
    """One line of JSON, always the same for the same record.

    Raises:
      ValueError: a time that is not finite, or another value that `record_from_text` would refuse.
    """
    return _line(
        {
            "format": FORMAT,
            "operation": record.key.operation,
            "hardware": record.key.hardware,
            "problem": _problem_to_json(record.key.problem),
            "entries": [
                {
                    "backend": entry.backend,
                    "version": entry.version,
                    "schedule": _sorted(entry.schedule),
                    "predicted_s": entry.predicted_s,
                    "measurement": vars(entry.measurement),
                }
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
        ),
        _record,
    )


def record_from_text(line: str) -> Record:
    """The inverse of `record_to_text`; names that it does not know are ignored.

    Raises:
      ValueError: `line` is no record; the message leads to the value that is missing or wrong.
    """
    return _record(_json(line))


def trial_to_text(trial: Trial) -> str:
    """One line of JSON; raises as `record_to_text` does."""
    outcome = trial.outcome
    return _line(
        {
            "number": trial.number,
            "backend": trial.backend,
            "version": trial.version,
            "schedule": _sorted(trial.schedule),
            "predicted_s": trial.predicted_s,
        }
        | {"failure" if isinstance(outcome, Failure) else "measurement": vars(outcome)},
        _trial,
    )


def trial_from_text(line: str) -> Trial:
    """The inverse of `trial_to_text`; raises as `record_from_text` does."""
    return _trial(_json(line))


def again_to_text(trial: Trial) -> str:
    """One line of JSON, of a second pass; raises as `record_to_text` does."""
    return _line({"again": True} | json.loads(trial_to_text(trial)), _trial)


def is_again(line: str) -> bool:
    """Whether a line of a recording is of its second pass."""
    fields = _json(line)
    return isinstance(fields, dict) and fields.get("again") is True


def sweep_to_text(sweep: Sweep) -> str:
    """One line of JSON; raises as `record_to_text` does."""
    fields = vars(sweep) | {"problem": _problem_to_json(sweep.problem), "environment": vars(sweep.environment)}
    if not (sweep.again or sweep.rounds):  # readers of format 1 know of no second pass
        fields = {name: value for name, value in fields.items() if name not in ("again", "rounds")}
    return _line({"format": SECOND_PASS if sweep.again else FORMAT} | fields, _sweep)


def sweep_from_text(line: str) -> Sweep:
    """The inverse of `sweep_to_text`; raises as `record_from_text` does."""
    return _sweep(_json(line))


def calibration_to_text(calibration: Calibration) -> str:
    """One line of JSON; raises as `record_to_text` does."""
    fields = vars(calibration) | {
        "constants": _sorted(calibration.constants),
        "environment": vars(calibration.environment),
    }
    return _line({"format": FORMAT} | fields, _calibration)


def calibration_from_text(line: str) -> Calibration:
    """The inverse of `calibration_to_text`; raises as `record_from_text` does."""
    return _calibration(_json(line))


def schedule_to_text(schedule: Schedule) -> str:
    return json.dumps(_sorted(schedule))


def label_of(backend: str, schedule: Schedule) -> str:
    """What a candidate is called in a race, in `Verdict.tied` and in its notes; stored, so it stays as it is."""
    return f"{backend} {schedule_to_text(schedule)}"


def export_text(records: Iterable[Record]) -> str:
    """JSON lines, one record each, sorted by operation, hardware and problem."""
    return "".join(f"{record_to_text(record)}\n" for record in sorted(records, key=_order))


def import_text(text: str, source: str = "") -> list[Record]:
    """The records of `export_text`, in the order of their lines; empty lines are skipped.

    Args:
      text: JSON lines.
      source: where they come from, to lead the error message.

    Raises:
      StoreError: some line is no record, or a second one of the same key; the message has a sentence for each.
    """
    records: list[Record] = []
    first_line: dict[Key, int] = {}
    errors: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = record_from_text(line)
            if (first := first_line.setdefault(record.key, number)) != number:
                raise ValueError(f"a second record of {record.key}; the first is line {first}: keep one")
            records.append(record)
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f"\n... and {len(errors) - _ERRORS_SHOWN} more" if len(errors) > _ERRORS_SHOWN else ""
        raise StoreError(
            f"{source or 'the text'} is not made of records, one JSON object a line:\n"
            + "\n".join(errors[:_ERRORS_SHOWN])
            + more
        )
    return records


def read_records(directory: Path) -> list[Record]:
    """Every record under `directory`, sorted.

    Raises:
      StoreError: no such directory, a file that is not made of records, or two files with the same key.
    """
    if not directory.is_dir():
        raise StoreError(f"there is no directory {directory} to read records from")
    where: dict[Key, Path] = {}
    records: list[Record] = []
    for path in sorted(directory.glob("*/*.jsonl")):
        for record in _read(path):
            if (first := where.setdefault(record.key, path)) != path:
                raise StoreError(f"{first} and {path} both hold {record.key}; keep one")
            records.append(record)
    return sorted(records, key=_order)


def read_calibrations(directory: Path) -> list[Calibration]:
    """Every calibration under `directory` (``<hardware>/constants.json``), sorted.

    Raises:
      StoreError: a file that is not made of calibrations, or two of one kernel on one chip.
    """
    found: dict[tuple[str, str, str], Calibration] = {}
    for path in sorted(directory.glob(f"*/{_CONSTANTS}")):
        try:
            items = _list_of(_calibration)(_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the model's constants from {path}: {error}") from error
        for item in items:
            if _kernel_on_chip(item) in found:
                raise StoreError(
                    f"{path} is a second one with constants of {' '.join(_kernel_on_chip(item))}; keep one"
                )
            found[_kernel_on_chip(item)] = item
    return [found[which] for which in sorted(found)]


def add_calibrations(directory: Path, calibrations: Iterable[Calibration]) -> list[Path]:
    """Write `calibrations` under `directory`, in place of older ones of the same kernels on the same chips.

    Returns:
      the files written, one per device, a constant a line.

    Raises:
      StoreError: what is there is not made of calibrations, or cannot be written.
    """
    kept = {_kernel_on_chip(item): item for item in read_calibrations(directory)}
    new = {_kernel_on_chip(item): item for item in calibrations}
    written = []
    for hardware in sorted({item.hardware for item in new.values()}):
        lines = [
            json.loads(calibration_to_text(item))
            for _, item in sorted((kept | new).items())
            if item.hardware == hardware
        ]
        path = directory / _slug(hardware) / _CONSTANTS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8", newline="\n")
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        written.append(path)
    return written


def add_records(directory: Path, records: Iterable[Record]) -> list[Path]:
    """Write `records` among those under `directory`, in place of older ones of the same key.

    Returns:
      the files written, one per device and operation: ``<hardware>/<operation>.jsonl``.

    Raises:
      StoreError: a file that is there is not made of records, or cannot be written.
    """
    files: dict[Path, list[Record]] = {}
    for record in records:
        path = directory / _slug(record.key.hardware) / f"{_slug(record.key.operation)}.jsonl"
        files.setdefault(path, []).append(record)
    for path, new in files.items():
        kept = {record.key: record for record in (_read(path) if path.exists() else [])}
        kept.update((record.key, record) for record in new)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(export_text(kept.values()), encoding="utf-8", newline="\n")
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
    return sorted(files)


def _read(path: Path) -> list[Record]:
    try:
        return import_text(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read records from {path}: {error}") from error


def _kernel_on_chip(calibration: Calibration) -> tuple[str, str, str]:
    return calibration.hardware, calibration.operation, calibration.backend


def _order(record: Record) -> tuple[str, str, str]:
    return record.key.operation, record.key.hardware, record.key.problem


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "unnamed"


def _sorted(values: Mapping[str, T]) -> dict[str, T]:
    return dict(sorted(values.items()))


def _line(fields: Mapping[str, object], check: Check[object]) -> str:
    line = json.dumps(fields, allow_nan=False)
    check(json.loads(line))  # What could not be read again is refused now, not when it is needed.
    return line


def _json(line: str) -> object:
    try:
        value: object = json.loads(line)
    except RecursionError:
        raise ValueError("JSON nested too deeply to be a record") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    return value


def _problem_to_json(problem: str) -> object:
    """The problem as a JSON object, which a reviewer reads more easily; its text, where that would not restore it."""
    try:
        fields = json.loads(problem)
    except (ValueError, RecursionError):
        return problem
    return fields if isinstance(fields, dict) and _canonical(fields) == problem else problem


def _canonical(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))  # as `Problem.canonical` writes it


# Decoding. Each check takes a parsed JSON value and returns it typed, or raises a ValueError that says what was wanted;
# `_field` and `_list_of` lead to the place.


def _record(value: object) -> Record:
    fields = _formatted(value)
    entries = _field(fields, "entries", _list_of(_entry))
    if not entries:
        raise ValueError("entries: at least the winner is wanted, found none")
    return Record(
        key=Key(
            operation=_field(fields, "operation", _text),
            hardware=_field(fields, "hardware", _text),
            problem=_field(fields, "problem", _problem),
        ),
        entries=entries,
        versions=_field(fields, "versions", _by_backend(_whole)),
        environment=_field(fields, "environment", _environment),
        budget=_field(fields, "budget", _whole),
        tried=_field(fields, "tried", _whole),
        space=_field(fields, "space", _whole),
        confidence=_field(fields, "confidence", _verdict) if "confidence" in fields else Verdict(),
        excluded=_field(fields, "excluded", _whole) if "excluded" in fields else 0,
        stopped=_field(fields, "stopped", _text) if "stopped" in fields else "",
        failed=_field(fields, "failed", _list_of(_all_failed)) if "failed" in fields else (),
    )


def _calibration(value: object) -> Calibration:
    fields = _formatted(value)
    return Calibration(
        hardware=_field(fields, "hardware", _text),
        operation=_field(fields, "operation", _text),
        backend=_field(fields, "backend", _backend),
        version=_field(fields, "version", _whole),
        constants=_field(fields, "constants", _map_of(_number)),
        problems=_field(fields, "problems", _whole),
        trials=_field(fields, "trials", _whole),
        error=_field(fields, "error", _number),
        environment=_field(fields, "environment", _environment),
    )


def _entry(value: object) -> Entry:
    fields = _object(value)
    return Entry(
        backend=_field(fields, "backend", _backend),
        version=_field(fields, "version", _whole),
        schedule=_field(fields, "schedule", _schedule),
        measurement=_field(fields, "measurement", _measurement),
        predicted_s=_field(fields, "predicted_s", _seconds),
    )


def _trial(value: object) -> Trial:
    fields = _object(value)
    failed = "failure" in fields
    return Trial(
        number=_field(fields, "number", _whole),
        backend=_field(fields, "backend", _backend),
        version=_field(fields, "version", _whole),
        schedule=_field(fields, "schedule", _schedule),
        outcome=_field(fields, "failure", _failure) if failed else _field(fields, "measurement", _measurement),
        predicted_s=_field(fields, "predicted_s", _seconds),
    )


def _sweep(value: object) -> Sweep:
    fields = _formatted(value, (FORMAT, SECOND_PASS))
    return Sweep(
        operation=_field(fields, "operation", _text),
        problem=_field(fields, "problem", _problem),
        platform=_field(fields, "platform", _text),
        kind=_field(fields, "kind", _text),
        architecture=_field(fields, "architecture", _text),
        cores=_field(fields, "cores", _whole),
        environment=_field(fields, "environment", _environment),
        versions=_field(fields, "versions", _by_backend(_whole)),
        refused=_field(fields, "refused", _by_backend(_text)),
        space=_field(fields, "space", _whole),
        dropped=_field(fields, "dropped", _map_of(_whole)),
        legal=_field(fields, "legal", _whole),
        sample=_field(fields, "sample", lambda value: None if value is None else _whole(value)),
        seed=_field(fields, "seed", _whole),
        repetitions=_field(fields, "repetitions", _whole),
        again=_field(fields, "again", _whole) if "again" in fields else 0,
        rounds=_field(fields, "rounds", _whole) if "rounds" in fields else 0,
    )


def _measurement(value: object) -> Measurement:
    fields = _object(value)
    return Measurement(
        median_s=_field(fields, "median_s", _seconds),
        samples_s=_field(fields, "samples_s", _list_of(_seconds)),
        clock=_field(fields, "clock", _one_of(Clock)),
        l2=_field(fields, "l2", _one_of(L2)),
    )


def _verdict(value: object) -> Verdict:
    fields = _object(value)
    return Verdict(
        rounds=_field(fields, "rounds", _whole),
        tied=_field(fields, "tied", _list_of(_label)),
        margin_low=_field(fields, "margin_low", _share_or_none),
        margin_high=_field(fields, "margin_high", _share_or_none),
        drift=_field(fields, "drift", _number),
        notes=_field(fields, "notes", _list_of(_text)),
    )


def _failure(value: object) -> Failure:
    fields = _object(value)
    return Failure(stage=_field(fields, "stage", _stage), detail=_field(fields, "detail", _text))


def _stage(value: object) -> Stage:
    return _one_of(Stage)(STAGES.get(value, value) if isinstance(value, str) else value)


def _all_failed(value: object) -> AllFailed:
    fields = _object(value)
    return AllFailed(
        backend=_field(fields, "backend", _backend),
        tried=_field(fields, "tried", _whole),
        failure=_field(fields, "failure", _failure),
        alike=_field(fields, "alike", _whole),
    )


def _environment(value: object) -> Environment:
    fields = _object(value)
    return Environment(
        jax=_field(fields, "jax", _text),
        jaxlib=_field(fields, "jaxlib", _text),
        driver=_field(fields, "driver", _text),
        date=_field(fields, "date", _text),
    )


def _formatted(value: object, known: tuple[int, ...] = (FORMAT,)) -> Mapping[str, object]:
    fields = _object(value)
    if (version := _field(fields, "format", _whole)) not in known:
        names = " or ".join(map(str, known))
        raise ValueError(f"format {version} is not format {names}, which this version reads: upgrade tile-scheduler")
    return fields


def _problem(value: object) -> str:
    return _canonical(value) if isinstance(value, dict) else _text(value)


def _field(fields: Mapping[str, object], name: str, check: Check[T]) -> T:
    if name not in fields:
        raise ValueError(f"{name} is missing")
    return _at(name, check, fields[name])


def _at(place: str, check: Check[T], value: object) -> T:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _list_of(check: Check[T]) -> Check[tuple[T, ...]]:
    def check_list(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wanted("a list", value)
        return tuple(_at(f"item {index}", check, item) for index, item in enumerate(value))

    return check_list


def _map_of(check: Check[T]) -> Check[dict[str, T]]:
    return lambda value: {name: _at(name, check, item) for name, item in _object(value).items()}


def _by_backend(check: Check[T]) -> Check[dict[str, T]]:
    return lambda value: {aliases.backend(name): item for name, item in _map_of(check)(value).items()}


def _one_of(literal: Any) -> Check[Any]:
    options = typing.get_args(literal)

    def check_option(value: object) -> object:
        if value not in options:
            raise _wanted(f"one of {', '.join(options)}", value)
        return value

    return check_option


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wanted("a JSON object", value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _wanted("text", value)
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _wanted("a whole number of at most 63 bits", value)
    return value


def _seconds(value: object) -> float:
    return _finite(value, "a finite number of seconds")


def _number(value: object) -> float:
    return _finite(value, "a finite number")


def _share_or_none(value: object) -> float | None:
    return None if value is None else _finite(value, "a finite number or null")


def _finite(value: object, wanted: str) -> float:
    """`json` also reads NaN, Infinity and 1e999."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise _wanted(wanted, value)
    return value


def _choice(value: object) -> Choice:
    if not isinstance(value, (int, bool, str)):
        raise _wanted("a whole number, true, false or text", value)
    return value


def _backend(value: object) -> str:
    return aliases.backend(_text(value))


def _schedule(value: object) -> dict[str, Choice]:
    return aliases.schedule(_map_of(_choice)(value))


def _label(value: object) -> str:
    """As `label_of` writes it today; words of another form stay as they are."""
    backend, _, schedule = _text(value).partition(" ")
    try:
        return label_of(_backend(backend), _schedule(json.loads(schedule)))
    except ValueError:
        return _text(value)


def _wanted(wanted: str, found: object) -> ValueError:
    text = repr(found)
    return ValueError(f"{wanted} is wanted, found {text if len(text) <= 60 else text[:57] + '...'}")
