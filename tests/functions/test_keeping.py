"""`scheduler.optimize` drops groups of kernels without which a function is not slower, and keeps the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.dispatch.stored import Times
from scheduler.rewriting import comparison, interleaved, lowering, trial
from scheduler.rewriting.interleaved import Seconds
from scheduler.rewriting.lowering import Replaced
from search_spaces.matmul import MATMUL


@pytest.fixture
def timed(monkeypatch):
    """Returns a function that gives each version a time by the start of its label; it returns the rounds' labels."""

    def given(times_ms):
        rounds = []

        def time_interleaved(runs, **_):
            rounds.append(list(runs))
            own = {label: next(ms for start, ms in times_ms.items() if label.startswith(start)) for label in runs}
            return {label: Seconds((1e-3 * ms,) * 12) for label, ms in own.items()}

        monkeypatch.setattr(interleaved, "time_interleaved", time_interleaved)
        return rounds

    return given


def products(*arrays):
    """Products of as many kinds as there are sizes."""
    return [x @ x for x in arrays]


def squares(*sizes):
    return [jax.random.normal(jax.random.key(n), (n, n)) for n in sizes]


def without(size):
    return f"without matmul m={size} "


def optimized(fn, *args):
    """The decision about ``fn(*args)``, whose results are the plain ones, and the report."""
    fast = scheduler.optimize(fn, backends="interpret")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), fast(*args), jax.jit(fn)(*args))
    (decision,) = fast.decisions
    return decision, fast.report()


def sizes(decision):
    return {each.problem.m for each in decision.replaced}


def test_a_group_that_slows_the_function_down_is_dropped_and_the_others_are_kept(timed):
    rounds = timed({"plain": 10, "tuned": 11, without(8): 8, without(4): 12})
    decision, report = optimized(lambda x, y: (x @ x @ x, y @ y), *squares(8, 4))
    assert (decision.kept, sizes(decision)) == ("tuned", {4})
    assert decision.reason.startswith("uses 1 kernel: 1.25 times as fast")
    assert "with 1 kernel 8.00 ms, XLA 10.0 ms" in report
    slow, fast = sorted(decision.groups, reverse=True)
    assert slow.startswith("matmul m=8 n=8 k=8 dtype=float32, 2 times: the function is 27.3 % faster without it (99 %")
    assert slow.endswith("left to XLA")
    assert "m=4" in fast
    assert "9.1 % slower without it (99 % confidence: 9.1 to 9.1 %)" in fast
    assert fast.endswith("kept")
    assert f"  group: {slow}\n" in report
    (dropped,) = decision.dropped
    assert (dropped.problem.m, dropped.reason) == (8, trial.DROPPED)
    assert "  1 kind of matmul stays with XLA: m=8 n=8 k=8 dtype=float32: the function is not slower" in report
    assert [sorted(labels)[:2] for labels in rounds] == [["plain", "tuned"]] * 2


@pytest.mark.parametrize(("bytes_without", "kept"), [(70, {4, 2}), (60, {2}), (50, {2})])
def test_a_tie_is_kept_only_if_it_needs_less_memory(timed, monkeypatch, bytes_without, kept):
    def peak_bytes(version):
        return bytes_without if sizes(version.lowered) == {8, 2} else 60

    monkeypatch.setattr(trial.Version, "peak_bytes", property(peak_bytes))
    timed({"plain": 10, "tuned": 11, without(8): 8, without(4): 11, without(2): 12, "rest": 7})
    decision, _ = optimized(products, *squares(8, 4, 2))
    assert sizes(decision) == kept


@pytest.mark.parametrize(("rest_ms", "kept"), [(7, {2}), (9, {4, 2}), (8, {2})], ids=["rest", "best single", "as fast"])
def test_the_best_single_version_is_kept_if_it_is_faster_than_all_drops_together(timed, rest_ms, kept):
    times = {"plain": 10, "tuned": 11, without(8): 8, without(4): 10.5, without(2): 12, "rest": rest_ms}
    rounds = timed(times)
    decision, _ = optimized(products, *squares(8, 4, 2))
    assert sizes(decision) == kept
    assert [label.partition(" n=")[0] for label in rounds[-1]] == ["plain", "without matmul m=8", "rest"]
    assert sum(group.endswith("kept") for group in decision.groups) == len(kept)


def test_without_a_sure_gain_of_any_version_xlas_is_used(timed):
    timed({"plain": 10, "tuned": 12, without(8): 11, without(4): 10})
    decision, report = optimized(products, *squares(8, 4))
    assert decision.kept == "plain"
    assert decision.reason.endswith("no sure gain (the version with 1 kernel is 1.00 times as fast)")
    assert [group.endswith("left to XLA") for group in decision.groups] == [True, True]
    assert report.count("tried, and not used") == 1


def test_if_all_kernels_gain_as_predicted_no_other_version_is_compiled(timed, monkeypatch):
    lowered, lower = [], lowering.lower_with_kernels
    monkeypatch.setattr(lowering, "lower_with_kernels", lambda *a, **how: lowered.append(how) or lower(*a, **how))
    rounds = timed({"plain": 10, "tuned": 5})
    decision, _ = optimized(products, *squares(8, 4))
    assert (sizes(decision), decision.groups, rounds) == ({8, 4}, (), [["plain", "tuned"]])
    assert [bool(how.get("in_place")) for how in lowered] == [True, False]  # the first hands out what is compared


def test_the_prediction_is_the_sum_of_what_each_kernel_saves_as_often_as_it_runs():
    def kernel(times, alone):
        problem = MATMUL.problem(m=8, n=8, k=8, dtype="float32")
        return Replaced("matmul", problem, "mosaic_gpu", (), "", times=times, alone=alone)

    replaced = [kernel(3, Times(1e-3, 2e-3)), kernel(1, Times(2e-3, 1e-3)), kernel(5, None)]
    assert trial.predicted_gain_s(replaced) == pytest.approx(2e-3)
    for tuned_ms, expected in [(8.1, True), (8.3, False), (10.1, False)]:
        tuned, plain = Seconds((tuned_ms * 1e-3,) * 12), Seconds((10e-3,) * 12)
        assert trial.gains_as_predicted(tuned, plain, replaced) == expected
    assert not trial.gains_as_predicted(plain, plain, [kernel(1, None)])


def test_at_most_seven_versions_are_compiled_and_the_last_group_holds_the_rest(timed):
    rounds = timed({"plain": 10, "tuned": 11, "without": 8, "rest": 7})
    decision, _ = optimized(products, *squares(8, 7, 6, 5, 4))
    assert len(decision.groups) == 4
    assert decision.groups[3].count("matmul m=") == 2
    assert decision.kept == "tuned"  # all are dropped: the best version without one of them
    assert len({label for labels in rounds for label in labels}) == 6
    rounds = timed({"plain": 10, "tuned": 11, without(8): 12, "without": 8, "rest": 7})
    decision, _ = optimized(products, *squares(8, 7, 6, 5, 4))
    assert sizes(decision) == {8}
    assert len({label for labels in rounds for label in labels}) == 7


def test_attention_and_its_gradient_are_one_group_and_no_kernel_takes_a_part_of_what_is_dropped(timed):
    def loss(x, y):
        attended = jax.nn.softmax(x @ x.swapaxes(-1, -2)) @ x
        return (attended**2).sum() + (y @ y).sum()

    timed({"plain": 10, "tuned": 11, "without flash_attention ": 8, "without matmul": 12, "without": 12})
    decision, _ = optimized(jax.grad(loss, (0, 1)), jnp.ones((1, 2, 8, 4)), *squares(6))
    assert {each.operation for each in decision.replaced} == {"matmul"}
    assert {each.problem.batch for each in decision.replaced} == {1}
    (dropped,) = (each for each in decision.groups if each.endswith("left to XLA"))
    assert dropped.startswith("flash_attention batch=2 ")
    assert "; flash_attention_backward batch=2 " in dropped


def test_changes_without_a_kernel_are_a_group(timed):
    def picked(x, labels):
        return jnp.take_along_axis(jnp.tanh(x @ x), labels[:, None], -1).sum()

    timed({"plain": 10, "tuned": 11, "without matmul": 12, "without": 9})
    decision, _ = optimized(jax.grad(picked), *squares(8), jnp.arange(8))
    assert (decision.kept, decision.changes) == ("tuned", ())
    assert any("scatter" in each and each.endswith("left to XLA") for each in decision.groups)


def test_a_group_without_which_results_differ_is_kept(timed, monkeypatch):
    found = iter([None, "result[0] differs", None])
    monkeypatch.setattr(comparison, "disagreement", lambda *_: next(found))
    timed({"plain": 10, "tuned": 9, "without": 8})
    monkeypatch.setattr(trial, "predicted_gain_s", lambda _: 5e-3)
    decision, _ = optimized(products, *squares(8, 4))
    assert (decision.kept, len(decision.replaced)) == ("tuned", 1)
    (kept,) = (each for each in decision.groups if each.endswith("kept"))
    assert "the function cannot be used without it: result[0] differs" in kept
