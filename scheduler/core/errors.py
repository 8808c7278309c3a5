"""What goes wrong, by name: each message says what was wanted, what was found and what to do."""

from scheduler.core.safe_text import printable


class SchedulerError(Exception):
    """Any error of this project. Its text may quote what others wrote, and is made safe for a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CacheMiss(SchedulerError):
    """No stored schedule, and the caller asked for an error rather than an answer without measuring."""


class IllegalSchedule(SchedulerError, ValueError):
    """A schedule that its kernel cannot run for this problem, with the reason."""


class NoCandidate(SchedulerError):
    """Nothing could run: every schedule was dropped or failed, or none can be asked; the message says why."""


class CandidateFailed(SchedulerError):
    """The first candidate that failed, where that is wanted rather than a search; its cause is what was raised."""


class RemoteTrace(Exception):
    """A traceback as another process wrote it: the cause of what is raised here for it."""

    def __str__(self) -> str:
        return f"\n{printable(super().__str__())}"


class TakesHours(SchedulerError):
    """A search that nobody would wait for: what it would take, and what to do instead."""


class RecordingError(SchedulerError):
    """A recorded sweep that cannot be read, or is one of something else."""


class NotRecorded(SchedulerError, LookupError):
    """A recorded sweep was asked for what it does not hold."""


class StoreError(SchedulerError):
    """A cache that cannot be read or written, with what to do about it."""


class MalformedRecord(StoreError):
    """A record that a cache holds and that cannot be read; all others can."""


class PlanError(SchedulerError):
    """A plan that cannot be read, was changed by hand, or differs between the processes of one job."""


class UnknownChip(SchedulerError):
    """A chip of whose architecture nothing is known."""


class WorkerError(SchedulerError):
    """Worker processes that could not be started or went away."""


class DeviceLost(WorkerError):
    """All worker processes of a device were lost, and it takes no new ones."""


class PlaceLost(SchedulerError):
    """A place where problems are tuned went away, a GPU or a host, and with it the search that it was at."""


class MissingPackage(SchedulerError):
    """What is asked for needs a package that is not installed; the message says how to install it."""


class NothingToDraw(SchedulerError):
    """A picture of what is not there, with what to do about it."""
