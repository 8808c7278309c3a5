"""Probes: a few measurements on a chip that borrows the constants of a sibling, to correct these constants."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import Hardware, identified
from scheduler.core.records import Calibration, Entry, Environment, Failure, Record
from scheduler.measure.runner import Runner, Task
from scheduler.model.constants import calibrations, model_of, sibling_of
from scheduler.model.pruning import illegal
from scheduler.prediction.predict import modelled_s
from search_spaces import load_known
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Each probe takes some seconds, most of which are compilation.
MOST_PROBES = 16
REPETITIONS = 10


@dataclasses.dataclass(frozen=True)
class Probe:
    """A schedule of a sibling's record, to be timed on this chip.

    Attributes:
      expected_s: the sibling's time, scaled by the model's ratio between both chips.
    """

    operation: Operation[Any]
    problem: Problem
    entry: Entry
    expected_s: float

    @property
    def task(self) -> Task:
        measurement = self.entry.measurement
        return Task(
            self.operation, self.problem, self.entry.backend, self.entry.schedule, REPETITIONS, l2=measurement.l2
        )


def probes(hardware: Hardware, records: Iterable[Record], most: int = MOST_PROBES) -> list[Probe]:
    """Returns the probes of a chip: for each operation, the library and the fastest other entry of typical records.

    Only backends with borrowed constants are probed. The operations take turns, those with the most records first. In
    each operation, records are ordered by the distance of the library's time from its median.

    Args:
      records: measured records of siblings.
    """
    by_operation: dict[str, list[Record]] = {}
    for record in records:
        if not record.estimated and record.library_entry is not None:
            by_operation.setdefault(record.key.operation, []).append(record)
    ordered = sorted(by_operation.items(), key=lambda one: (-len(one[1]), one[0]))
    turns = [_of_operation(name, hardware, some) for name, some in ordered]
    found: list[Probe] = []
    for pairs in itertools.zip_longest(*turns, fillvalue=()):
        for pair in pairs:
            if len(found) + len(pair) > most:
                return found
            found += pair
    return found


def _of_operation(name: str, hardware: Hardware, records: Sequence[Record]) -> Iterator[Sequence[Probe]]:
    """Yields the probes of each record of an operation, typical records first."""
    operation = load_known(name)
    borrowed = {backend for backend, one in calibrations(name, hardware).items() if sibling_of(one, hardware)}

    def library_s(record: Record) -> float:
        assert record.library_entry is not None
        return record.library_entry.measurement.median_s

    middle_s = statistics.median(map(library_s, records))
    for record in sorted(records, key=lambda one: (abs(math.log(library_s(one) / middle_s)), one.key.problem)):
        others = [entry for entry in record.entries if entry.backend != record.library]
        entries = [record.library_entry, min(others, key=lambda e: e.measurement.median_s, default=None)]
        pair = [_probe(operation, hardware, record, entry) for entry in entries if entry and entry.backend in borrowed]
        if found := [probe for probe in pair if probe is not None]:
            yield found


def _probe(operation: Operation[Any], hardware: Hardware, record: Record, entry: Entry) -> Probe | None:
    """Returns the probe of an entry; None if its schedule cannot run here, or its kernel has changed."""
    there, kernel = identified(record.key.hardware), operation.kernel(entry.backend)
    try:
        problem = operation.problem.from_canonical(record.key.problem)
    except ValueError:
        return None
    if there is None or kernel.version != entry.version or illegal(kernel, problem, hardware, entry.schedule):
        return None
    here_s, there_s = (
        modelled_s(kernel, problem, chip, model_of(operation, kernel, chip), entry.schedule)
        for chip in (hardware, there)
    )
    if here_s is None or there_s is None:
        return None
    return Probe(operation, problem, entry, entry.measurement.median_s * here_s / there_s)


def measure(
    runner: Runner, chosen: Sequence[Probe], progress: Callable[[Probe, float | Failure], None]
) -> dict[tuple[str, str], list[float]]:
    """Times probes; returns, by operation and backend, ``log(measured / expected)`` of each.

    Args:
      progress: receives each probe with its time in seconds, or its failure.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for probe in chosen:
        outcome = runner.measure(probe.task)
        if isinstance(outcome, Failure):
            progress(probe, outcome)
            continue
        progress(probe, outcome.median_s)
        which = probe.operation.name, probe.entry.backend
        errors.setdefault(which, []).append(math.log(outcome.median_s / probe.expected_s))
    return errors


def corrected(
    hardware: Hardware, environment: Environment, errors: Mapping[tuple[str, str], Sequence[float]]
) -> list[Calibration]:
    """Returns the borrowed calibrations of probed backends as calibrations of this chip.

    The factor of time is corrected by the median error. The errors by problem remain those of the sibling: they are
    relative to this factor.

    Raises:
      SchedulerError: no probe was measured.
    """
    made = []
    for (name, backend), some in sorted(errors.items()):
        borrowed = calibrations(name, hardware)[backend]
        factor = "library_scale" if load_known(name).kernel(backend).library else "scale"
        constants = dict(borrowed.constants)
        constants[factor] = constants.get(factor, 1.0) * math.exp(statistics.median(some))
        made.append(dataclasses.replace(borrowed, hardware=hardware.id, constants=constants, environment=environment))
    if not made:
        raise SchedulerError(f"no probe ran on {hardware.kind}: nothing was calibrated")
    return made
