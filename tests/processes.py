"""Whether other processes are still there."""

import time
from pathlib import Path


def gone(pid, within_s=20):
    """Whether a process ends in time; one that nobody has waited for yet has ended."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
