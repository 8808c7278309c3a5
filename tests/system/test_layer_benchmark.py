"""The benchmark of whole layers: models are the same on plain jnp and tuned calls, and its figures follow from rows."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import scheduler
from scheduler.functions import ablation

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import layer
import whole_functions
from layer_models import CASES, REHEARSED, Jnp, Tuned

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", REHEARSED, ids=lambda case: case.name)
def test_a_model_computes_the_same_on_both_sorts_of_operations(case):
    args = case.arguments(jnp.float32)
    written, ours = (jax.jit(case.function(ops))(*args) for ops in (Jnp(), Tuned()))
    assert jax.tree.structure(written) == jax.tree.structure(ours)
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(ours), strict=True):
        assert x.dtype == y.dtype
        assert jnp.allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(x))))


def test_cases_are_of_the_sizes_that_they_are_named_after():
    of = {case.name: jax.eval_shape(case.arguments) for case in CASES}
    assert {name: args[0].shape for name, args in of.items()} == {
        "prefill": (4096, 4096),
        "decode256": (256, 4096),
        "decode16": (16, 4096),
        "gpt2": (4096, 1600),
        "train": (4096, 4096),
    }
    weights = [x for name, x in of["prefill"][1][0].items() if "cache" not in name]
    assert sum(x.size for x in weights) == 218_112_000  # of a layer of Llama 3 8B
    assert of["decode16"][1][0]["k_cache"].shape == (16, 4096, 8, 128)


def test_every_product_of_a_layer_is_a_tuned_call():
    case = CASES[0]
    with scheduler.target("NVIDIA H200"):
        found = scheduler.problems(case.function(Tuned()), *jax.eval_shape(case.arguments))
    counted = {(row.operation.name, row.count) for row in found.tuned}
    assert counted == {("gated_matmul", 4), ("matmul", 4), ("flash_attention", 4), ("rms_norm", 8)}
    assert not found.untuned


def test_a_case_is_measured_kept_and_written_with_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablation, "SECONDS_OF_VARIANT", 0.2)
    monkeypatch.setattr(whole_functions, "SECONDS_OF_VERSION", 0.2)
    monkeypatch.setattr(layer, "REHEARSED", REHEARSED[1:2])
    where = ["--work", str(tmp_path / "work"), "--cache", str(tmp_path / "cache.db"), "--results", str(tmp_path)]
    layer.main(["--only", "decode16", "--minutes", "0", *where])
    said = capsys.readouterr().out
    assert "decode16: microseconds a layer" in said
    assert not list(tmp_path.glob("layer-*.json"))
    monkeypatch.setattr(layer, "row", lambda *_: pytest.fail("the row was kept"))
    layer.main(where)
    (written,) = tmp_path.glob("layer-*.json")
    assert '"decode16_vs_jnp": null' not in written.read_text()
    with pytest.raises(SystemExit):
        layer.main(["--only", "decode17", *where])
    assert "no case decode17; there are decode16" in capsys.readouterr().err


def test_the_summary_takes_ratios_of_plans_and_the_worst_of_optimize():
    row = {"plan_vs_jnp": 1.1, "optimize_vs_jnp": 0.99, "error_vs_jnp": {"plan": 1.0, "optimize": 1.02}}
    rows = [{"case": "prefill", **row}, {"case": "train", **row, "optimize_vs_jnp": 1.01}]
    figures = layer.summary(rows)
    assert (figures["prefill_vs_jnp"], figures["decode16_vs_jnp"]) == (1.1, None)
    assert (figures["optimize_worst"], figures["error_vs_jnp_worst"]) == (0.99, 1.02)
