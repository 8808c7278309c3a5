"""How a problem divides over the devices of a mesh: the problem that each of them then has, and what is summed."""

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
# Mesh axes over which one axis of an array is divided, the major one first.
MeshAxes = tuple[str, ...]
# Those of each axis of an array.
Spec = tuple[MeshAxes, ...]
# The letters of one axis of an array: several where it is made of several, the major one first.
Letters = tuple[str, ...]


def with_extents(problem: P, extents: Mapping[str, int]) -> P:
    """`problem` with those of its fields that letters name."""
    fields = {field.name for field in dataclasses.fields(problem)}
    return dataclasses.replace(problem, **{name: extent for name, extent in extents.items() if name in fields})


@dataclasses.dataclass(frozen=True)
class Sharding(Generic[P]):
    """What of a problem may be divided: named letters for the axes of its arrays, as in an einsum.

    Attributes:
      rule: letters of each operand and result, ``"m k, k n -> m n"``; an axis that is made of two is ``(heads group)``.
      divided: letters that may be divided. A letter in neither of these two is whole on each device.
      summed: letters that may be divided, too, in favour of which results without them are sums over devices.
      local: ``local(problem, extents) -> problem`` of one device, by its extent of each letter. Default: letters are
        names of fields.
      partial: ``partial(problem)`` is what each device computes, of the first of its operands, where results are to be
        summed. Default: the problem itself.
      finish: ``finish(problem, sums, args) -> result`` of one device, after that. Default: the sums.
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
        """All of them, in the order in which the rule has them."""
        operands, results = self.arrays
        return tuple(dict.fromkeys(letter for array in (*operands, *results) for axis in array for letter in axis))

    def extents(self, problem: P) -> dict[str, int]:
        """Of each letter.

        Raises:
          ValueError: the problem's arrays are not as the rule has them.
        """
        return self.extents_of([s.shape for s in (*problem.operands(), *problem.results())])

    def extents_of(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The same of operands and results of these shapes."""
        operands, results = self.arrays
        arrays = (*operands, *results)
        if [len(shape) for shape in shapes] != [len(array) for array in arrays]:
            raise ValueError(f"the sharding {self.rule!r} is not one of arrays of the shapes {shapes}")
        axes = [each for array, shape in zip(arrays, shapes, strict=True) for each in zip(array, shape, strict=True)]
        found: dict[str, int] = {}
        for letters, extent in sorted(axes, key=lambda axis: len(axis[0])):  # those of one letter tell it
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
      problem: what each device asks a kernel for.
      local: what each device computes: another one where `problem` is only what is summed of it.
      finished: what is left of that for each device where sums are scattered; else it is `local`.
      operands, results: specs that arrays then have.
      shapes: of results on one device.
      summed_shapes: theirs before they are scattered.
      sums: mesh axes over which results of `problem` are summed, of each.
      scattered: those of them over which the sums are then divided, of each axis of each result.
      gathered: in words, what of the operands was divided, is not any more, and why.
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
        """Whether sums are divided, not whole on each device."""
        return any(itertools.chain(*self.scattered))

    def compute(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        total: Callable[[Any, MeshAxes], Any],
        scatter: Callable[[Any, MeshAxes, int], Any],
    ) -> tuple[Any, ...]:
        """The results of one device.

        Args:
          call: ``call(problem, *args)`` makes a tuned call.
          args: what the device has of the operands.
          total: ``total(x, axes)`` is the sum of x over the devices along these mesh axes.
          scatter: ``scatter(x, axes, dim)`` is this device's part of that sum, divided along an axis of x.
        """
        asked = self.problem.operands()
        # An axis of extent 1 may be one that the local problem does not have.
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
    """A partition spec as `PartitionSpec` takes it, with an entry for each of so many axes, each a tuple."""
    entries = [() if each is None else (each,) if isinstance(each, str) else tuple(each) for each in given]
    return (*entries, *[()] * (rank - len(entries)))


def divide(
    sharding: Sharding[P],
    problem: P,
    mesh: Mapping[str, int],
    operands: Sequence[Sequence[Any]],
    results: Sequence[Sequence[Any]] = (),
) -> Divided[P]:
    """What each device computes of `problem`, whose arrays are divided so: pure, and without any device.

    Each mesh axis divides one letter. First those that no result has: where all operands are divided alike along them,
    and nowhere else. Then others as results are divided, then as operands are. So XLA divides a `dot_general`. An
    extent that is no multiple is not divided. What is summed is scattered where results are wanted divided over those
    axes, and operands that are not summed come divided alike.

    Args:
      mesh: how many devices lie along each of its axes.
      operands, results: partition specs, of some or all of the axes of each array (None: of no array).

    Raises:
      ValueError: a spec is longer than its array has axes, names an axis that the mesh has not, or one twice.
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
    if partial is not local:  # all that is summed is in what it returns
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
    """Of an array with axes of these letters."""
    return tuple(math.prod(extents[x] for x in letters) for letters in array)


class _Claims:
    """Which mesh axes divide which letter, as far as that is settled."""

    def __init__(self, sharding: Sharding[Any], extents: Mapping[str, int], mesh: Mapping[str, int]) -> None:
        self.divisible = {*sharding.divided, *sharding.summed}
        self.extents, self.mesh = extents, mesh
        self.of: dict[str, MeshAxes] = dict.fromkeys(extents, ())

    def local_extents(self) -> dict[str, int]:
        """Of each letter on one device."""
        return {letter: extent // self.parts(letter) for letter, extent in self.extents.items()}

    def scatter(self, summed: Sequence[str], arrays: Sequence[Sequence[Letters]], wanted: Sequence[Spec]) -> None:
        """Divides results, as they are wanted, over axes along which they are sums of parts: those letters' own."""
        for array, spec in zip(arrays, wanted, strict=False):
            for letters, axes in zip(array, spec, strict=True):
                others = {axis for letter, own in self.of.items() if letter not in summed for axis in own}
                free = {axis for letter in summed for axis in self.of[letter]} - others
                reached = itertools.takewhile({*free, *self.along(letters)}.__contains__, axes)
                self.add(letters, tuple(reached), free)

    def parts(self, letter: str) -> int:
        return math.prod(self.mesh[axis] for axis in self.of[letter])

    def add(self, letters: Letters, axes: MeshAxes, free: Container[str] = ()) -> None:
        """Divides an axis of these letters over `axes`, or over the first of them, as far as that can be.

        Those that are `free` may divide another letter already.
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
        """The letter that this axis divides next: a minor one where nothing is left of the major ones."""
        for letter in letters:
            left = self.extents[letter] // self.parts(letter)
            if left % self.mesh[axis] == 0 and letter in self.divisible:
                return letter
            if left != 1:
                return None
        return None

    def owner(self, axis: str) -> str | None:
        """The letter that `axis` divides."""
        return next((letter for letter, axes in self.of.items() if axis in axes), None)

    def along(self, letters: Letters) -> MeshAxes:
        """What divides an axis of these letters."""
        return tuple(itertools.chain(*(self.of[letter] for letter in letters)))

    def spec(self, array: Sequence[Letters]) -> Spec:
        return tuple(map(self.along, array))

    def why_not(self, letters: Letters, axes: MeshAxes) -> str:
        """Why an axis of these letters is not divided over all of `axes`."""
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
    """Of each axis: ``"b q (h g)"`` are ``(("b",), ("q",), ("h", "g"))``."""
    return tuple(tuple((axis[1] or axis[0]).split()) for axis in re.finditer(r"\(([^()]*)\)|[^\s()]+", array))


def _spec(given: Sequence[Any], array: Sequence[Letters], mesh: Mapping[str, int]) -> Spec:
    """A partition spec with an entry for each axis, each a tuple."""
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
    """The first mesh axes that all of these begin with."""
    alike = itertools.takewhile(lambda axes: len(set(axes)) == 1, zip(*specs, strict=False))
    return tuple(axes[0] for axes in alike)
