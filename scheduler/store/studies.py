"""Trials of searches as Optuna studies, in the tables of Optuna's own storage inside the cache's database.

A study is one search for one problem on one chip. `optuna-dashboard` can open the database. A trial's value is its
median time in microseconds, its parameters are the backend and the fields of its schedule, and its attribute "trial" is
the complete trial as text, which this program reads back. Optuna creates the tables and the studies. Trials are read
with SQL only, so that reading works on a read-only file and without importing Optuna.

Trials are written with SQL, too, because Optuna's public calls cost more and keep less (Optuna 5.0.0, trials of nine
parameters in an SQLite file):

- `Study.add_trials` takes 8 to 12 ms of CPU per trial, in one transaction each, and SQL takes 3 ms. All searches of a
  job share one process.
- A finished trial cannot be changed (`UpdateFinishedTrialError`), but a final comparison refutes trials that have a
  time. Without SQL such a study would be deleted and written again.
- A batch that waits in memory is lost with its process. A table of trials of this program (0.4 ms) would keep it, in
  addition to the study.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import random
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from scheduler.core import codec
from scheduler.core.errors import StoreError
from scheduler.core.records import Environment, Failure, Key, Measurement, Trial, Versioned, versioned
from scheduler.core.text import log_once, quietly
from scheduler.store import queries
from scheduler.store.database import Database
from scheduler.store.schema import KEY, SEARCHES

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

METRIC = "median time in us"
# Attributes of a trial: its complete text, the cost model's prediction, the spread of its samples, and its failure.
TRIAL, PREDICTED, SPREAD, FAILURE = "trial", "predicted_us", "spread_us", "failure"
# The columns of Optuna's tables that are used here (optuna/storages/_rdb/models.py of Optuna 5).
_STUDIES = sa.table("studies", *map(sa.column, ("study_id", "study_name")))
_TRIALS = sa.table(
    "trials",
    *map(sa.column, ("trial_id", "number", "study_id", "state")),
    *(sa.column(name, sa.DateTime) for name in ("datetime_start", "datetime_complete")),  # naive, in UTC
)
_ATTRIBUTES = sa.table("trial_user_attributes", *map(sa.column, ("trial_id", "key", "value_json")))
_VALUES = sa.table("trial_values", *map(sa.column, ("trial_id", "objective", "value", "value_type")))
_PARAMETERS = sa.table("trial_params", *map(sa.column, ("trial_id", "param_name", "param_value", "distribution_json")))
# Optuna's column for study names has 512 characters.
_LONGEST_NAME = 440
# Retries, because processes that create the tables of a new file concurrently conflict.
_ATTEMPTS, _WAIT_S = 8, 0.2
# Constructed once, because construction takes longer than execution.
_NAMES = sa.select(SEARCHES.c.study).where(*queries.of_key(SEARCHES))
_FINISH = sa.update(SEARCHES).where(*queries.of_key(SEARCHES)).values(finished=1)
_FORGET = sa.delete(SEARCHES).where(*queries.of_key(SEARCHES))
_NO: sa.ColumnElement[int] = sa.literal_column("0")  # only a literal uses the index of unfinished searches

Parameters = tuple[Mapping[str, Any], Mapping[str, "BaseDistribution"]]
# Returns the parameters of a trial and their distributions.
Described = Callable[[Trial], Parameters]


class Studies:
    """The searches of one database and their trials. Every failure raises a `StoreError`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._storage: RDBStorage | None = None
        self._open: dict[tuple[Key, tuple[str, str, str]], _OptunaStudy] = {}

    def prepare(self) -> None:
        """Creates Optuna's tables if they are missing, ahead of the first trial."""
        with self._lock, self._writing():
            pass

    def save(
        self, key: Key, trials: Sequence[Trial], environment: Environment, parameters: Described | None = None
    ) -> None:
        """Adds trials to the unfinished search of `key` under these versions, or to a new search.

        A stored trial of the same number, kernel and schedule gets the new outcome, so that a failed call may be
        repeated.

        Args:
          parameters: returns the parameters of a trial and their distributions; None stores no parameters.
        """
        with self._lock, self._writing() as storage:
            if not self._write(self._search(storage, key, environment), trials, parameters):
                self._open[key, _versions(environment)] = study = self._begin(storage, key, environment)
                self._write(study, trials, parameters)

    def _write(self, study: _OptunaStudy, trials: Sequence[Trial], parameters: Described | None) -> bool:
        """Saves trials in a study; returns False if the study is gone or has other choices of a parameter.

        A dashboard may delete a study. Choices change with the kernel, and Optuna requires the same choices of a
        parameter in all trials of a study.
        """
        rows: dict[sa.TableClause, list[dict[str, Any]]] = {_VALUES: [], _ATTRIBUTES: [], _PARAMETERS: []}
        with self._database.write() as connection:
            there = sa.select(_STUDIES.c.study_id).where(_STUDIES.c.study_id == study.id).with_for_update()
            if connection.execute(there).first() is None:
                return False
            if study.saved is None:
                every = sa.select(_PARAMETERS.c.param_name, _PARAMETERS.c.distribution_json).distinct()
                every = every.join(_TRIALS, _TRIALS.c.trial_id == _PARAMETERS.c.trial_id)
                of_study = every.where(_TRIALS.c.study_id == study.id)
                study.distributions = {row.param_name: row.distribution_json for row in connection.execute(of_study)}
                found = connection.execute(_query(_STUDIES.c.study_id == study.id))
                study.saved = {_identity(trial): (number, trial) for number, trial in self._decoded(found)}
            changed: list[tuple[int | None, Trial, FrozenTrial]] = []
            for trial in trials:
                trial_id, known = study.saved.get(_identity(trial), (None, None))
                if known != trial:
                    changed.append((trial_id, trial, _frozen(trial, parameters and parameters(trial))))
            for _, _, frozen in changed:
                texts = {name: _distribution_text(one) for name, one in frozen.distributions.items()}
                if any(study.distributions.setdefault(name, text) != text for name, text in texts.items()):
                    return False
            for trial_id, trial, frozen in changed:
                if trial_id is None:
                    trial_id = _inserted(connection, study, frozen)
                    rows[_PARAMETERS] += [
                        {
                            "trial_id": trial_id,
                            "param_name": name,
                            "param_value": frozen.distributions[name].to_internal_repr(value),
                            "distribution_json": study.distributions[name],
                        }
                        for name, value in frozen.params.items()
                    ]
                else:
                    same = _TRIALS.c.trial_id == trial_id
                    connection.execute(sa.update(_TRIALS).where(same).values(state=frozen.state.name))
                    for table in (_VALUES, _ATTRIBUTES):
                        connection.execute(sa.delete(table).where(table.c.trial_id == trial_id))
                if frozen.value is not None:
                    value = {"objective": 0, "value": frozen.value, "value_type": "FINITE"}
                    rows[_VALUES].append({"trial_id": trial_id, **value})
                rows[_ATTRIBUTES] += [
                    {"trial_id": trial_id, "key": name, "value_json": json.dumps(value)}
                    for name, value in frozen.user_attrs.items()
                ]
                study.saved[_identity(trial)] = trial_id, trial
            for table, several in rows.items():
                if several:
                    connection.execute(sa.insert(table), several)
        return True

    def trials(self, key: Key, environment: Environment | None = None, *, unfinished: bool = False) -> list[Trial]:
        """Returns the trials of `key` in the order they ended; malformed ones are skipped with a warning.

        Args:
          environment: only trials of searches under these versions of jax, jaxlib and the driver (at any date).
          unfinished: only trials of an interrupted search.
        """
        wanted = _is(key)
        if unfinished:
            wanted.append(SEARCHES.c.finished == _NO)
        if environment is not None:
            wanted += _under(environment)
        return [trial for _, trial in self._read(wanted)]

    def last(self, key: Key) -> list[Trial]:
        """Returns the trials of the last finished search of `key`, or of the interrupted one if none finished.

        If a schedule was tried several times, for example after a failure, only the last trial is returned.
        """
        trials = [trial for _, trial in self._read([*_is(key), SEARCHES.c.finished != 0])] or self.trials(key)
        begins = max((i for i, trial in enumerate(trials) if trial.number == 0), default=0)
        last = {versioned(trial): trial for trial in trials[begins:]}
        return sorted(last.values(), key=lambda trial: trial.number)

    def unfinished(self, operation: str | None, problem: str | None) -> dict[Key, list[Trial]]:
        """Returns the trials of every running or interrupted search, by key, sorted by key."""
        wanted = {"operation": operation, "problem": problem}
        conditions = [SEARCHES.c[name] == value for name, value in wanted.items() if value is not None]
        query = sa.select(*(SEARCHES.c[name] for name in KEY)).where(SEARCHES.c.finished == _NO, *conditions).distinct()
        keys = [Key(*row) for row in queries.rows_by_key(self._database.select(query), self._database.location)]
        found = {key: self.trials(key, unfinished=True) for key in keys}
        return {key: trials for key, trials in found.items() if trials}

    def keys(self, operation: str | None) -> set[Key]:
        """Returns every key that has a search."""
        query = sa.select(*(SEARCHES.c[name] for name in KEY)).distinct()
        query = query if operation is None else query.where(SEARCHES.c.operation == operation)
        return {Key(*row) for row in queries.rows_by_key(self._database.select(query), self._database.location)}

    def finish(self, connection: sa.Connection, keys: Collection[Key]) -> None:
        """Marks the searches of these keys as finished, within the caller's transaction."""
        if keys:
            connection.execute(_FINISH, list(map(queries.asked, keys)))
        self._end(keys)

    def forget(self, keys: Collection[Key]) -> int:
        """Deletes the searches of `keys` and their studies, and returns the number of their trials."""
        with self._database.reading() as select:
            names = [(key, name) for key in keys for (name,) in select(_NAMES, queries.asked(key))]
        if not names:
            return 0
        count = sum(len(self.trials(key)) for key in dict.fromkeys(key for key, _ in names))
        with self._lock, self._writing() as storage:
            for _, name in names:
                with contextlib.suppress(KeyError):
                    storage.delete_study(storage.get_study_id_from_name(name))
        with self._database.write() as connection:
            connection.execute(_FORGET, list(map(queries.asked, keys)))
        self._end(keys)
        return count

    def _end(self, keys: Collection[Key]) -> None:
        """Closes the current searches of `keys`, so that the next trial starts a new one."""
        self._open = {known: study for known, study in self._open.items() if known[0] not in keys}

    def close(self) -> None:
        with self._lock:
            if self._storage is not None:
                self._storage.engine.dispose()
            self._storage = None

    def _read(self, wanted: Sequence[sa.ColumnElement[bool]]) -> list[tuple[int, Trial]]:
        """Returns pairs of Optuna's trial id and the trial, in the order they ended."""
        select = self._database.select
        # Without a search, Optuna's tables may not exist.
        if not select(sa.select(SEARCHES.c.id).where(*wanted).limit(1)):
            return []
        return list(self._decoded(select(_query(*wanted))))

    def _decoded(self, found: Iterable[Sequence[Any]]) -> Iterator[tuple[int, Trial]]:
        for *names, number, text in found:
            try:
                line = json.loads(text)
                if not isinstance(line, str):
                    raise ValueError(f"expected text, found {type(line).__name__}")
                yield number, codec.trial_from_text(line)
            except (ValueError, TypeError) as error:
                log_once(
                    f"{self._database.location}: trial {number} of {Key(*names)} is skipped, it is malformed ({error})"
                )

    def _search(self, storage: RDBStorage, key: Key, environment: Environment) -> _OptunaStudy:
        """Returns the study of the current search."""
        place = key, _versions(environment)
        if place not in self._open:
            query = sa.select(SEARCHES.c.study).where(*_is(key), SEARCHES.c.finished == _NO, *_under(environment))
            for (name,) in self._database.select(query.order_by(SEARCHES.c.id.desc()).limit(1)):
                with contextlib.suppress(KeyError):  # a dashboard deleted the study
                    self._open[place] = _OptunaStudy(storage.get_study_id_from_name(name))
        if place not in self._open:
            self._open[place] = self._begin(storage, key, environment)
        return self._open[place]

    def _begin(self, storage: RDBStorage, key: Key, environment: Environment) -> _OptunaStudy:
        """Starts a search. Its study is created first, because a search without a study could not be read."""
        from optuna.study import StudyDirection

        name = f"{str(key)[:_LONGEST_NAME]}, {environment.date[:16]}, {uuid.uuid4().hex[:6]}"
        study = storage.create_new_study([StudyDirection.MINIMIZE], study_name=name)
        storage.set_study_system_attr(study, "study:metric_names", [METRIC])
        for attribute, value in (vars(key) | vars(environment)).items():
            storage.set_study_user_attr(study, attribute, value)
        with self._database.write() as connection:
            connection.execute(sa.insert(SEARCHES), {**vars(key), "study": name, **vars(environment), "finished": 0})
        return _OptunaStudy(study)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[RDBStorage]:
        """Provides Optuna's storage for one write, and converts its exceptions to `StoreError`."""
        from optuna.exceptions import StorageInternalError

        self._database.require_writable()
        with quietly(), self._database.turn(), self._database.errors("written"):
            if self._storage is None or self._database.missing():
                self._open.clear()
                self._storage = self._opened()
            storage = self._storage
            try:
                yield self._storage
            except BaseException as error:
                # The file may have been replaced, or the server restarted: the next write opens the storage again.
                self._storage = None
                if not self._database.in_memory:
                    storage.engine.dispose()
                if isinstance(error, StorageInternalError):
                    raise error.__cause__ or StoreError(str(error)) from error
                raise
            finally:
                storage.remove_session()

    def _opened(self) -> RDBStorage:
        """Opens Optuna's storage in this database, and creates its tables if they are missing."""
        import optuna
        from optuna.storages import RDBStorage

        with self._database.write():  # creates the file, its directory and this program's tables
            pass
        url, options = self._database.for_optuna()
        for attempt in range(_ATTEMPTS):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    storage = RDBStorage(url, engine_kwargs=options)
                self._database.listen(storage.engine)
                return storage
            except (sa.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
                if attempt == _ATTEMPTS - 1:
                    optunas = isinstance(error, optuna.exceptions.StorageInternalError)
                    raise (error.__cause__ if optunas and error.__cause__ else error) from None
                time.sleep(_WAIT_S * (1 + random.random()))
        raise AssertionError


@dataclasses.dataclass
class _OptunaStudy:
    """A study of Optuna.

    Attributes:
      id: in Optuna's tables.
      saved: the stored trials by `_identity`, with their ids in Optuna's tables; None until they are read.
      distributions: parameter -> its distribution, as text.
    """

    id: int
    saved: dict[tuple[int, Versioned], tuple[int, Trial]] | None = None
    distributions: dict[str, str] = dataclasses.field(default_factory=dict)


def _identity(trial: Trial) -> tuple[int, Versioned]:
    return trial.number, versioned(trial)


def _inserted(connection: sa.Connection, study: _OptunaStudy, frozen: FrozenTrial) -> int:
    """Inserts a trial without its values, and returns its id."""
    count = sa.select(sa.func.count()).select_from(_TRIALS).where(_TRIALS.c.study_id == study.id)
    row = {
        "study_id": study.id,
        "number": connection.execute(count).scalar_one(),
        "state": frozen.state.name,
        "datetime_start": _utc(frozen.datetime_start),
        "datetime_complete": _utc(frozen.datetime_complete),
    }
    return int(connection.execute(sa.insert(_TRIALS).returning(_TRIALS.c.trial_id), row).scalar_one())


def _query(*wanted: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Returns the query for the keys, ids and texts of trials, in the order they ended."""
    return (
        sa.select(*(SEARCHES.c[name] for name in KEY), _TRIALS.c.trial_id, _ATTRIBUTES.c.value_json)
        .join_from(SEARCHES, _STUDIES, _STUDIES.c.study_name == SEARCHES.c.study)
        .join(_TRIALS, _TRIALS.c.study_id == _STUDIES.c.study_id)
        .join(_ATTRIBUTES, _ATTRIBUTES.c.trial_id == _TRIALS.c.trial_id)
        .where(_ATTRIBUTES.c.key == TRIAL, *wanted)
        .order_by(SEARCHES.c.id, _TRIALS.c.number)
    )


@functools.lru_cache(maxsize=1024)
def _distribution_text(distribution: BaseDistribution) -> str:
    from optuna.distributions import distribution_to_json

    return distribution_to_json(distribution)


def _utc(local: datetime.datetime | None) -> datetime.datetime | None:
    return local and local.astimezone(datetime.UTC).replace(tzinfo=None)


def _versions(environment: Environment) -> tuple[str, str, str]:
    return environment.jax, environment.jaxlib, environment.driver


def _under(environment: Environment) -> list[sa.ColumnElement[bool]]:
    """Returns the conditions for searches under these versions."""
    columns = SEARCHES.c.jax, SEARCHES.c.jaxlib, SEARCHES.c.driver
    return [column == value for column, value in zip(columns, _versions(environment), strict=True)]


def _is(key: Key) -> list[sa.ColumnElement[bool]]:
    return [SEARCHES.c[name] == getattr(key, name) for name in KEY]


def _frozen(trial: Trial, described: Parameters | None) -> FrozenTrial:
    """Converts a trial to Optuna's type."""
    from optuna.trial import TrialState, create_trial

    attributes = {TRIAL: codec.trial_to_text(trial), PREDICTED: _us(trial.predicted_s)}
    state, value = TrialState.FAIL, None
    match trial.outcome:
        case Measurement() as measured:
            state, value = TrialState.COMPLETE, _us(measured.median_s)
            if measured.samples_s:
                attributes[SPREAD] = _us(measured.spread_s)
        case Failure() as failure:
            attributes[FAILURE] = str(failure)
    create = functools.partial(create_trial, state=state, value=value, user_attrs=attributes)
    parameters, distributions = described or ({}, {})
    try:
        frozen = create(params=dict(parameters), distributions={name: distributions[name] for name in parameters})
    except ValueError:  # a value outside of its distribution: a schedule of another version of the kernel
        frozen = create(params={}, distributions={})
    frozen.datetime_start = frozen.datetime_complete = datetime.datetime.now()
    return frozen


def _us(seconds: float) -> float:
    """Converts seconds to microseconds, rounded to a tenth of a nanosecond: 2.625, not 2.6250000000000004."""
    return round(seconds * 1e6, 4)
