"""Checks records before they are shared: their text, their schedules by today's kernels, and their times."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from scheduler.core import codec, hardware
from scheduler.core.errors import SchedulerError, StoreError
from scheduler.core.hardware import Hardware
from scheduler.core.records import Entry, Key, Record, choice_text
from scheduler.core.text import seconds_text
from scheduler.inspect.verdict import without_prediction
from scheduler.measure.buffers import least_plausible_s
from scheduler.model.constants import calibrations, model_of
from scheduler.model.pruning import illegal
from scheduler.prediction.predict import modelled_s
from scheduler.prediction.transfer import recheck
from scheduler.store import sources, text_files
from search_spaces import load_known
from search_spaces.jax_compat import JAX_VERSION
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# The largest ratio of measured and predicted time, either way, of a kernel and of the library. In 899 measured entries
# of the shipped records the measured time is 0.40 to 1.6 times the prediction for kernels, 0.48 to 3.6 for libraries.
KERNEL_FACTOR, LIBRARY_FACTOR = 3.0, 4.0
# Both are larger by this factor without fitted constants: the shipped estimates reach 0.24 and 0.18.
UNFITTED_FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class RecordFinding:
    """Why a record should not be shared.

    Attributes:
      line: its line in the file, from 1.
      kind: "schema": the text or the key; "legality": the schedules or versions of kernels; "times": a time that the
        chip does not allow, or that differs from the prediction by more than the limit.
    """

    line: int
    kind: Literal["schema", "legality", "times"]
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.kind}: {self.reason}"


def check_file(path: Path) -> tuple[int, list[RecordFinding]]:
    """Returns the number of records in a file, and the findings, at most one per kind and record.

    Raises:
      StoreError: the file cannot be read.
      SchedulerError: a record was made with a later JAX than the installed one, which may lack what kernels need.
    """
    lines = [line for line in enumerate(sources.read(str(path)).text().split("\n"), start=1) if line[1].strip()]
    first_line: dict[Key, int] = {}
    findings: list[RecordFinding] = []
    for number, line in lines:
        try:
            record = codec.record_from_text(line)
            if (first := first_line.setdefault(record.key, number)) != number:
                raise ValueError(f"a second record of {record.key}; the first is line {first}: keep one")
            operation, problem, chip = _key_parts(record)
            _require_schema(line, record)
        except ValueError as error:
            findings.append(RecordFinding(number, "schema", str(error)))
            continue
        _require_jax(record, path)
        if reason := _illegal(operation, problem, chip, record):
            findings.append(RecordFinding(number, "legality", f"{record.key}: {reason}"))
        elif reason := "; ".join(_implausible(operation, problem, chip, record)):
            findings.append(RecordFinding(number, "times", f"{record.key}: {reason}"))
    return len(lines), findings


def check_directory(directory: Path) -> None:
    """Checks the files of a directory together, and its constants and index.

    Raises:
      StoreError: two files have the same key; constants are invalid; or ``index.json``, if there is one, does not
        describe the files.
    """
    text_files.read_records(directory), text_files.read_calibrations(directory)
    place = directory / sources.INDEX
    if place.exists() and sources.read(str(place)).text() != sources.index_text(directory):
        raise StoreError(f"{place} does not describe the files: run tile-scheduler export {directory} --index")


def _key_parts(record: Record) -> tuple[Operation[Any], Problem, Hardware]:
    """Returns the operation, the problem and the chip of a record; raises a ValueError if one is unknown."""
    operation = load_known(record.key.operation)
    problem = operation.problem.from_canonical(record.key.problem)
    if (canonical := problem.canonical()) != record.key.problem:
        raise ValueError(f"the problem is written {canonical}, found {record.key.problem}")
    if (chip := hardware.identified(record.key.hardware)) is None:
        raise ValueError(f"{record.key.hardware} is not in the table of chips: add it to scheduler/core/chip_table.py")
    return operation, problem, chip


def _require_schema(line: str, record: Record) -> None:
    if record.imported is not None:
        raise ValueError("it has the mark of an import: export it, which removes the mark")
    if line != codec.record_to_text(record):
        raise ValueError("the text differs from what export writes: export the record again, and do not edit it")
    for entry in record.entries:
        times = entry.measurement
        if entry.backend not in record.versions:
            raise ValueError(f"{entry.backend} has an entry, but no version")
        if not times.samples_s or min(times.samples_s) <= 0 or times.median_s != statistics.median(times.samples_s):
            raise ValueError(f"median_s of {entry.backend} must be the median of positive samples_s")


def _require_jax(record: Record, path: Path) -> None:
    made = tuple(int(part) for part in re.findall(r"\d{1,9}", record.environment.jax)[:2])
    if made > JAX_VERSION[:2]:
        raise SchedulerError(
            f"{path} has records of jax {record.environment.jax}: check them with that version or a later one"
        )


def _illegal(operation: Operation[Any], problem: Problem, chip: Hardware, record: Record) -> str:
    """Returns why a call would not use the record, or why one of its schedules cannot run; "" if it is valid."""
    if isinstance(found := recheck(operation, problem, chip, record), str):
        return found
    for entry in record.entries:
        if entry.backend not in operation.backends:
            return f"{operation.name} has no backend {entry.backend}"
        kernel = operation.kernel(entry.backend)
        if entry.version != kernel.version:
            return f"the {entry.backend} kernel is version {kernel.version}, and the entry is of {entry.version}"
        if reason := illegal(kernel, problem, chip, entry.schedule):
            return f"{choice_text(entry.backend, entry.schedule)}: {reason}"
    return ""


def _implausible(operation: Operation[Any], problem: Problem, chip: Hardware, record: Record) -> Iterator[str]:
    """Yields why times of a legal record are not plausible: the hardware's limit, and the model's prediction."""
    fitted = calibrations(operation.name, chip, shared_only=True)
    unpredicted = without_prediction(record.entries, record.library)
    for entry in record.entries:
        kernel, time_s = operation.kernel(entry.backend), entry.measurement.median_s
        least_s = 0.0 if record.estimated else least_plausible_s(problem, chip, entry.measurement.l2)
        if time_s <= least_s:
            yield f"{_timed(entry)}, and no kernel can take under {seconds_text(least_s)}"
        if entry.backend in unpredicted:
            continue
        predicted_s = modelled_s(kernel, problem, chip, model_of(operation, kernel, chip, found=fitted), entry.schedule)
        limit = LIBRARY_FACTOR if kernel.library else KERNEL_FACTOR
        limit *= 1 if entry.backend in fitted else UNFITTED_FACTOR
        if predicted_s is not None and abs(math.log(time_s / predicted_s)) > math.log(limit):
            yield f"{_timed(entry)}, and {seconds_text(predicted_s)} is predicted: the limit is a factor of {limit:g}"


def _timed(entry: Entry) -> str:
    return f"{choice_text(entry.backend, entry.schedule)} took {seconds_text(entry.measurement.median_s)}"
