"""Whether other processes are still there."""

import time
from pathlib import Path


def gone(pid):
    """True, once a process has ended; one that nobody has waited for yet has. The test's own limit is the only one."""
    while _runs(pid):
        time.sleep(0.05)
    return True


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started(pool):
    """The pool, once all its processes have started."""
    pool._detected_target()
    while len(pool._compilers.pids) < len(pool._compilers._processes) or any(
        process.target is None for process in pool._compilers._processes
    ):
        time.sleep(0.02)
    return pool
