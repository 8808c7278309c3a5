"""Access of commands to the stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from scheduler.cli.arguments import wanted_by
from scheduler.cli.terminal import say
from scheduler.core.errors import StoreError

if TYPE_CHECKING:
    from scheduler.core.ranges import Range
    from scheduler.core.records import Record
    from scheduler.store.store import Store

T = TypeVar("T")
# The location that `ask_stores` returns for the store shipped with this package.
SHIPPED = "shipped"


def user_store() -> Store:
    from scheduler.store.store import Store, default_url

    return Store(default_url())


def no_store() -> Store:
    from scheduler.store.store import Store

    return Store(":memory:")


def ask_stores(ask: Callable[[Store], T]) -> Iterator[tuple[str, T]]:
    """Yields the location and result of `ask` for each store that calls read. Unreadable stores are reported."""
    from scheduler.store.store import shipped

    for opened in (user_store, shipped):
        try:
            if (store := opened()) is None:
                continue
            answer = ask(store)
        except StoreError as error:
            say(f"tile-scheduler: {error} (going on without it)")
        else:
            yield SHIPPED if opened is shipped else store.location, answer


def open_stores() -> list[Store]:
    """Returns the readable stores among those that calls read. Unreadable stores are reported."""
    from scheduler.core.records import Key

    def readable(store: Store) -> Store:
        store.get(Key("", "", ""))
        return store

    return [store for _, store in ask_stores(readable)]


def records_of(store: Store, operation: str | None, hardware: str | None) -> list[Record]:
    """Returns the records of a store that match command-line options."""
    keys = [head.key for head in store.heads()]
    wanted = wanted_by(keys, operation, hardware)
    return list(store.read(filter(wanted, keys)))


def ranges_of(store: Store, operation: str | None, hardware: str | None) -> list[Range]:
    """Returns the ranges of a store that match command-line options."""
    from scheduler.core.records import Key

    ranges = {Key(one.operation, one.hardware, one.problem): one for one in store.ranges.all()}
    wanted = wanted_by([*(head.key for head in store.heads()), *ranges], operation, hardware)
    return [one for one in store.ranges.all() if wanted(Key(one.operation, one.hardware, one.problem))]
