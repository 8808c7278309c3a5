"""What all tests share: no test reads or writes the user's own cache."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILE_SCHEDULER_CACHE", str(tmp_path / "cache.db"))
    monkeypatch.delenv("TILE_SCHEDULER_ON_MISS", raising=False)
