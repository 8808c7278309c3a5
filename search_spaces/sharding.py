"""Sharding of a problem over the devices of a mesh: the local problem of each device, and the sums over devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Generic, TypeVar

from search_spaces.problem import Problem, as_tuple

P = TypeVar("P", bound=Problem)
# Mesh axes over which one axis of an array is divided, major first.
MeshAxes = tuple[str, ...]
# The mesh axes of each axis of an array.
Spec = tuple[MeshAxes, ...]
# The letters of one axis of an array: several if the axis is a product of several, major first.
Letters = tuple[str, ...]


def with_extents(problem: P, extents: Mapping[str, int]) -> P:
    """Returns `problem` with those of its fields replaced that letters name."""
    fields = {field.name for field in dataclasses.fields(problem)}
    return dataclasses.replace(problem, **{name: extent for name, extent in extents.items() if name in fields})


@dataclasses.dataclass(frozen=True)
class Sharding(Generic[P]):
    """How a problem may be divided: named letters for the axes of its arrays, as in an einsum.

    Attributes:
      rule: letters of each operand and result, ``"m k, k n -> m n"``; an axis that is a product of two is
        ``(heads group)``.
      divided: letters that may be divided. A letter in neither `divided` nor `summed` is whole on each device.
      summed: further letters that may be divided. Results without such a letter are then sums over devices.
      local: ``local(problem, extents) -> problem`` of one device, given its extent of each letter. Default: letters are
        names of fields.
      partial: ``partial(problem)`` is the problem that each device computes, from the first operands, if results are to
        be summed. Default: the problem itself.
      finish: ``finish(problem, sums, args) -> result`` of one device, after the sum. Default: the sums.
    """

    rule: str
    divided: tuple[str, ...]
    summed: tuple[str, ...] = ()
    local: Callable[[P, Mapping[str, int]], P] = with_extents
    partial: Callable[[P], P] | None = None
    finish: Callable[[P, Sequence[Any], Sequence[Any]], Any] | None = None

    @functools.cached_property
    def arrays(self) -> tuple[tuple[tuple[Letters, ...], ...], tuple[tuple[Letters, ...], ...]]:
        """Letters of each axis of each operand, and of each result."""
        operands, results = self.rule.split("->")
        return tuple(map(_letters, operands.split(","))), tuple(map(_letters, results.split(",")))

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters, in the order of the rule."""
        operands, results = self.arrays
        return tuple(dict.fromkeys(letter for array in (*operands, *results) for axis in array for letter in axis))

    def extents(self, problem: P) -> dict[str, int]:
        """Returns the extent of each letter.

        Raises:
          ValueError: the problem's arrays do not match the rule.
        """
        return self.extents_of([s.shape for s in (*problem.operands(), *problem.results())])

    def extents_of(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Returns the extent of each letter, given the shapes of operands and results."""
        operands, results = self.arrays
        arrays = (*operands, *results)
        if [len(shape) for shape in shapes] != [len(array) for array in arrays]:
            raise ValueError(f"the sharding {self.rule!r} is not one of arrays of the shapes {shapes}")
        axes = [each for array, shape in zip(arrays, shapes, strict=True) for each in zip(array, shape, strict=True)]
        found: dict[str, int] = {}
        for letters, extent in sorted(axes, key=lambda axis: len(axis[0])):  # axes of one letter determine its extent
            known = math.prod(found.get(letter, 1) for letter in letters)
            unknown = [letter for letter in letters if letter not in found]
            if len(unknown) > 1 or extent % known or (not unknown and extent != known):
                raise ValueError(f"an axis of {extent} is not {' times '.join(letters)} in {self.rule!r} ({found})")
            found |= dict.fromkeys(unknown, extent // known)
        return found


@dataclasses.dataclass(frozen=True)
class Divided(Generic[P]):
    """A problem divided over the devices of a mesh.

    Attributes:
      problem: the problem for which each device selects a kernel.
      local: the problem that each device computes; differs from `problem` if that is only the summed part of it.
      finished: the part of `local` that each device finishes if sums are scattered; else `local`.
      operands, results: specs that the arrays then have.
      shapes: shapes of results on one device.
      summed_shapes: these shapes before results are scattered.
      sums: for each result of `problem`, the mesh axes over which it is summed.
      scattered: for each axis of each result, the mesh axes among `sums` over which the sum is then divided.
      gathered: the operands that were divided and are no longer, and why, as text.
    """

    problem: P
    local: P
    finished: P
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    shapes: tuple[tuple[int, ...], ...]
    summed_shapes: tuple[tuple[int, ...], ...]
    sums: tuple[MeshAxes, ...]
    scattered: tuple[Spec, ...]
    gathered: tuple[str, ...]
    partial: Callable[[P], P]
    finish: Callable[[P, Sequence[Any], Sequence[Any]], Any] | None = None

    @property
    def scatters(self) -> bool:
        """Whether sums are divided rather than whole on each device."""
        return any(itertools.chain(*self.scattered))

    def compute(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        total: Callable[[Any, MeshAxes], Any],
        scatter: Callable[[Any, MeshAxes, int], Any],
    ) -> tuple[Any, ...]:
        """Computes the results of one device.

        Args:
          call: ``call(problem, *args)`` makes a tuned call.
          args: the device's shards of the operands.
          total: ``total(x, axes)`` is the sum of x over the devices along these mesh axes.
          scatter: ``scatter(x, axes, dim)`` is this device's part of that sum, divided along an axis of x.
        """
        asked = self.problem.operands()
        # The local problem may lack an axis of extent 1.
        wanted = (*asked, *self.finished.operands()[len(asked) :])
        args = [x.reshape(s.shape) for x, s in zip(args, wanted, strict=True)]
        results: Sequence[Any] = as_tuple(call(self.problem, *args[: len(asked)]))
        if any(self.sums):
            results = [self._summed(number, x, total, scatter) for number, x in enumerate(results)]
            if self.finish is not None:
                left = self.partial(self.finished).results()
                results = [x.reshape(s.shape) for x, s in zip(results, left, strict=True)]
                results = as_tuple(self.finish(self.finished, results, args))
        return tuple(x.reshape(shape) for x, shape in zip(results, self.shapes, strict=True))

    def _summed(self, number: int, x: Any, total: Callable[..., Any], scatter: Callable[..., Any]) -> Any:
        left = self.sums[number]
        if self.scatters:
            ways = self.scattered[number]
            x = x.reshape(self.summed_shapes[number])
            for dim, axes in enumerate(ways):
                x = scatter(x, axes, dim) if axes else x
            left = tuple(axis for axis in left if axis not in itertools.chain(*ways))
        return total(x, left) if left else x


def as_spec(given: Sequence[Any], rank: int) -> Spec:
    """Converts a partition spec, as `PartitionSpec` takes it, to one tuple for each of `rank` axes."""
    entries = [() if each is None else (each,) if isinstance(each, str) else tuple(each) for each in given]
    return (*entries, *[()] * (rank - len(entries)))


def divide(
    sharding: Sharding[P],
    problem: P,
    mesh: Mapping[str, int],
    operands: Sequence[Sequence[Any]],
    results: Sequence[Sequence[Any]] = (),
) -> Divided[P]:
    """Returns the computation of each device for `problem` with arrays sharded as given. Pure; needs no device.

    Each mesh axis divides at most one letter. Letters that no result has come first: they are divided only along mesh
    axes that divide all of their operands alike. Other letters follow, first as results are divided, then as operands
    are. XLA divides a `dot_general` in the same way. An extent that is no multiple is not divided. A sum is scattered
    if its result is wanted divided over those axes; operands that are not summed are then divided alike.

    Args:
      mesh: number of devices along each mesh axis.
      operands, results: partition specs of some or all axes of each array (no specs of results by default).

    Raises:
      ValueError: a spec has more entries than its array has axes, names an axis that the mesh lacks, or names one
        twice.
    """
    claims = _Claims(sharding, sharding.extents(problem), dict(mesh))
    of_operands, of_results = sharding.arrays
    given = [_spec(spec, array, mesh) for spec, array in zip(operands, of_operands, strict=True)]
    wanted = [_spec(spec, array, mesh) for spec, array in zip(results, of_results, strict=True)] if results else []
    in_results = {letter for array in of_results for letters in array for letter in letters}
    nowhere = [letter for letter in sharding.summed if letter not in in_results]
    for letter in nowhere:
        places = [
            axes
            for array, spec in zip(of_operands, given, strict=True)
            for letters, axes in zip(array, spec, strict=True)
            if letters == (letter,)
        ]
        claims.add((letter,), _common(places))
    for arrays, specs in ((of_results, wanted), (of_operands, given)):
        for array, spec in zip(arrays, specs, strict=False):
            for letters, axes in zip(array, spec, strict=True):
                if not set(nowhere).issuperset(letters):
                    claims.add(letters, axes)

    extents = claims.local_extents()
    local = sharding.local(problem, extents)
    sums = tuple(
        tuple(axis for letter in sharding.summed if letter not in itertools.chain(*array) for axis in claims.of[letter])
        for array in of_results
    )
    partial = sharding.partial(local) if any(sums) and sharding.partial is not None else local
    if partial is not local:  # all of its results are summed
        sums = (tuple(dict.fromkeys(itertools.chain(*sums))),) * len(partial.results())
    summed_shapes = tuple(shape_of(array, extents) for array in of_results)
    specs = [claims.spec(array) for array in of_operands]
    before = tuple(map(claims.spec, of_results))
    if any(sums) and [s.shape for s in partial.results()] == [s.shape for s in local.results()]:
        claims.scatter(nowhere, of_results, wanted)
        specs = [
            claims.spec(array) if set(nowhere).isdisjoint(itertools.chain(*array)) else spec
            for array, spec in zip(of_operands, specs, strict=True)
        ]
    after = tuple(map(claims.spec, of_results))
    return Divided(
        problem=partial,
        local=local,
        finished=sharding.local(problem, claims.local_extents()),
        operands=tuple(specs),
        results=after,
        shapes=tuple(shape_of(array, claims.local_extents()) for array in of_results),
        summed_shapes=summed_shapes,
        sums=sums,
        scattered=tuple(
            tuple(now[len(had) :] for had, now in zip(*each, strict=True)) for each in zip(before, after, strict=True)
        ),
        gathered=tuple(_gathered(claims, of_operands, given, specs)),
        partial=sharding.partial or (lambda p: p),
        finish=sharding.finish,
    )


def shape_of(array: Sequence[Letters], extents: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an array with axes of these letters."""
    return tuple(math.prod(extents[x] for x in letters) for letters in array)


class _Claims:
    """The assignment of mesh axes to letters so far."""

    def __init__(self, sharding: Sharding[Any], extents: Mapping[str, int], mesh: Mapping[str, int]) -> None:
        self.divisible = {*sharding.divided, *sharding.summed}
        self.extents, self.mesh = extents, mesh
        self.of: dict[str, MeshAxes] = dict.fromkeys(extents, ())

    def local_extents(self) -> dict[str, int]:
        """Returns the extent of each letter on one device."""
        return {letter: extent // self.parts(letter) for letter, extent in self.extents.items()}

    def scatter(self, summed: Sequence[str], arrays: Sequence[Sequence[Letters]], wanted: Sequence[Spec]) -> None:
        """Divides results, as specified, over mesh axes of `summed` letters, along which they are partial sums."""
        for array, spec in zip(arrays, wanted, strict=False):
            for letters, axes in zip(array, spec, strict=True):
                others = {axis for letter, own in self.of.items() if letter not in summed for axis in own}
                free = {axis for letter in summed for axis in self.of[letter]} - others
                reached = itertools.takewhile({*free, *self.along(letters)}.__contains__, axes)
                self.add(letters, tuple(reached), free)

    def parts(self, letter: str) -> int:
        return math.prod(self.mesh[axis] for axis in self.of[letter])

    def add(self, letters: Letters, axes: MeshAxes, free: Container[str] = ()) -> None:
        """Divides an axis of these letters over `axes`, or over as many of the first as possible.

        Mesh axes in `free` may divide another letter already.
        """
        before = self.along(letters)
        if axes[: len(before)] != before:
            return
        for axis in axes[len(before) :]:
            letter = self._next(letters, axis)
            if letter is None or (self.owner(axis) is not None and axis not in free):
                return
            self.of[letter] += (axis,)

    def _next(self, letters: Letters, axis: str) -> str | None:
        """Returns the letter that this mesh axis divides next: a minor one if the major ones are fully divided."""
        for letter in letters:
            left = self.extents[letter] // self.parts(letter)
            if left % self.mesh[axis] == 0 and letter in self.divisible:
                return letter
            if left != 1:
                return None
        return None

    def owner(self, axis: str) -> str | None:
        """Returns the letter that `axis` divides."""
        return next((letter for letter, axes in self.of.items() if axis in axes), None)

    def along(self, letters: Letters) -> MeshAxes:
        """Returns the mesh axes that divide an axis of these letters."""
        return tuple(itertools.chain(*(self.of[letter] for letter in letters)))

    def spec(self, array: Sequence[Letters]) -> Spec:
        return tuple(map(self.along, array))

    def why_not(self, letters: Letters, axes: MeshAxes) -> str:
        """Returns why an axis of these letters is not divided over all of `axes`."""
        name, owners = " ".join(letters), {axis: self.owner(axis) for axis in axes}
        for axis, owner in owners.items():
            if owner is not None and owner not in letters:
                return f"{axis} divides {owner}"
        if not self.divisible.intersection(letters):
            return f"{name} is whole on each device"
        extent, devices = math.prod(self.extents[x] for x in letters), math.prod(self.mesh[axis] for axis in axes)
        if extent % devices:
            return f"{extent} is no multiple of {devices}"
        if along := self.along(letters):
            return f"{name} is divided over {', '.join(along)}"
        return f"{' times '.join(str(self.extents[x]) for x in letters)} does not divide by {devices}"


def _gathered(
    claims: _Claims, arrays: Sequence[Sequence[Letters]], given: Sequence[Spec], specs: Sequence[Spec]
) -> list[str]:
    found = []
    for number, (array, had, has) in enumerate(zip(arrays, given, specs, strict=True)):
        for letters, axes, along in zip(array, had, has, strict=True):
            if along[: len(axes)] != axes:
                name = " ".join(letters)
                why = claims.why_not(letters, axes)
                found.append(f"operand {number} along {name}, divided over {', '.join(axes)}: {why}")
    return found


def _letters(array: str) -> tuple[Letters, ...]:
    """Parses the letters of each axis: ``"b q (h g)"`` becomes ``(("b",), ("q",), ("h", "g"))``."""
    return tuple(tuple((axis[1] or axis[0]).split()) for axis in re.finditer(r"\(([^()]*)\)|[^\s()]+", array))


def _spec(given: Sequence[Any], array: Sequence[Letters], mesh: Mapping[str, int]) -> Spec:
    """Returns a partition spec with one tuple for each axis, checked against the mesh."""
    entries = as_spec(given, len(array))
    if len(entries) > len(array):
        raise ValueError(f"the spec {tuple(given)} is of more axes than an array of {len(array)} has")
    named = [axis for entry in entries for axis in entry]
    if unknown := [axis for axis in named if axis not in mesh]:
        raise ValueError(f"the spec {tuple(given)} names {unknown[0]}, which the mesh has not ({', '.join(mesh)})")
    if len(set(named)) < len(named):
        raise ValueError(f"the spec {tuple(given)} names a mesh axis twice")
    return entries


def _common(specs: Sequence[MeshAxes]) -> MeshAxes:
    """Returns the longest common prefix of mesh axes."""
    alike = itertools.takewhile(lambda axes: len(set(axes)) == 1, zip(*specs, strict=False))
    return tuple(axes[0] for axes in alike)
