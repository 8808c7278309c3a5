"""The quick part of every attack; the long one is ``python -m tests.hostile``."""

import os
from pathlib import Path

import pytest
from attacks import ATTACKS

HERE = Path(__file__).parent
pytestmark = pytest.mark.one_jax


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: f"{attack.name}: {attack.claim}".replace(" ", "_"))
def test_although_it_is_attacked(attack, monkeypatch):
    # Workers, and what else is started, look for modules where this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)]))
    tried = attack.run(0, attack.quick)
    assert tried.tries
    assert not tried.failures
