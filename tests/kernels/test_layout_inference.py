"""Layouts of Mosaic GPU kernels are inferred sooner in worker processes, and are the same."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# In a process of its own, which it changes: of each operation JAX's own name, and the one that was remembered.
PROGRAM = """
import importlib

import jax

from scheduler.core import hardware
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import jax_compat, load
from search_spaces.lowering_compat import infer_layouts_sooner

inference = importlib.import_module("jax.experimental.mosaic.gpu.layout_inference")
own, asks = inference.ValueSite.__str__, jax_compat.JAX_VERSION[:2] == (0, 11)
infer_layouts_sooner()
infer, remembered, pairs = inference.infer_layout, inference.ValueSite.__str__, []
infer_layouts_sooner()
assert inference.infer_layout is infer, "it is done once"
assert (remembered is not own) == asks, "where it is of use"


def both(site):
    pairs.append((own(site), remembered(site)))
    return pairs[-1][0]


inference.ValueSite.__str__ = both
h200 = hardware.find("NVIDIA H200")
operation = load("add_rms_norm")
problem, kernel = operation.problem(rows=32, columns=4608), operation.kernel("mosaic_gpu")
schedule = prune(kernel, problem, h200, CostModel(h200)).candidates()[-1].schedule
point = kernel.space(problem, h200.target).decode(schedule)
traced = jax.jit(lambda *args: kernel.results(problem, point, h200.target, *args)).trace(*problem.operands())
traced.lower(lowering_platforms=("cuda",))
assert len({name for name, _ in pairs}) > 20 if asks else not pairs, pairs
assert all(name == other for name, other in pairs), pairs
assert remembered(type("Site", (), {"operation": "%1 = a.b", "type": inference.VariableType.RESULT, "index": 0})) == (
    "%1 = a.b:r-0"
), "of what is not inferred now"
"""


def test_operations_are_named_as_jax_names_them_and_each_once():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
