"""What was tried as studies of Optuna, which its dashboard and its plots open; `search.py` alone knows Optuna, too.

A study is one problem on one chip. Its parameters are the kernel and the fields of its schedule, with the choices of
today's spaces and those that were tried; its value is the median time in microseconds; what failed is a failed trial
with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from scheduler.core.errors import StoreError
from scheduler.core.identity import Point, point_of
from scheduler.core.records import Failure, Measurement, Trial, choice_text
from scheduler.core.redaction import redacted, shown_url, tells
from scheduler.inspect import study_file
from scheduler.inspect.points import Modelled, Tried
from scheduler.inspect.verdict import verdict
from scheduler.model.cost import CostModel
from search_spaces import spelled
from search_spaces.space import Choice
from tile_scheduler import __version__

METRIC = "median time in us"
# The attribute of a study that says who wrote it: no other is ever changed.
_WRITER = "written_by"


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of one study: how many trials it has, and how many of them are new."""

    name: str
    trials: int
    added: int


def write(url: str, tried: Iterable[Tried], *, replace: bool = False) -> Iterator[Written]:
    """Writes a study for each of these into an Optuna storage; one that is there gets the trials that it lacks.

    Args:
      url: as Optuna takes it: ``sqlite:///study.db``, ``postgresql://host/base``.
      replace: make a study anew that holds other trials than those; else nothing at all is written.

    Raises:
      StoreError: no such storage, or it holds studies of these names with other trials, or by another program.
    """
    drafts = [(one, _trials(one)) for one in tried]
    with _storage(url) as storage:
        left = {str(one): _there(storage, str(one), trials, replace=replace) for one, trials in drafts}
        for one, trials in drafts:
            yield _written(storage, one, trials, left[str(one)])


def _there(storage: RDBStorage, name: str, trials: Sequence[FrozenTrial], *, replace: bool) -> int | None:
    """How many of these trials a study of this name holds; None where it is to be made anew, or is not there."""
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return None
    if _WRITER not in study.user_attrs:
        raise StoreError(f"the study {name!r} is there, and not by tile-scheduler: name another file for the export")
    held = study.get_trials(deepcopy=False)
    if list(map(_outcome, held)) == list(map(_outcome, trials[: len(held)])):
        return len(held)
    if not replace:
        raise StoreError(
            f"the study {name!r} is there with other trials, of another search perhaps; nothing was written: say "
            "--replace to make it anew, or name another file"
        )
    return None


def _outcome(trial: FrozenTrial) -> tuple[Any, ...]:
    """What must agree for two trials to be the same one."""
    return trial.state, trial.values, trial.params


def _written(storage: RDBStorage, one: Tried, trials: Sequence[FrozenTrial], held: int | None) -> Written:
    if held is None:
        with contextlib.suppress(KeyError):
            optuna.delete_study(study_name=str(one), storage=storage)
        study = optuna.create_study(study_name=str(one), storage=storage, direction="minimize")
    else:
        study = optuna.load_study(study_name=str(one), storage=storage)
    for name, value in _attributes(one).items():
        study.set_user_attr(name, value)
    study.set_metric_names([METRIC])
    study.add_trials(trials[held or 0 :])
    return Written(str(one), len(trials), len(trials) - (held or 0))


def _attributes(one: Tried) -> dict[str, Any]:
    """What is told of a whole study."""
    told: dict[str, Any] = {
        _WRITER: f"tile-scheduler {__version__}",
        "operation": one.key.operation,
        "problem": spelled(one.key.operation, one.key.problem),
        "hardware": one.key.hardware,
        "trials_of": one.recording or "a search",
    }
    if one.environment is not None:
        told |= vars(one.environment)
    if one.case is not None and not one.case.hardware.abilities.interpreted:
        told["roofline_us"] = _us(CostModel(one.case.hardware).lower_bound(one.case.problem))
    if one.record is not None:
        told["winner"] = choice_text(one.record.winner.backend, one.record.winner.schedule)
        told["verdict"] = " ".join(verdict(one.record))
    return told


def _trials(tried: Tried) -> list[FrozenTrial]:
    choices, modelled, when = tried.choices(), tried.modelled(), _date(tried)
    distributions = {name: _distribution(values) for name, values in choices.items()}
    made = []
    for trial, point in zip(tried.trials, tried.points(), strict=True):
        value = _us(trial.outcome.median_s) if isinstance(trial.outcome, Measurement) else None
        frozen = optuna.trial.create_trial(
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            value=value,
            # What has choices of several types has them as text.
            params={name: v if v in choices[name] else str(v) for name, v in point.items()},
            distributions={name: distributions[name] for name in point},
            user_attrs=_told(trial, modelled, tried.final_s),
        )
        if when is not None:
            frozen.datetime_start = frozen.datetime_complete = when
        made.append(frozen)
    return made


def _told(trial: Trial, modelled: Mapping[Point, Modelled], final_s: Mapping[Point, float]) -> dict[str, Any]:
    """What is told of one trial beside its value."""
    told: dict[str, Any] = {"version": trial.version, "predicted_us": _us(trial.predicted_s)}
    point = point_of(trial.backend, trial.schedule)
    if point in modelled:
        told |= {"lower_bound_us": _us(modelled[point].floor_s), "bound_by": modelled[point].bound}
    if point in final_s:
        told["final_us"] = _us(final_s[point])
    match trial.outcome:
        case Measurement() as measured:
            return told | {"spread_us": _us(measured.spread_s), "clock": measured.clock, "l2": measured.l2}
        case Failure(stage, detail):
            return told | {"failed_stage": stage, "failure": detail}


def _us(seconds: float) -> float:
    """Microseconds, to a tenth of a nanosecond: 2.625, and not 2.6250000000000004."""
    return round(seconds * 1e6, 4)


def _distribution(values: Sequence[Choice]) -> BaseDistribution:
    """Evenly spaced integers as such; all else is of a list, of which nothing between two values is a choice."""
    numbers = [value for value in values if type(value) is int]
    steps = {high - low for low, high in itertools.pairwise(numbers)}
    if len(numbers) == len(values) and len(steps) == 1:
        return IntDistribution(numbers[0], numbers[-1], step=steps.pop())
    return CategoricalDistribution(values)  # type: ignore[arg-type]  # tuples are text by now


def _date(tried: Tried) -> datetime.datetime | None:
    """When it was measured, to the day and its beginning, as Optuna keeps times: UTC, without saying so."""
    try:
        date = datetime.datetime.fromisoformat(tried.environment.date) if tried.environment is not None else None
    except ValueError:
        return None
    return None if date is None else date.astimezone(datetime.UTC).replace(tzinfo=None)


@contextlib.contextmanager
def _storage(url: str) -> Iterator[RDBStorage]:
    """An Optuna storage; an SQLite file that is missing is made."""
    path = study_file.of_url(url)
    options: dict[str, Any] = {}
    if path is not None:
        study_file.refuse_foreign(path)
        if not path.exists():  # It has nothing to lose yet, and every trial is a transaction that waits for the disk.
            options["creator"] = functools.partial(study_file.without_waiting, path)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # the names of metrics
            storage = _opened(url, options)
            try:
                yield storage
            finally:
                storage.remove_session()
                storage.engine.dispose()
    except optuna.exceptions.OptunaError as error:
        said = redacted(str(error.__cause__ or error), url)
        raise StoreError(f"{shown_url(url)} cannot be written ({said})") from (None if tells(error, url) else error)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _opened(url: str, options: dict[str, Any]) -> RDBStorage:
    # The driver that the extra [postgres] installs.
    named = re.sub("^postgresql://", "postgresql+psycopg://", url)
    try:
        return RDBStorage(named, engine_kwargs=options)
    except Exception as error:  # SQLAlchemy's, a driver's or Optuna's: each has its own for what a URL may be
        reason = redacted(str(getattr(error, "orig", None) or error).partition("\n")[0], url)
        raise StoreError(
            f"{shown_url(url)} cannot be opened as an Optuna storage ({reason}): name one as sqlite:///study.db"
        ) from (None if tells(error, url) else error)
