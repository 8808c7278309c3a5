"""Attention: every kernel against the formula, and the public call against ``jax.nn.dot_product_attention``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import tuned, tuned_flash_attention
from scheduler.core import hardware
from scheduler.core.arguments import named_backends
from scheduler.dispatch import dispatch
from scheduler.model.cost import CostModel
from search_spaces import Library, Target
from search_spaces.attention import xla
from search_spaces.attention.interpret import InterpretedAttention
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem
from search_spaces.problem import as_tuple

pytestmark = pytest.mark.slow_but_first

CPU = Target("cpu", "cpu", "cpu", 1)
H200 = hardware.find("NVIDIA H200").target
SMALL = {"batch": 2, "q_len": 21, "kv_len": 27, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
CASES = [
    {},
    {"causal": True, "dtype": "bfloat16"},
    {"causal": True, "window_left": 7, "dtype": "float16"},
    {"window_left": 5, "window_right": 3},
    {"q_len": 40, "kv_len": 12, "window_left": 6},  # queries beyond the window see nothing
    {"q_lengths": True, "kv_lengths": True, "causal": True},
    {"kv_lengths": True, "q_len": 1, "window_left": -1},
    {"softcap": True, "head_dim_v": 24},
]


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def draw(seed=0, *, batch=2, q_len=21, kv_len=27, heads=4, kv_heads=2, head_dim=16, dtype="float32"):
    shapes = (batch, q_len, heads, head_dim), *((batch, kv_len, kv_heads, head_dim),) * 2
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def one(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)

    jax.tree.map(one, actual, expected)


def problems(fields):
    """With a log-sum-exp, whose results and gradients include those without; the first cases also without it."""
    for extra in (False, True) if fields in CASES[:2] else (True,):
        yield FLASH_ATTENTION, FlashAttentionProblem(**SMALL | fields, return_lse=extra)
        yield FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem(**SMALL | fields, lse_cotangent=extra)


@functools.cache
def posed(problem):
    """Operands, and what the reference makes of them."""
    args = problem.inputs(seed=0)
    return args, as_tuple(jax.jit(problem.reference)(*args))


def agrees(kernel, problem, schedule):
    args, expected = posed(problem)
    allowed = kernel.tolerance(problem, schedule)
    found = jax.jit(functools.partial(kernel.results, problem, schedule, CPU))(*args)
    allowed = allowed if isinstance(allowed, tuple) else (allowed,) * len(expected)
    for actual, right, wanted, tolerance in zip(found, expected, problem.results(), allowed, strict=True):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(
            np.float32(actual), np.float32(right), rtol=tolerance.relative, atol=tolerance.absolute
        )


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_programs_of_xla_agree_with_the_formula(fields):
    for operation, problem in problems(fields):
        points, _ = operation.library.space(problem, CPU).legal()
        for program in points.program:
            agrees(operation.library, problem, Library(str(program)))


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES[1:6], ids=str)
def test_some_queries_at_a_time_are_all_queries(fields, monkeypatch):
    monkeypatch.setattr(xla, "MOST_LOGITS", 1000)
    for operation, problem in problems(fields):
        assert xla.q_rows(problem) < problem.q_len
        agrees(operation.library, problem, Library())


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_interpreted_kernels_agree_with_the_formula(fields):
    for operation, problem in problems(fields):
        kernel = operation.kernel("interpret")
        agrees(kernel, problem, InterpretedAttention(block_q=16, block_kv=8))
        points, _ = kernel.space(problem, CPU).legal()
        assert len(points)


def plain(q, k, v, *, causal=False, window=None, q_lengths=None, kv_lengths=None, scale=None):
    """JAX's, in float32."""
    wide = (x.astype("float32") for x in (q, k, v))
    return jax.nn.dot_product_attention(
        *wide,
        is_causal=causal,
        local_window_size=window,
        query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths,
        scale=scale,
    ).astype(q.dtype)


LENGTHS = {"q_lengths": jnp.array([21, 9], "int32"), "kv_lengths": jnp.array([27, 11], "int32")}
CALLS = [
    {},
    {"causal": True},
    {"scale": 0.5, "window": 6},
    {"causal": True, "window": (6, 0)},
    {"window": (8, 3), **LENGTHS},
    {"causal": True, "kv_lengths": LENGTHS["kv_lengths"]},
]
BACKENDS = ["interpret", "xla"]


# All options in float32; the narrow dtypes with the fewest and the most.
GRADIENTS = [("float32", options) for options in CALLS]
GRADIENTS += [(dtype, CALLS[i]) for dtype in ("bfloat16", "float16") for i in (0, 4)]


@pytest.mark.parametrize(("dtype", "options"), GRADIENTS, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_values_and_gradients_are_those_of_jax_nn(dtype, options):
    q, k, v = draw(dtype=dtype)
    weight = jax.random.normal(jax.random.key(9), q.shape, "float32")

    def value_and_gradients(call):
        def loss(q, k, v):
            out = call(q, k, v, **options)
            return jnp.sum(out.astype("float32") * weight), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    theirs = value_and_gradients(plain)
    tolerance = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 6e-3}[dtype]
    for backends in BACKENDS:
        close(value_and_gradients(functools.partial(tuned_flash_attention, backends=backends)), theirs, tolerance)


def asked():
    """The operations that answers were asked for, with the backends that gave them."""
    return {(key[0].name, found.kernel.backend) for key, found in dispatch._decisions.decisions.items()}


def test_a_gradient_is_two_tuned_calls():
    q, k, v = draw()
    jax.jit(jax.grad(lambda q: tuned_flash_attention(q, k, v, backends="pallas").sum()))(q)
    assert asked() == {("flash_attention", "interpret"), ("flash_attention_backward", "interpret")}
    posed = {key[0].name: key[1] for key in dispatch._decisions.decisions}
    assert posed["flash_attention"].return_lse
    assert not posed["flash_attention_backward"].lse_cotangent


@pytest.mark.slow
def test_deterministic_reaches_the_backward_problem_alone():
    q, k, v = draw()
    call = functools.partial(tuned_flash_attention, deterministic=True, scale=0.3)
    close(call(q, k, v), plain(q, k, v, scale=0.3))
    close(jax.grad(lambda q: call(q, k, v).sum())(q), jax.grad(lambda q: plain(q, k, v, scale=0.3).sum())(q))
    (posed,) = (key[1] for key in dispatch._decisions.decisions if key[0].name == "flash_attention_backward")
    assert posed.deterministic


def formula(q, k, v, softcap=None, **options):
    """The result and the log-sum-exp, with nothing of ours in it."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v), jax.nn.logsumexp(logits, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_log_sum_exp_has_a_cotangent_and_logits_are_capped(softcap, backends):
    q, k, v = draw()
    v = jnp.concatenate([v, v[..., :8]], axis=-1)

    def every(call):
        def loss(q, k, v):
            out, lse = call(q, k, v, softcap=softcap)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse * lse), (out, lse)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    ours = functools.partial(tuned_flash_attention, return_lse=True, backends=backends)
    close(every(ours), every(formula), 1e-4)
    only_lse = jax.grad(lambda q: ours(q, k, v, softcap=softcap)[1].sum())(q)
    close(only_lse, jax.grad(lambda q: formula(q, k, v, softcap)[1].sum())(q), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backends", BACKENDS)
def test_a_query_that_sees_nothing_is_zero_and_has_no_gradient(backends):
    q, k, v = draw(q_len=20, kv_len=8)
    call = functools.partial(
        tuned_flash_attention, window=(4, 4), kv_lengths=jnp.array([0, 6], "int32"), backends=backends, return_lse=True
    )
    out, lse = call(q, k, v)
    assert not out[0].any()
    assert not out[1, 10:].any()
    assert (lse[0] == -jnp.inf).all()
    assert (lse[1, :, 10:] == -jnp.inf).all()
    assert jnp.isfinite(lse[1, :, :10]).all()
    dq, dk, dv = jax.grad(lambda *qkv: jnp.sum(call(*qkv)[0] ** 2), argnums=(0, 1, 2))(q, k, v)
    assert not dq[0].any()
    assert not dq[1, 10:].any()
    assert not dk[0].any()
    assert not dv[1, 6:].any()
    assert all(jnp.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.slow
@pytest.mark.parametrize("backends", BACKENDS)
def test_vmap_joins_the_batch_or_the_heads_of_a_group(backends):
    q, k, v = (jnp.stack(x) for x in zip(draw(0), draw(1), draw(2), strict=True))
    lengths = jnp.array([[27, 3], [5, 12], [1, 27]], "int32")
    call = functools.partial(tuned_flash_attention, causal=True, backends=backends, return_lse=True)
    theirs = functools.partial(plain, causal=True)

    def of(call, pick):
        return jax.jit(lambda q, k, v, n: pick(call(q, k, v, kv_lengths=n)))

    first = of(call, lambda results: results[0])
    close(jax.vmap(first)(q, k, v, lengths), jax.vmap(of(theirs, lambda x: x))(q, k, v, lengths))
    shared = (0, None, None, None)
    args = q, k[0], v[0], lengths[0]
    close(jax.vmap(first, shared)(*args), jax.vmap(of(theirs, lambda x: x), shared)(*args))
    out, lse = jax.vmap(of(call, lambda x: x), (1, None, None, None), (2, 1))(jnp.moveaxis(q, 0, 1), *args[1:])
    close(jnp.moveaxis(lse, 1, 0)[2], call(q[2], k[0], v[0], kv_lengths=lengths[0])[1])
    close(jnp.moveaxis(out, 2, 0), jax.vmap(first, shared)(*args))

    def gradient(call):
        one = jax.grad(lambda q, k, v: jnp.sum(jnp.sin(call(q, k, v))), argnums=(0, 1, 2))
        return jax.jit(jax.vmap(one, (0, None, 0)))(q, k[0], v)

    only = functools.partial(tuned_flash_attention, causal=True, backends=backends)
    close(gradient(only), gradient(theirs), 1e-4)


@pytest.mark.slow
def test_scan_and_checkpoint_with_policies_agree():
    q, k, v = draw(kv_len=21)

    def every(call):
        def loss(q, k, v):
            return jnp.sum(jnp.cos(call(q, k, v, causal=True)))

        def steps(q):
            return loss(jax.lax.scan(lambda q, _: (call(q, k, v), None), q, None, length=2)[0], k, v)

        kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
        return [jax.grad(one, argnums=(0, 1, 2))(q, k, v) for one in (kept, jax.checkpoint(loss))], jax.grad(steps)(q)

    run = jax.jit(every, static_argnums=0)
    close(run(functools.partial(tuned_flash_attention, backends="pallas")), run(plain), 1e-4)


@pytest.mark.slow
def test_forward_mode_raises_and_a_hessian_is_the_librarys():
    q, k, v = draw(batch=1, q_len=4, kv_len=5, heads=2, head_dim=8)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: tuned_flash_attention(q, k, v), (q,), (q,))

    def second(call):
        gradient = jax.grad(lambda q: jnp.sum(jnp.sin(call(q, k, v))))
        return jax.grad(lambda q: jnp.sum(jnp.cos(gradient(q))))(q)

    close(second(tuned_flash_attention), second(plain), 1e-4)


@pytest.mark.slow
def test_three_axes_are_a_batch_of_one():
    q, k, v = (x[0] for x in draw())
    out, lse = tuned_flash_attention(q, k, v, return_lse=True, backends="pallas")
    close(out, plain(q[None], k[None], v[None])[0])
    assert lse.shape == (4, 21)
    close(jax.grad(lambda k: tuned_flash_attention(q, k, v).sum())(k), jax.grad(lambda k: plain(q, k, v).sum())(k))


def test_numpy_arrays_and_the_generic_call_are_taken():
    q, k, v = map(np.asarray, draw())
    close(tuned_flash_attention(q, k, v), plain(*draw()))
    close(tuned("flash_attention")(q, k, v, causal=True, window=(3, None)), plain(*draw(), causal=True, window=(3, 0)))
    assert tuned_flash_attention.operation is FLASH_ATTENTION


def test_what_no_problem_says_is_answered_by_plain_jax():
    q, k, v = draw()
    empty = tuned_flash_attention(q[:0], k[:0], v[:0])
    assert empty.shape == q[:0].shape
    out, lse = tuned_flash_attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.any()
    assert (lse == -jnp.inf).all()
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.float64(x)) for x in (q, k, v)]
        out = tuned_flash_attention(*wide)
        assert out.dtype == "float64"
        np.testing.assert_allclose(out, jax.nn.dot_product_attention(*wide), rtol=1e-6, atol=1e-7)
    with pytest.raises(scheduler.NoCandidate, match="empty"):
        tuned_flash_attention(q[:0], k[:0], v[:0], backends="pallas")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"k": lambda k: k[..., :8]}, "do not belong to q"),
        ({"k": lambda k: k.astype("bfloat16")}, "dtype should be"),
        ({"k": lambda k: k[:, :, :1].repeat(3, axis=2), "v": lambda v: v[:, :, :1].repeat(3, axis=2)}, "multiple"),
        ({"q_lengths": lambda _: jnp.ones(2, "float32")}, "dtype should be"),
        ({"kv_lengths": lambda _: jnp.ones(3, "int32")}, "shape should be"),
        ({"window": lambda _: (1, 2, 3)}, "neither a number of keys nor two"),
        ({"window": lambda _: -1}, "neither a number of keys nor two"),
        ({"softcap": lambda _: 0.0}, "no finite number above 0"),
    ],
)
def test_wrong_arguments_are_refused_in_words(change, error):
    arguments = dict(zip("qkv", draw(), strict=True))
    arguments |= {name: how(arguments.get(name)) for name, how in change.items()}
    with pytest.raises(ValueError, match=error):
        tuned_flash_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_pallas_leaves_out_cudnn():
    for operation in (FLASH_ATTENTION, FLASH_ATTENTION_BACKWARD):
        assert not {"cudnn", "xla"} & named_backends(operation, "pallas")
        assert {"interpret"} <= named_backends(operation, "pallas")
    with pytest.raises(ValueError, match='"pallas" is all but cudnn and xla'):
        named_backends(FLASH_ATTENTION, [])


LARGE = FlashAttentionProblem(batch=2, q_len=512, kv_len=512, heads=8, kv_heads=2, head_dim=128)
BACKWARD = FlashAttentionBackwardProblem(**{f.name: getattr(LARGE, f.name) for f in dataclasses.fields(LARGE)[:-1]})


@pytest.mark.parametrize(
    ("problem", "fields", "why"),
    [
        (LARGE, {}, None),
        (LARGE, {"causal": True, "window_left": 100}, None),
        (LARGE, {"kv_lengths": True, "q_len": 1}, None),
        (LARGE, {"head_dim": 256, "return_lse": True}, None),
        (LARGE, {"head_dim": 264}, "at most 256"),
        (LARGE, {"head_dim": 60}, "that 8 divides"),
        (LARGE, {"dtype": "float32"}, "takes bfloat16 and float16"),
        (LARGE, {"window_left": 100}, "into the future"),
        (LARGE, {"window_right": 100}, "no window to the right"),
        (LARGE, {"causal": True, "kv_len": 600}, "as many queries as keys"),
        (LARGE, {"causal": True, "kv_lengths": True}, "has not been checked"),
        (LARGE, {"head_dim_v": 64}, "as wide as keys"),
        (LARGE, {"softcap": True}, "caps no logits"),
        (BACKWARD, {}, None),
        (BACKWARD, {"deterministic": True}, "in any order"),
        (BACKWARD, {"lse_cotangent": True}, "no cotangent"),
        (BACKWARD, {"kv_lengths": True}, "have not been checked"),
    ],
    ids=str,
)
def test_cudnn_is_asked_for_what_it_is_known_to_do_and_lowers_without_a_device(problem, fields, why):
    operation = FLASH_ATTENTION if isinstance(problem, FlashAttentionProblem) else FLASH_ATTENTION_BACKWARD
    kernel, problem = operation.kernel("cudnn"), dataclasses.replace(problem, **fields)
    reason = kernel.supports(problem, H200)
    if why is not None:
        assert why in reason
        return
    assert reason is None
    space = kernel.space(problem, H200)
    (schedule,) = space.schedules(space.points())
    run = jax.jit(functools.partial(kernel.run, problem, schedule, H200, scale=0.1))
    code = run.trace(*problem.operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert f"__cudnn$fmhaSoftmax{'Backward' if operation is FLASH_ATTENTION_BACKWARD else ''}" in code
    assert "on NVIDIA GPUs" in kernel.supports(problem, CPU)


@pytest.mark.parametrize(
    ("problem", "fields", "seen"),
    [
        (LARGE, {}, True),
        (LARGE, {"causal": True}, True),
        (LARGE, {"causal": True, "window_left": 100}, False),
        (LARGE, {"kv_lengths": True}, False),
        (BACKWARD, {"causal": True}, True),
        (BACKWARD, {"causal": True, "window_left": 100}, False),
    ],
    ids=str,
)
def test_cudnn_answers_unmeasured_what_was_seen_right_on_a_device(problem, fields, seen):
    operation = FLASH_ATTENTION if isinstance(problem, FlashAttentionProblem) else FLASH_ATTENTION_BACKWARD
    kernel, problem = operation.kernel("cudnn"), dataclasses.replace(problem, **fields)
    assert kernel.supports(problem, H200) is None
    points = kernel.space(problem, H200).points()
    assert kernel.verified(problem, points, H200) is seen
    assert kernel.verified(problem, points, dataclasses.replace(H200, architecture="sm_80")) is False


def test_gradients_of_the_same_bits_are_by_kernels_that_promise_them():
    posed = dataclasses.replace(BACKWARD, deterministic=True)
    assert FLASH_ATTENTION_BACKWARD.library.supports(posed, H200) is None
    assert FLASH_ATTENTION_BACKWARD.kernel("cudnn").supports(posed, H200) is not None
    kernel = FLASH_ATTENTION_BACKWARD.kernel("mosaic_gpu")
    if kernel.supports(posed, H200) is None:  # then by schedules that add up in one order
        kept, _ = kernel.space(posed, H200).legal()
        assert len(kept)
        assert not {"reduce_add"} & set(kept.dq.tolist())


def test_the_model_knows_that_xla_writes_its_logits():
    from scheduler.model.cost import CostModel
    from scheduler.model.pruning import prune

    chip = hardware.find("NVIDIA H200")
    model = CostModel(chip)
    long = dataclasses.replace(LARGE, q_len=8192, kv_len=8192)
    (cudnn,) = prune(FLASH_ATTENTION.kernel("cudnn"), long, chip, model).candidates()
    assert model.library_seconds(long) > 3 * cudnn.predicted_s


@pytest.mark.parametrize("backends", BACKENDS)
def test_no_number_among_logits_stays_no_number(backends):
    q, k, v = draw()
    out, lse = tuned_flash_attention(q.at[0, 3].set(jnp.nan), k, v, return_lse=True, backends=backends)
    assert jnp.isnan(out[0, 3]).all()
    assert jnp.isnan(lse[0, :, 3]).all()
    assert int(jnp.isnan(out).sum()) == out[0, 3].size
    assert int(jnp.isnan(lse).sum()) == lse[0, :, 3].size


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_every_seed_draws_lengths_that_are_half_of_the_longest_together(batch):
    problem = FlashAttentionProblem(batch, 300, 1000, 2, 2, 64, q_lengths=True, kv_lengths=True)
    drawn = [np.asarray(problem.random_lengths(seed)) for seed in range(4)]
    for q, kv in drawn:
        assert q.min() >= 1
        assert kv.max() <= 1000
        assert abs(kv.sum() - batch * 500) <= batch
        assert abs(q.sum() - batch * 150) <= batch
        assert np.all(np.abs(q / 300 - kv / 1000) < 0.01)  # as padding leaves them
    assert batch == 1 or len({tuple(kv) for _, kv in drawn}) == 4


@pytest.mark.parametrize("operation", [FLASH_ATTENTION, FLASH_ATTENTION_BACKWARD], ids=lambda op: op.name)
def test_no_time_is_implausible_that_sequences_of_half_the_length_allow(operation):
    chip = hardware.find("NVIDIA H200")
    whole = operation.problem(64, 128, 16384, 32, 4, 128)
    short = dataclasses.replace(whole, kv_lengths=True)
    floors = [CostModel(chip).lower_bound(problem) for problem in (whole, short)]
    assert floors[1] == pytest.approx(floors[0] / 2, rel=0.05)
    kernel = operation.kernel("mosaic_gpu")
    for problem, floor in zip((whole, short), floors, strict=True):
        points, _ = kernel.space(problem, chip.target).legal()
        least = CostModel(chip).floor(kernel.footprint(problem, points, chip.target))
        assert 0.9 * floor <= least.min() <= 1.6 * floor  # clocks rise in bursts
