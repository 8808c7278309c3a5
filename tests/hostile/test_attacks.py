"""The quick part of attacks on files, processes and workers; the long one is ``python -m tests.hostile``."""

import os
from pathlib import Path

import pytest
from attacks import ATTACKS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def name(attack):
    return f"{attack.name}: {attack.claim}".replace(" ", "_")


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if not attack.numbers], ids=name)
def test_although_it_is_attacked(attack, monkeypatch):
    # Workers, and what else is started, look for modules where this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)]))
    tried = attack.run(0, attack.quick)
    assert tried.tries
    assert not tried.failures
