"""The examples run from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("plan", "the step's result is the same"),
        ("quickstart", "the gradient has shape (256, 128)"),
        ("own_kernel", "it differentiates"),
        ("autotuned_kernel", "they differentiate"),
        ("attention", "the gradient is right"),
        ("rows", "gradient of weight: right"),
        ("unmodified_model", "by interpret"),
        ("nnx_training", "The model was updated in place: yes"),
        ("equinox_training", "the activation is still gelu"),
        ("mixture_of_experts", "the gradients of tokens and experts are right"),
        ("sharded_mlp", "right, of shape (64, 32) on 4 devices"),
        ("problems", "6 problems, posed 84 times in a step"),
        ("tensor_parallel", "gated_matmul m=64 n=7168 k=8192 dtype=bfloat16 pair=True"),
    ],
)
def test_an_example_runs_and_prints_what_it_learned(example, says):
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{example}.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout
