"""A PostgreSQL server of our own, on a socket in a directory of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Server:
    home: Path
    user: str | None

    @property
    def url(self) -> str:
        return f"postgresql://tester:secret@/postgres?host={self.home}"

    def run(self, *command: object) -> None:
        subprocess.run(
            list(map(str, command)), user=self.user, cwd=self.home, check=True, stdout=subprocess.DEVNULL
        )  # fmt: skip

    def control(self, *command: object) -> None:
        self.run(_programs() / "pg_ctl", "-D", self.home / "data", *command)

    def start(self) -> None:
        # fsync is for machines that fail: what a server has written, the system keeps when that one is killed.
        options = f"-k '{self.home}' -c listen_addresses='' -c fsync=off"
        self.control("-w", "-l", self.home / "log", "-o", options, "start")

    def stop(self) -> None:
        """At once: nothing is finished, nothing is written that was not yet."""
        self.control("-m", "immediate", "stop")


def _programs() -> Path | None:
    found = shutil.which("initdb") or max(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), default=None)
    return Path(found).parent if found else None


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """One that runs; skips where there is none to run."""
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is missing: pip install 'psycopg[binary]'")
    if (programs := _programs()) is None:
        pytest.skip("PostgreSQL's programs are not installed")
    user = None
    if os.geteuid() == 0:  # The server refuses to run as root.
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = next((name for name in ("postgres", "nobody") if name in names), None)
        if user is None:
            pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or nobody")
    with tempfile.TemporaryDirectory(prefix="tile-scheduler-postgres-") as name:
        home = Path(name)
        if user:
            shutil.chown(home, user)
        made = Server(home, user)
        made.run(programs / "initdb", "-D", home / "data", "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync")
        made.start()
        try:
            yield made
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # it may be stopped already
                made.stop()
