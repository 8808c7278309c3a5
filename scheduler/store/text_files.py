"""Text directories with records (``<hardware>/<operation>.jsonl``) and the model's constants."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.files import read_text, replace_text
from scheduler.core.records import Calibration, Key, Record

_ERRORS_SHOWN = 10
_CONSTANTS = "constants.json"


def export_text(records: Iterable[Record]) -> str:
    """Returns records as JSON lines, sorted by operation, hardware and problem.

    The text does not say which records were imported, because each store marks what it imports.
    """
    exported = (dataclasses.replace(record, imported=None) for record in sorted(records, key=_order))
    return "".join(f"{codec.record_to_text(record)}\n" for record in exported)


def import_text(text: str, source: str = "") -> list[Record]:
    """Parses the records of `export_text`, in order; empty lines are skipped.

    Args:
      text: JSON lines.
      source: their origin, for the error message.

    Raises:
      StoreError: a line is not a record, or repeats the key of another; the message has a sentence for each such line.
    """
    records: list[Record] = []
    first_line: dict[Key, int] = {}
    errors: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = codec.record_from_text(line)
            if (first := first_line.setdefault(record.key, number)) != number:
                raise ValueError(f"a second record of {record.key}; the first is line {first}: keep one")
            records.append(record)
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        more = f"\n... and {len(errors) - _ERRORS_SHOWN} more" if len(errors) > _ERRORS_SHOWN else ""
        raise StoreError(
            f"{source or 'the text'} must have one record per line as a JSON object:\n"
            + "\n".join(errors[:_ERRORS_SHOWN])
            + more
        )
    return records


def read_records(directory: Path) -> list[Record]:
    """Returns all records under `directory`, sorted.

    Raises:
      StoreError: the directory does not exist, a file has invalid records, or two files have the same key.
    """
    if not directory.is_dir():
        raise StoreError(f"the directory of records {directory} does not exist")
    where: dict[Key, Path] = {}
    records: list[Record] = []
    for path in sorted(directory.glob("*/*.jsonl")):
        for record in _read(path):
            if (first := where.setdefault(record.key, path)) != path:
                raise StoreError(f"{first} and {path} both have {record.key}; keep one")
            records.append(record)
    return sorted(records, key=_order)


def read_calibrations(directory: Path) -> list[Calibration]:
    """Returns all calibrations under `directory` (``<hardware>/constants.json``), sorted.

    Raises:
      StoreError: a file has invalid calibrations, or there are two for one kernel on one chip.
    """
    found: dict[tuple[str, str, str], Calibration] = {}
    for path in sorted(directory.glob(f"*/{_CONSTANTS}")):
        try:
            items = codec.calibrations_from_text(read_text(path))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the model's constants from {path}: {error}") from error
        for item in items:
            if _kernel_on_chip(item) in found:
                raise StoreError(
                    f"{path} is a second file with constants of {' '.join(_kernel_on_chip(item))}; keep one"
                )
            found[_kernel_on_chip(item)] = item
    return [found[which] for which in sorted(found)]


def add_calibrations(directory: Path, calibrations: Iterable[Calibration]) -> list[Path]:
    """Writes `calibrations` under `directory`, replacing older ones of the same kernels on the same chips.

    Returns:
      the written files, one per device, with one observation per line.

    Raises:
      StoreError: existing files are invalid, or cannot be written.
    """
    kept = {_kernel_on_chip(item): item for item in read_calibrations(directory)}
    new = {_kernel_on_chip(item): item for item in calibrations}
    written = []
    for hardware in sorted({item.hardware for item in new.values()}):
        items = [_laid_out(item) for _, item in sorted((kept | new).items()) if item.hardware == hardware]
        path = directory / _slug(hardware) / _CONSTANTS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, "[\n" + ",\n".join(items) + "\n]\n")
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        written.append(path)
    return written


def add_records(directory: Path, records: Iterable[Record]) -> list[Path]:
    """Writes `records` under `directory`, replacing older ones of the same keys.

    Returns:
      the written files, one per device and operation: ``<hardware>/<operation>.jsonl``.

    Raises:
      StoreError: an existing file is invalid, or cannot be written.
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
            replace_text(path, export_text(kept.values()))
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error
    return sorted(files)


def _read(path: Path) -> list[Record]:
    try:
        return import_text(read_text(path), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read records from {path}: {error}") from error


def _laid_out(calibration: Calibration) -> str:
    """Formats a calibration with one field per line, and one item of a list per line."""
    fields = []
    for name, value in json.loads(codec.calibration_to_text(calibration)).items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"   {json.dumps(item)}" for item in value) + "\n  ]"
        fields.append(f"  {json.dumps(name)}: {text}")
    return " {\n" + ",\n".join(fields) + "\n }"


def _kernel_on_chip(calibration: Calibration) -> tuple[str, str, str]:
    return calibration.hardware, calibration.operation, calibration.backend


def _order(record: Record) -> tuple[str, str, str]:
    return record.key.operation, record.key.hardware, record.key.problem


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-") or "unnamed"
