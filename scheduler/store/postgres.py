"""PostgreSQL as a shared store, with timeouts for connections, statements and locks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import sqlalchemy as sa

CONNECT_S = 5
STATEMENT_MS, LOCK_MS, IDLE_MS = 15_000, 10_000, 60_000
# A server that is suspended neither responds nor enforces its own timeouts, while its host keeps the connection alive.
LONGEST_S = 60.0

# Defaults that the URL overrides. The timeout applies per address: a host name may have several.
_CONNECTION = {
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 30,
    "tcp_user_timeout": 15_000,
    # Poolers (PgBouncer) may use another connection for each transaction, without the earlier prepared statements.
    "prepare_threshold": None,
}
# Set per transaction, because poolers would reject start-up parameters.
_LIMITS = (
    f"SELECT set_config('statement_timeout', '{STATEMENT_MS}', true), set_config('lock_timeout', '{LOCK_MS}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE_MS}', true)"
)


def engine(url: sa.URL) -> sa.Engine:
    """Creates an engine that connects anew for each use, because a connection must not be shared across a fork."""
    ours = url.get_driver_name() == "psycopg"
    settings = {name: value for name, value in _CONNECTION.items() if ours and name not in url.query}
    made = sa.create_engine(url, poolclass=sa.NullPool, connect_args=settings)
    if ours:
        sa.event.listen(made, "connect", _watch)
        sa.event.listen(made, "close", _leave)
        if "options" not in url.query:
            sa.event.listen(made, "begin", lambda connection: connection.exec_driver_sql(_LIMITS))
    return made


def _watch(connection: Any, record: Any) -> None:
    timer = threading.Timer(LONGEST_S, _hang_up, (connection,))
    timer.daemon = True
    timer.start()
    record.info["watch"] = timer


def _leave(connection: Any, record: Any) -> None:
    if (timer := record.info.pop("watch", None)) is not None:
        timer.cancel()


def _hang_up(connection: Any) -> None:
    """Shuts a connection down from another thread, so that a blocked read fails as if the server had disconnected."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.pgconn.socket)) as own:
        own.shutdown(socket.SHUT_RDWR)
