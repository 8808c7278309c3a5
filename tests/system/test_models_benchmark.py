"""The benchmark of unmodified functions: its rows survive each other, and its figures follow from them."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import models
from plain_steps import STEPS, Built, Step

TIMED = {"kind": "training", "ratios": [1.9, 2.1], "optimize_vs_jnp": 2.0, "decided_s": 4.0, "rejected": []}
ROWS = [
    {"model": "one"} | TIMED,
    {"model": "two"} | TIMED | {"optimize_vs_jnp": 0.5, "decided_s": 6.0, "rejected": ["a kernel is not used"]},
    {"model": "packed"} | TIMED | {"kind": "masked", "optimize_vs_jnp": 9.0, "ratios": [0.9, 9.0]},
    {"model": "three", "error": "skipped: keras is not installed"},
    {"model": "overhead_2", "optimize_us": 12.0, "jnp_us": 10.0},
    {"model": "second_process", "optimize_s": 3.0, "plain_s": 2.0},
]


def test_figures_follow_from_rows():
    assert models.summary(ROWS) == {
        "training_steps": 2,
        "training_geomean": pytest.approx(1.0),
        "false_rejections": ["two"],
        "optimize_worst": 0.9,
        "overhead_us_2": 2.0,
        "overhead_200": None,
        "overhead_nnx": None,
        "second_process": 1.5,
        "decide_s": 5.0,
        "attention_found": None,
        "errors": ["three"],
    }


def test_each_version_has_arguments_of_its_own_and_carries_them():
    def add(total, x):
        return total + x, total

    built = Built(jax.jit(add, donate_argnums=0), lambda: (jnp.zeros(()), jnp.ones(())), carried=1)
    plain, other = built.caller(built.function), built.caller(add)
    assert [float(plain()[0]) for _ in range(3)] == [float(other()[0]) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_a_result_continues_past_failures_and_missing_frameworks(tmp_path, monkeypatch, capsys):
    def raises(error):
        raise error

    missing, broken = (
        Step("missing", "training", lambda small: raises(ModuleNotFoundError(name="keras"))),
        Step("broken", "training", lambda small: raises(ValueError("too large"))),
    )
    nucleus = next(step for step in STEPS if step.name == "nucleus")
    monkeypatch.setattr(models.plain_steps, "STEPS", (missing, broken, nucleus))
    where = ["--small", "--seconds", "0.01", "--repeats", "1", "--results", str(tmp_path)]
    models.main([*where, "--only", "nucleus"])
    models.main([*where, "--only", "mis*", "broken"])
    (path,) = tmp_path.glob("models-cpu*.json")
    rows = {row["model"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["missing", "broken", "nucleus"]
    assert rows["missing"]["error"] == "skipped: keras is not installed"
    assert rows["broken"]["error"] == "ValueError: too large"
    assert rows["nucleus"]["kept"] == "plain"
    assert rows["nucleus"]["ratios"]
    with pytest.raises(SystemExit):
        models.main(["--only", "neither"])
    assert "nothing is named neither; there are missing, broken, nucleus" in capsys.readouterr().err
