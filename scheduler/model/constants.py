"""Finds the cost model's constants of a kernel on a chip, and corrects the model's times by measured problems."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.core.errors import StoreError
from scheduler.core.hardware import Hardware, siblings
from scheduler.core.records import Calibration
from scheduler.core.text import log, log_once
from scheduler.model.cost import BY_PLATFORM, Constants, CostModel
from scheduler.store import cache
from search_spaces.kernel import Kernel
from search_spaces.operation import Operation
from search_spaces.problem import Problem
from search_spaces.row_alignment import ROW_BYTES, contracts_rows, row_alignment

# ------------------------------------------------------------------------------
# Correction of the cost model's times for a kernel, learned from measured problems.
#
# The correction is a Gaussian process of ``log(measured / predicted)`` over problems (Rasmussen and Williams, Gaussian
# Processes for Machine Learning, 2006, chapters 2, 4.2 and 5.4.1). It corrects the analytic prediction near measured
# problems, and tends to nearly zero far from all of them. It also estimates the uncertainty of the corrected time.

Array = npt.NDArray[np.float64]

# Minimum number of problems for a fit; with fewer, the defaults apply.
MIN_RESIDUALS = 8
# Distances, in length scales: per non-size field that differs, and per power of two of `ProblemPoint.alignments`.
_OTHER_FIELD, _ALIGNMENT = 0.25, 0.25
# Standard deviations of errors in log time that problems share: all problems, those of one arithmetic (XLA's TF32
# reaches a larger share of its peak than its bfloat16), and those with unaligned rows.
_LEVEL, _ARITHMETIC_LEVEL, _UNALIGNED_LEVEL = 0.03, 0.04, 0.2
# The fixed time of a launch varies by this many seconds between problems; its fraction of a launch is capped.
_SMALL_S, _SMALLEST = 1e-6, 0.5
_ALIGNED = math.log2(ROW_BYTES)


@dataclasses.dataclass(frozen=True)
class Covariance:
    """Covariance of errors between problems, in log time; `fitted` selects the most likely one.

    Attributes:
      deviation: standard deviation of the error component that changes smoothly with the problem.
      small_deviation: increase of `deviation` for short launches, multiplied by 1 us over the predicted time (at most
        0.5).
      unaligned: factor of both for problems with rows that are no multiple of 16 bytes: cuBLAS takes up to 3.7 times as
        long for these, and XLA 3.2 times.
      noise, small_noise: the same for the component that differs between neighboring problems. Its two parts add as
        variances.
      doublings: length scale of the smooth component, in doublings of one size.
      relevance: for some sizes, the factor of a distance in that size. For example, cuDNN's efficiency differs between
        head sizes, but hardly between lengths.
    """

    deviation: float = 0.05
    small_deviation: float = 0.5
    unaligned: float = 1.0
    noise: float = 0.02
    small_noise: float = 0.5
    doublings: float = 4.0
    relevance: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, constants: Mapping[str, float]) -> Covariance:
        """Returns the covariance in a calibration's constants; missing or out-of-range values have their defaults."""
        found = {name.removeprefix(_NAMED): x for name, x in constants.items() if name.startswith(_NAMED)}
        may_be_0 = ("deviation", "small_deviation", "small_noise")
        valid = {name: x for name, x in found.items() if 0 <= x < math.inf and (x or name in may_be_0)}
        relevance = {name.removeprefix(_OF_SIZE): x for name, x in valid.items() if name.startswith(_OF_SIZE)}
        scalars = {field.name for field in dataclasses.fields(cls)} - {"relevance"}
        return cls(**{name: x for name, x in valid.items() if name in scalars}, relevance=relevance)

    def named(self) -> dict[str, float]:
        """Returns the covariance as constants of a calibration."""
        found = {**vars(self), **{f"{_OF_SIZE}{name}": factor for name, factor in self.relevance.items()}}
        return {f"{_NAMED}{name}": value for name, value in found.items() if name != "relevance"}


# How constants of a calibration are named that are values of a covariance, and its relevance of a size.
_NAMED, _OF_SIZE = "residual_", "relevance_"


_GRID = tuple(
    itertools.starmap(
        Covariance,
        itertools.product(
            (0.05, 0.1, 0.2, 0.4), (0.0, 0.5, 2.0), (1.0, 2.0, 5.0), (0.02, 0.04, 0.08), (0.0, 0.5, 1.0), (4.0, 8.0)
        ),
    )
)

# Candidates for the relevance of a size, and how much each must improve the log likelihood: few problems tell little.
_RELEVANCES, _RELEVANCE_COST = (0.25, 4.0, 16.0), 1.0


@dataclasses.dataclass(frozen=True)
class ProblemPoint:
    """A problem as an input of the Gaussian process.

    Attributes:
      problem: the problem.
      predicted_s: the predicted time, in seconds.
    """

    problem: Problem
    predicted_s: float

    @functools.cached_property
    def sizes(self) -> Mapping[str, float]:
        """The log2 of the positive integers among its coordinates."""
        return {n: math.log2(int(x)) for n, x in self.problem.coordinates().items() if _is_size(x)}

    @functools.cached_property
    def others(self) -> Mapping[str, object]:
        return {n: x for n, x in self.problem.coordinates().items() if not _is_size(x)}

    @functools.cached_property
    def alignments(self) -> tuple[float, ...]:
        """The log2 of the least row alignment of the arrays; of a product also of each operand, if rows are contracted.

        XLA's programs differ by operand, and are slower for contracted rows (`LibraryWork`).
        """
        p = self.problem
        if p.dimension_numbers is None:
            return (math.log2(p.row_alignment),)
        of_operands = list[float]()
        for index, operand in enumerate(p.operands()[:2]):
            alignment = math.log2(row_alignment(operand))
            of_operands += [alignment, _ALIGNED] if contracts_rows(p, index) else [_ALIGNED, alignment]
        return (*of_operands, math.log2(min(map(row_alignment, p.results()))))

    @functools.cached_property
    def arithmetic(self) -> str:
        return self.problem.arithmetic


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Measured errors of one kernel on one chip.

    Attributes:
      places: the measured problems.
      errors: ``log(measured / predicted)`` of each problem.
      covariance: the covariance of the errors.
    """

    places: tuple[ProblemPoint, ...] = ()
    errors: tuple[float, ...] = ()
    covariance: Covariance = dataclasses.field(default_factory=Covariance)

    def at(self, place: ProblemPoint) -> tuple[float, float]:
        """Returns the expected error at `place` and its standard deviation, both in log time."""
        places = (*self.places, place)
        small = _small(places)
        distances = _distances(places, self.covariance.relevance)
        signal = _signal(distances, small, _unaligned(places), self.covariance) + _levels(places)
        noise = _noise(small, self.covariance)
        cross = signal[:-1, -1]
        solved = np.linalg.solve(signal[:-1, :-1] + np.diag(noise[:-1]), np.stack([np.array(self.errors), cross]).T)
        variance = signal[-1, -1] - cross @ solved[:, 1] + noise[-1]
        return float(cross @ solved[:, 0]), math.sqrt(max(float(variance), 0.0))


def fitted(places: Sequence[ProblemPoint], errors: Sequence[float]) -> Covariance:
    """Returns the covariance with the largest marginal likelihood of these errors.

    It is the best of a grid. Then each size in turn gets the relevance that improves it most.
    """
    if len(places) < MIN_RESIDUALS:
        return Covariance()
    small, unaligned, y = _small(places), _unaligned(places), np.array(errors)
    levels = _levels(places)

    def cost(c: Covariance, distances: tuple[Array, Array]) -> float:
        lower = np.linalg.cholesky(_signal(distances, small, unaligned, c) + levels + np.diag(_noise(small, c)))
        whitened = np.linalg.solve(lower, y)
        return float(whitened @ whitened / 2 + np.log(np.diag(lower)).sum())

    def with_relevance(c: Covariance) -> float:
        return cost(c, _distances(places, c.relevance)) + _RELEVANCE_COST * len(c.relevance)

    distances = _distances(places, {})
    best = min(_GRID, key=lambda c: cost(c, distances))
    for name in sorted({name for place in places for name in place.sizes}):
        others = {n: x for n, x in best.relevance.items() if n != name}
        choices = (others, *({**others, name: factor} for factor in _RELEVANCES))
        best = min((dataclasses.replace(best, relevance=choice) for choice in choices), key=with_relevance)
    return best


def _distances(places: Sequence[ProblemPoint], relevance: Mapping[str, float]) -> tuple[Array, Array]:
    """Returns two squared distances between all pairs: of sizes in doublings, and of other fields in length scales."""
    names = sorted({name for place in places for name in (*place.sizes, *place.others)})
    sizes = np.array([[relevance.get(name, 1.0) * place.sizes.get(name, np.nan) for name in names] for place in places])
    codes: dict[object, int] = {}
    others = np.array(
        [
            [-1 if name in p.sizes else codes.setdefault((name, p.others.get(name)), len(codes)) for name in names]
            for p in places
        ]
    )
    alignments = np.array([place.alignments for place in places])
    doublings = np.nan_to_num(sizes[:, None] - sizes[None]) ** 2
    fields = (others[:, None] != others[None]).sum(axis=-1) * _OTHER_FIELD**2
    apart = ((alignments[:, None] - alignments[None]) * _ALIGNMENT) ** 2
    return doublings.sum(axis=-1), fields + apart.sum(axis=-1)


def _small(places: Sequence[ProblemPoint]) -> Array:
    """Returns the variation of the fixed time of a launch, relative to the predicted time."""
    return np.minimum(_SMALL_S / np.array([place.predicted_s for place in places]), _SMALLEST)


def _unaligned(places: Sequence[ProblemPoint]) -> npt.NDArray[np.bool_]:
    return np.array([place.problem.row_alignment < ROW_BYTES for place in places])


def _signal(distances: tuple[Array, Array], small: Array, unaligned: npt.NDArray[np.bool_], c: Covariance) -> Array:
    """Returns a Matern 5/2 covariance with a deviation that depends on time and alignment."""
    doublings, others = distances
    r = np.sqrt(5 * (doublings / c.doublings**2 + others))
    deviation = (c.deviation + c.small_deviation * small) * np.where(unaligned, c.unaligned, 1.0)
    covariance: Array = (1 + r + r**2 / 3) * np.exp(-r) * np.outer(deviation, deviation)
    return covariance


def _levels(places: Sequence[ProblemPoint]) -> Array:
    """Returns the covariance of the errors that problems share, however far apart they are."""
    unaligned, arithmetic = _unaligned(places), np.array([place.arithmetic for place in places])
    same = arithmetic[:, None] == arithmetic[None]
    return _LEVEL**2 + _ARITHMETIC_LEVEL**2 * same + _UNALIGNED_LEVEL**2 * np.outer(unaligned, unaligned)


def _noise(small: Array, c: Covariance) -> Array:
    return c.noise**2 + (c.small_noise * small) ** 2


def model_of(
    operation: Operation[Any],
    kernel: Kernel[Any, Any],
    hardware: Hardware,
    *,
    found: Mapping[str, Calibration] | None = None,
) -> CostModel:
    """Returns the cost model with the constants fitted to `kernel` and to the operation's library on this chip.

    Args:
      found: backend -> calibration; None reads the stores.
    """
    if found is None:
        found = calibrations(operation.name, hardware)
    values: dict[str, float] = {}
    for backend in (operation.library.backend, kernel.backend):
        if backend in found:
            values |= known(found[backend])
    start = BY_PLATFORM.get(hardware.platform, Constants())
    try:
        return CostModel(hardware, dataclasses.replace(start, **values))
    except ValueError as error:  # stored numbers may be out of range
        log_once(f"the constants of {operation.name} on {hardware.kind} are ignored: {error}")
        return CostModel(hardware, start)


def residuals_of(operation: Operation[Any], kernel: Kernel[Any, Any], found: Mapping[str, Calibration]) -> Residuals:
    """Returns the measured errors of the cost model for the current version of `kernel`; empty if there are none."""
    calibration = found.get(kernel.backend)
    if calibration is None or calibration.version != kernel.version:
        return Residuals()
    # Keyed by identity, because a calibration is read only once, and contains mappings, which are unhashable.
    key = (operation.problem, id(calibration))
    if key not in _residuals:
        places, errors = [], []
        for one in calibration.observations:
            with contextlib.suppress(ValueError):  # from another version of the operation, or invalid times
                error = math.log(one.measured_s / one.predicted_s)
                places.append(ProblemPoint(operation.problem.from_canonical(one.problem), one.predicted_s))
                errors.append(error)
        covariance = Covariance.of(calibration.constants)
        _residuals[key] = calibration, Residuals(tuple(places), tuple(errors), covariance)
    return _residuals[key][1]


_residuals: dict[tuple[object, int], tuple[Calibration, Residuals]] = {}


def calibrations(operation: str, hardware: Hardware, *, shared_only: bool = False) -> Mapping[str, Calibration]:
    """Returns the stored calibrations for an operation on a chip, by backend. The user's own override the shipped.

    A backend without a calibration on this chip has that of the most similar sibling (`hardware.siblings`).
    Efficiencies are fractions of a chip's own figures, and fixed times are those of the architecture, so they apply
    here, with the additional uncertainty `BETWEEN_CHIPS`.
    """
    from scheduler.store import store  # SQLAlchemy takes 0.4 s to import

    own = ""
    if not shared_only:
        with contextlib.suppress(StoreError):  # reported once by the code that reads records
            own = store.default_url()
    found: dict[str, Calibration] = {}
    for chip in (hardware, *siblings(hardware)):
        found = {**_read(operation, chip.id, own), **found}
    return found


# Standard deviation in log time that a sibling's calibration adds. Eleven matmuls on an H100, predicted with the
# constants of an H200, deviate by 3.3 % (root mean square), the model's own error included
# (benchmarks/results/tuning_time-nvidia-h100-80gb-hbm3.json).
BETWEEN_CHIPS = 0.03


def sibling_of(calibration: Calibration | None, hardware: Hardware) -> str:
    """Returns the kind of the sibling that a calibration is from; "" if it is from this chip, or None."""
    return "" if calibration is None or calibration.hardware == hardware.id else calibration.hardware.partition(" (")[0]


def known(calibration: Calibration) -> dict[str, float]:
    """Returns the constants of `calibration` that the cost model has."""
    names = {field.name for field in dataclasses.fields(Constants)}
    return {name: value for name, value in calibration.constants.items() if name in names}


def forget() -> None:
    """Clears the cached calibrations, so that the next call reads the stores again."""
    _read.cache_clear()
    _residuals.clear()


@functools.lru_cache(maxsize=64)
def _read(operation: str, hardware: str, user_url: str) -> Mapping[str, Calibration]:
    from scheduler.store import store

    def shipped() -> Iterable[Calibration]:
        if (kept := store.shipped()) is None:
            return ()
        with contextlib.closing(kept):
            return kept.calibrations(hardware=hardware, operation=operation)

    def own() -> Iterable[Calibration]:
        with contextlib.closing(store.Store(user_url)) as kept:
            if cache.has_given_up(kept.location):
                return ()
            return cache.call_with_timeout(
                kept.location, lambda: kept.calibrations(hardware=hardware, operation=operation)
            )

    found: dict[str, Calibration] = {}
    for read in (shipped, *((own,) if user_url else ())):
        try:
            found |= {c.backend: c for c in read()}
        except StoreError as error:  # reported once by the code that reads records
            log.debug("%s (the model continues without its constants)", error)
    return found
