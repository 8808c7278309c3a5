"""What goes wrong, by name: each message says what was wanted, what was found and what to do."""


class SchedulerError(Exception):
    """Any error of this project."""


class CacheMiss(SchedulerError):
    """No stored schedule, and the caller asked for an error rather than an answer without measuring."""


class IllegalSchedule(SchedulerError, ValueError):
    """A schedule that its kernel cannot run for this problem, with the reason."""


class NoCandidate(SchedulerError):
    """Nothing could run: every schedule was dropped or failed, or none can be asked; the message says why."""


class RecordingError(SchedulerError):
    """A recorded sweep that cannot be read, or is one of something else."""


class NotRecorded(SchedulerError, LookupError):
    """A recorded sweep was asked for what it does not hold."""


class StoreError(SchedulerError):
    """A cache that cannot be read or written, with what to do about it."""


class MalformedRecord(StoreError):
    """A record that a cache holds and that cannot be read; all others can."""


class WorkerError(SchedulerError):
    """Worker processes that could not be started or went away."""
