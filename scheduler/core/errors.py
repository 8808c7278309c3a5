"""Exceptions; each message says what was expected, what was found and what to do."""

from __future__ import annotations

from scheduler.core.text import printable


class SchedulerError(Exception):
    """Base class of this project's errors. The message may quote untrusted text and is sanitized for terminals."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CacheMiss(SchedulerError):
    """No schedule is stored, and the caller requested an error in that case."""


class IllegalSchedule(SchedulerError, ValueError):
    """A schedule that its kernel cannot run for this problem; the message has the reason."""


class NoCandidate(SchedulerError):
    """No candidate can run: all schedules were dropped or failed, or no backend applies; the message has the reason."""


class CandidateFailed(SchedulerError):
    """The first failed candidate, if the caller requested an error instead of a search; its cause is the error."""


class RemoteTrace(Exception):
    """A traceback from another process, as the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"\n{printable(super().__str__())}"


class TakesHours(SchedulerError):
    """A search that would take too long; the message has the expected time and an alternative."""


class SamplerFailed(SchedulerError, ValueError):
    """A sampler that cannot propose schedules; the message has its error, and the parameters with their values."""


class RecordingError(SchedulerError):
    """A recorded sweep that cannot be read or belongs to something else."""


class NotRecorded(SchedulerError, LookupError):
    """A lookup in a recorded sweep that does not contain the candidate."""


class StoreError(SchedulerError):
    """A cache that cannot be read or written; the message says what to do."""


class MalformedRecord(StoreError):
    """A single record in a cache that cannot be read; the other records are readable."""


class PlanError(SchedulerError):
    """A plan that cannot be read, was edited by hand, or differs between the processes of a job."""


class UnknownChip(SchedulerError):
    """A chip of an architecture that is not in the hardware table."""


class WorkerError(SchedulerError):
    """Worker processes that could not be started or were lost."""


class DeviceLost(WorkerError):
    """All worker processes of a device were lost, and no new ones can be started on it."""


class ExecutorLost(SchedulerError):
    """An executor of tuning jobs, a GPU or a host, was lost together with its current search."""


class MissingPackage(SchedulerError):
    """A required package is not installed; the message says how to install it."""


class NothingToDraw(SchedulerError):
    """A plot of data that does not exist; the message says what to do."""
