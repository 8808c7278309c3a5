"""The quick part of every attack; the long one is ``python -m tests.hostile``."""

import os
from pathlib import Path

import pytest
from attacks import ATTACKS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def case(attack):
    marks = [pytest.mark.one_jax] if attack.one_jax else []
    return pytest.param(attack, marks=marks, id=f"{attack.name}: {attack.claim}".replace(" ", "_"))


@pytest.mark.parametrize("attack", [case(attack) for attack in ATTACKS])
def test_although_it_is_attacked(attack, monkeypatch):
    # Workers, and what else is started, look for modules where this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)]))
    tried = attack.run(0, attack.quick)
    assert tried.tries
    assert not tried.failures
