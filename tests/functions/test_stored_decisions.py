"""A decision of `scheduler.optimize` is stored, and another process uses it without comparing or timing again."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sqlalchemy as sa
from values import record

import scheduler
from scheduler.dispatch import dispatch
from scheduler.rewriting import comparison, interleaved, lowering, stored_decisions
from scheduler.rewriting.stored_decisions import find
from search_spaces import load, lowering_compat

ON_CPU = {"backends": "interpret"}
X = jnp.arange(64.0).reshape(8, 8) / 64


def attention(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


@pytest.fixture
def work(monkeypatch):
    """What was compared or timed since the last `clear`; decisions are stored, as they are outside of tests."""
    monkeypatch.setattr(stored_decisions, "find", find)
    done = []
    for module, name in (
        (comparison, "disagreement"),
        (comparison, "verdict"),
        (interleaved, "time_interleaved"),
    ):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _run=run, _name=name, **k: done.append(_name) or _run(*a, **k))
    return done


def another_process(fn, **options):
    """The function as a process that has decided nothing optimizes it."""
    dispatch.reload()
    comparison._checked.clear()
    return scheduler.optimize(fn, **ON_CPU, **options)


@pytest.mark.parametrize("keep", ["faster", "tuned"])
def test_another_process_neither_compares_nor_times(work, keep):
    args = [X.reshape(1, 8, 2, 4) + i for i in range(3)]
    first = another_process(attention, keep=keep, seconds=0.1)
    expected = first(*args)
    assert set(work) == {"disagreement", "verdict"} | ({"time_interleaved"} if keep == "faster" else set())
    work.clear()
    second = another_process(attention, keep=keep, seconds=0.1)
    np.testing.assert_array_equal(second(*args), expected)
    assert work == []
    (before,), (after,) = first.decisions, second.decisions
    assert (after.kept, after.replaced, after.tuned, after.plain_bytes) == (
        before.kept,
        before.replaced,
        before.tuned,
        before.plain_bytes,
    )
    assert after.reason.startswith(f"{before.reason} (decided on 2")


def test_other_shapes_options_and_functions_are_decided(work):
    another_process(lambda x: x @ x, keep="tuned")(X)
    for fn, x, options in [
        (lambda x: x @ x, X[:4, :4], {"keep": "tuned"}),
        (lambda x: x @ x + 1, X, {"keep": "tuned"}),
        (lambda x: x @ x, X, {"keep": "faster", "seconds": 0.0}),
        (lambda x: x @ x, X, {"keep": "tuned", "donate_argnums": 0}),
        (lambda x: x @ x, X, {"keep": "tuned", "compiler_options": {"xla_cpu_enable_fast_math": True}}),
    ]:
        work.clear()
        another_process(fn, **options)(x + 0)
        assert work


def test_another_process_lowers_and_selects_nothing(work, monkeypatch):
    first = another_process(lambda x: jax.nn.softmax(x @ x), keep="tuned")
    expected = first(X)
    monkeypatch.setattr(lowering, "lower_with_kernels", None)
    second = another_process(lambda x: jax.nn.softmax(x @ x), keep="tuned")
    np.testing.assert_array_equal(second(X), expected)
    assert second.decisions[0].replaced == first.decisions[0].replaced != ()


def test_a_changed_store_is_asked_again(work):
    another_process(lambda x: x @ x, keep="tuned")(X)
    dispatch.user_cache().put(record())
    work.clear()
    another_process(lambda x: x @ x, keep="tuned")(X)
    assert work


def test_another_process_drops_the_same_group_of_kernels(work, monkeypatch):
    times_ms = {"plain": 10, "tuned": 11, "without matmul m=8": 8, "without matmul m=4": 12}

    def time_interleaved(runs, **_):
        work.append("time_interleaved")
        own = {label: next(ms for start, ms in times_ms.items() if label.startswith(start)) for label in runs}
        return {label: interleaved.Seconds((1e-3 * ms,) * 12) for label, ms in own.items()}

    def products(x, y):
        return x @ x, y @ y

    monkeypatch.setattr(interleaved, "time_interleaved", time_interleaved)
    first = another_process(products)
    first(X, X[:4, :4])
    assert work.count("time_interleaved") == 2
    work.clear()
    second = another_process(products)
    second(X, X[:4, :4])
    assert work == []
    (before,), (after,) = first.decisions, second.decisions
    assert [each.problem.m for each in after.replaced] == [4]
    assert (after.kept, after.groups, after.left) == (before.kept, before.groups, before.left)
    assert (after.dropped, [each.problem.m for each in after.dropped]) == (before.dropped, [8])
    assert len(after.groups) == 2


def two_percent_off(y):
    return 1.02 * y


def two_percent_off_if_large(y):
    """Random operands of a product have no result as large."""
    return jnp.where(y > 500, two_percent_off(y), y)


@pytest.mark.parametrize(
    ("operation", "change"), [("flash_attention", two_percent_off), ("matmul", two_percent_off_if_large)]
)
def test_another_process_leaves_out_the_kernel_that_disagreed(work, monkeypatch, operation, change):
    kernel = type(load(operation).kernel("interpret"))
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **how: jax.tree.map(change, run(*args, **how)))

    def step(q, x, y):
        return attention(q, q, q), x @ x, y @ (200 * y)

    args = X.reshape(1, 8, 2, 4), X, X[:4, :4] + 1
    first = another_process(step, keep="tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first(*args)
    work.clear()
    second = another_process(step, keep="tuned")
    second(*args)
    assert work == []
    (before,), (after,) = first.decisions, second.decisions
    assert after.kept == "tuned"
    assert (after.replaced, after.left) == (before.replaced, before.left)
    assert len(after.replaced) == 2
    assert any("disagree" in reason for reason in after.left)


@pytest.mark.parametrize("change", ["'{}'", 'replace(decision, \'"module": "\', \'"module": "A\')'])
def test_a_malformed_decision_is_decided_again(work, change):
    another_process(lambda x: x @ x, keep="tuned")(X)
    with dispatch.user_cache()._user._database.write() as connection:
        assert connection.execute(sa.text(f"UPDATE decisions SET decision = {change}")).rowcount == 1
    work.clear()
    again = another_process(lambda x: x @ x, keep="tuned")
    again(X)
    assert work
    assert again.decisions[0].kept == "tuned"


def test_a_decision_that_names_code_runs_none_and_is_decided_again(work, tmp_path, monkeypatch):
    another_process(lambda x: x @ x, keep="tuned")(X)
    code = tmp_path / "code.py"
    code.write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w').close()")
    cache = dispatch.user_cache()
    with cache._user._database.write() as connection:
        ((key, decision),) = connection.execute(sa.text("SELECT key, decision FROM decisions")).fetchall()
    text = decision.partition(" ")[2].replace('"operation": "matmul"', f'"operation": "{code}:MATMUL"')
    assert str(code) in text
    cache.put_decision(key, f"{stored_decisions._digest(key, text)} {text}")
    work.clear()
    another_process(lambda x: x @ x, keep="tuned")(X)
    assert work
    assert not (tmp_path / "it-ran").exists()


def test_other_code_of_this_package_or_jaxlib_decides_again(work, monkeypatch):
    another_process(lambda x: x @ x, keep="tuned")(X)
    monkeypatch.setattr(stored_decisions, "_code", lambda: "another version")
    work.clear()
    another_process(lambda x: x @ x, keep="tuned")(X)
    assert work


def test_a_version_that_no_longer_compiles_is_decided_again(work, monkeypatch):
    another_process(lambda x: x @ x, keep="tuned")(X)
    monkeypatch.setattr(lowering_compat, "with_module", lambda *_: None)
    work.clear()
    again = another_process(lambda x: x @ x, keep="tuned")
    again(X)
    assert work
    assert again.decisions[0].kept == "tuned"


@pytest.mark.parametrize("change", [two_percent_off, None])
def test_another_process_finds_that_no_kernel_is_used(work, monkeypatch, change):
    kernel = type(load("matmul").kernel("interpret"))
    run = kernel.run
    if change:
        monkeypatch.setattr(kernel, "run", lambda *args, **how: change(run(*args, **how)))
    else:
        monkeypatch.setattr(comparison, "disagreement", lambda *_: work.append("disagreement") or "2 % off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = another_process(lambda x: x @ x, keep="tuned")
        first(X)
    work.clear()
    second = another_process(lambda x: x @ x, keep="tuned")
    second(X)
    assert work == []
    (before,), (after,) = first.decisions, second.decisions
    assert before.kept == after.kept == "plain"
    assert after.reason.startswith(before.reason)
    assert (after.left, after.replaced) == (before.left, before.replaced)
