"""Finds valid records of similar problems, and weights what they imply for a problem that was not measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from scheduler.core.arguments import allowed_backends
from scheduler.core.errors import MalformedRecord
from scheduler.core.fingerprints import Tracer, changed
from scheduler.core.hardware import Hardware, identified, siblings
from scheduler.core.neighbours import Near
from scheduler.core.records import Entry, Record, key_of
from scheduler.model.pruning import illegal, is_verified
from search_spaces.operation import Operation
from search_spaces.problem import Problem

if TYPE_CHECKING:
    from scheduler.store.store import Store

# The maximum distance, in doublings of all sizes together, at which a problem's winner is worth a trial.
WORTH_A_TRIAL = 3.0
# The maximum distance at which a record is used to predict the times of another problem without a trial.
TELLING = 1.0
# The distance of the same problem on another chip, in doublings: its winner and the model's error there apply here
# almost as well.
OTHER_CHIP = 0.25
# The maximum number of neighbours.
MOST = 3
# Each field with a default doubles the number of ways to write a problem.
MOST_SPELLINGS = 32


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A similar problem with its record.

    Attributes:
      problem: the similar problem.
      record: its record.
      doublings: its distance (`distance`), plus `OTHER_CHIP` for a record of a sibling.
      hardware: the chip of the record: this one or a sibling.
    """

    problem: Problem
    record: Record
    doublings: float
    hardware: Hardware

    @property
    def weight(self) -> float:
        """The share of the model's error there that is expected here; it halves with each doubling."""
        return 0.5**self.doublings

    def best(self, backend: str) -> Entry | None:
        return self.record.best(frozenset({backend}))


def distance(one: Problem, other: Problem) -> float:
    """Returns the doublings between two problems: ``sum |log2(size / size)|`` over the numbers in `coordinates`.

    Each doubling of `Problem.row_alignment` counts as one, too: other kernels are fast with unaligned rows.

    The distance is infinite if the problems differ in anything other than numbers, or in a number that is not positive.
    """
    total = 0.0
    here, there = one.coordinates(), other.coordinates()
    if here.keys() != there.keys():
        return math.inf
    for name, mine in here.items():
        its = there[name]
        if mine == its:
            continue
        if isinstance(mine, bool | str) or isinstance(its, bool | str) or min(mine, its) <= 0:
            return math.inf
        total += abs(math.log2(mine / its))
    return total + abs(math.log2(one.row_alignment / other.row_alignment))


def near(operation: Operation[Any], problem: Problem, hardware: Hardware, within: float, most: int = MOST) -> Near:
    """Returns the store query for the records that `nearest` would select from all records.

    Args:
      within: the maximum distance in doublings.
      most: the maximum number of records.
    """

    def from_here(text: str) -> float:
        try:
            return distance(problem, operation.problem.from_canonical(text))
        except ValueError:  # written by another version of the operation
            return math.inf

    return Near(operation.name, hardware.id, _spellings(problem, within), from_here, within, most)


def _spellings(problem: Problem, within: float) -> list[tuple[str, float]]:
    """Returns the canonical text and its variants, each with its distance in doublings.

    A variant writes out fields that have their default, or leaves out fields that are near it. Canonical texts omit
    defaults, so if one of two similar problems has a default, the numbers in their texts do not pair.
    """
    fields = problem.non_default_fields()
    found: list[tuple[dict[str, Any], float]] = [(dict(fields), 0.0)]
    for field in dataclasses.fields(problem):
        default, value = _number(field.default), _number(getattr(problem, field.name))
        if default is None or value is None:
            continue
        apart = abs(math.log2(value / default))
        others = [
            (fields | {field.name: field.default}, doublings)
            if apart == 0
            else ({name: fields[name] for name in fields if name != field.name}, doublings + apart)
            for fields, doublings in found
        ]
        found += [other for other in others if other[1] <= within]
        if len(found) > MOST_SPELLINGS:
            break
    return [(json.dumps(fields, sort_keys=True, separators=(",", ":")), doublings) for fields, doublings in found]


def _number(value: Any) -> int | None:
    """Converts a positive integer, or its text, to int; None for any other value."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if type(value) is int and value > 0 else None


def nearest(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    records: Iterable[Record],
    within: float,
    most: int = MOST,
) -> list[Neighbour]:
    """Returns the most similar problems among `records`, nearest first, without `problem` itself on this chip.

    Args:
      records: records of this operation on this chip and on its siblings.
      within: the maximum distance in doublings.
      most: the maximum number of problems.
    """
    found = []
    for record in records:
        try:
            other = operation.problem.from_canonical(record.key.problem)
        except ValueError:  # written by another version of the operation
            continue
        doublings, chip = distance(problem, other), hardware
        if record.key.hardware != hardware.id:
            doublings, chip = doublings + OTHER_CHIP, identified(record.key.hardware) or hardware
        if 0 < doublings <= within:
            found.append(Neighbour(other, record, doublings, chip))
    return sorted(found, key=lambda near: (near.doublings, near.record.key.problem))[:most]


def telling_records(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> list[Record]:
    """Returns the records of one store for a prediction: of the problem itself, and of the most similar problems.

    Without a record of a similar problem on this chip, those of the problem and of similar ones on a sibling are
    included. Malformed records are skipped.

    Raises:
      StoreError: the store cannot be read.
    """
    with store.reading():
        similar = _similar(store, operation, problem, hardware)
        for chip in siblings(hardware):
            if similar:
                break
            similar = [*_own(store, operation, problem, chip), *_similar(store, operation, problem, chip)]
        return [*_own(store, operation, problem, hardware), *similar]


def _similar(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> list[Record]:
    question = near(operation, problem, hardware, within=TELLING)
    return store.nearest(question, estimated=False) or store.nearest(question, estimated=True)


def _own(store: Store, operation: Operation[Any], problem: Problem, hardware: Hardware) -> list[Record]:
    with contextlib.suppress(MalformedRecord):  # a direct request for this record reports the error
        if (record := store.get(key_of(operation, problem, hardware))) is not None:
            return [record]
    return []


# ------------------------------------------------------------------------------
# Checks whether a stored record is still valid.


def recheck(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    record: Record,
    *,
    backends: frozenset[str] | None = None,
    tracer: Tracer | None = None,
) -> Entry | str:
    """Returns the entry of a stored record to use now, or the reason why the record is no longer valid.

    The reason is a `Changed` if code without its own version was edited. To find this out, `tracer` traces the kernels;
    None traces them in this process.

    An imported record (`Record.imported`) names a schedule that never ran on this machine, and its times are a claim of
    its author. It is used under the condition for a schedule of the model: beside the library, only a kernel that this
    package has verified on the architecture. Wrong results are thus as unlikely as without the record, and a false
    claim costs time only. `verify` or a search, both of which check the results on the device, end this condition.
    """
    allowed = allowed_backends(operation, backends)
    for kernel in operation.kernels_on(hardware.target.platform):
        then = record.versions.get(kernel.backend)
        if kernel.backend not in allowed and not kernel.library:
            continue
        if then is None and kernel.supports(problem, hardware.target) is None:
            return f"it was measured before the {kernel.backend} kernel existed"
        if then is not None and then != kernel.version:
            return f"the {kernel.backend} kernel is now version {kernel.version}, and version {then} was measured"
    entry = record.best(allowed)
    if entry is None:
        failed = "; ".join(str(lost) for lost in record.failed if lost.backend in allowed)
        return failed or f"none of {', '.join(sorted(allowed))} ran when it was measured"
    if reason := illegal(operation.kernel(entry.backend), problem, hardware, entry.schedule):
        return reason
    if reason := _unverified(operation, problem, hardware, record, entry, allowed):
        return reason
    best = {one.backend: one for one in reversed(record.entries) if one.backend in allowed}
    edited = changed(
        operation,
        problem,
        hardware.target,
        [entry, *(one for one in best.values() if one is not entry)],
        reference=record.reference,
        jax_version=record.environment.jax,
        legal=record.legal,
        tracer=tracer,
    )
    return edited or entry


def _unverified(
    operation: Operation[Any],
    problem: Problem,
    hardware: Hardware,
    record: Record,
    entry: Entry,
    allowed: frozenset[str],
) -> str | None:
    """Returns why an imported record cannot be used before it is verified on this machine, or None."""
    kernel = operation.kernel(entry.backend)
    if record.imported is None or kernel.library or operation.library.backend not in allowed:
        return None
    if is_verified(kernel, problem, hardware, entry.schedule):
        return None
    return (
        f"it was imported from {record.imported.source}, and {kernel.backend} is not verified on "
        f"{hardware.architecture}: run tile-scheduler verify"
    )
