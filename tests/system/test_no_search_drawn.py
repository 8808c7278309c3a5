"""Shapes as users have them: what is drawn, a rehearsal of the benchmark, and its figures."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from scheduler.core import hardware as chips
from scheduler.prediction.predict import predict
from search_spaces.hopper import smem_layout
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.row_alignment import ROW_BYTES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import no_search_drawn
from drawn_problems import ANY_SHAPE, drawn

H200 = chips.find("NVIDIA H200")
TASKS = drawn(300, 0, ANY_SHAPE, 16, no_search_drawn.small_enough)


def test_what_is_drawn_has_all_operations_dtypes_and_layouts_and_enough_unaligned_products():
    operations = Counter(task.operation.name for task in TASKS)
    wanted = {"matmul", "gated_matmul", "scaled_matmul", "flash_attention", "flash_attention_backward", "group_norm"}
    assert wanted | {"ragged_dot", "softmax"} <= set(operations)
    assert any(name.endswith("norm_backward") for name in operations)
    products = [task.problem for task in TASKS if task.operation.name == "matmul"]
    assert {p.dtype for p in products} == {"bfloat16", "float16", "float32", "int8", "float8_e4m3fn"}
    assert {p.m for p in products} >= {1, 77, 197, 65536}
    assert any(p.transpose_a for p in products)
    assert any(p.batch > 1 for p in products)
    rows = [p.m for p in products if p.row_alignment < ROW_BYTES]
    assert sum(m >= no_search_drawn.FEW_ROWS for m in rows) >= 20
    assert sum(m < no_search_drawn.FEW_ROWS for m in rows) >= 5


def test_more_draws_of_a_seed_begin_with_fewer_and_another_seed_has_others():
    first = drawn(40, 0, ANY_SHAPE, 16, no_search_drawn.small_enough)
    assert [str(task) for task in first] == [str(task) for task in TASKS[:40]]
    other = drawn(40, 1, ANY_SHAPE, 16, no_search_drawn.small_enough)
    assert len({str(task) for task in other} & {str(task) for task in first}) < 10


def test_evidence_has_no_search_of_a_problem_with_unaligned_rows():
    fitted, records = no_search_drawn.evidence("matmul", H200)
    assert len(records) > 50
    everything = [r.key.problem for r in no_search_drawn._records() if r.key.operation == "matmul"]
    hidden = {text for text in everything if not no_search_drawn.aligned(MATMUL, text)}
    assert len(hidden) >= 3
    assert hidden.isdisjoint(r.key.problem for r in records)
    assert hidden.isdisjoint(o.problem for one in fitted.values() for o in one.observations)


# Microseconds of XLA on an H200, bfloat16, and whether the model's schedule is faster.
MEASURED = {
    (4096, 4097, 4096): (592, True),
    (4096, 4096, 4095): (528, True),
    (4095, 4095, 4095): (841, True),
    (8192, 50257, 768): (2369, True),
    (512, 50257, 768): (178, True),
    (2048, 3000, 1001): (59, True),
    (16, 4097, 4096): (19, False),
}


@pytest.mark.parametrize("extents", MEASURED, ids=str)
def test_a_product_with_unaligned_rows_is_answered_without_a_record_of_any(monkeypatch, extents):
    # With JAX 0.11: before it, the kernel pads the arrays of ragged products.
    monkeypatch.setattr(smem_layout, "HAS_UNTILED_SWIZZLE", True)
    (xla_us, ours), problem = MEASURED[extents], MatmulProblem(*extents)
    fitted, records = no_search_drawn.evidence("matmul", H200)
    answer = predict(MATMUL, problem, H200, records=records, fitted=fitted)
    assert (answer.backend == "mosaic_gpu") is ours
    assert answer.library_s * 1e6 == pytest.approx(xla_us, rel=0.3)


def row(operation, library_us, answer_us, pallas_us, **others):
    answer = {"backend": "mosaic_gpu", "predicted_us": 1.0, "predicted_xla_us": 1.0, "reason": "because"}
    times = {"library_us": library_us, "xla_us": library_us, "answer_us": answer_us, "pallas_us": pallas_us}
    told = {"operation": operation, "problem": "m=1", "row_alignment": 16, "few_rows": False, "failures": {}}
    return told | times | {"answer": answer} | others


def test_figures_follow_from_the_rows_and_a_loss_has_its_reason():
    rows = [
        row("matmul", 4.0, 2.0, 1.0, row_alignment=2),
        row("softmax", 1.0, 1.25, 2.0),
        row("softmax", 1.0, 1.0, 3.0),
    ]
    figures = no_search_drawn.summary(rows)
    assert figures["drawn_worst"] == pytest.approx(0.8)
    assert figures["by_operation"]["matmul"]["gain_taken"] == pytest.approx(0.5)
    assert figures["by_operation"]["softmax"]["gain_taken"] is None
    assert figures["unaligned_vs_xla_geomean"] == figures["unaligned_vs_xla_worst"] == pytest.approx(2.0)
    assert figures["drawn_gain_taken_searched"] is None
    assert ["because" in line and "0.80" in line for line in no_search_drawn.losses(rows)] == [True]
    searched = no_search_drawn.summary([rows[0] | {"searched_us": 0.5}])
    assert searched["drawn_gain_taken_searched"] == pytest.approx(1 / 3)


def test_a_rehearsal_times_answers_libraries_and_first_schedules_and_goes_on_where_it_ended(tmp_path, capsys):
    command = ["--small", "--count", "2", "--processes", "1", "--work", str(tmp_path), "--results", str(tmp_path)]
    no_search_drawn.main(command)
    (result,) = tmp_path.glob("no_search_drawn-*.json")
    rows = json.loads(result.read_text())["rows"]
    assert [line["operation"] for line in rows] == ["matmul", "rms_norm"]
    for line in rows:
        assert line["answer_us"] > 0
        assert line["library_us"] > 0
        assert line["pallas_us"] > 0
        assert 1 <= len(line["candidates"]) <= no_search_drawn.FIRST + 1
    assert "batch: 1 of 1" in capsys.readouterr().out
    no_search_drawn.main(command)
    assert json.loads(result.read_text())["rows"] == rows
    assert "batch" not in capsys.readouterr().out
