"""Words that are nearly right: short dtypes are taken, and of others a message says which was meant."""

import re

import jax.numpy as jnp
import pytest
from own_kernels import linear
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core import hardware
from scheduler.rewriting.optimize import optimize
from scheduler.search import jobs
from search_spaces import load
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.gated_matmul.problem import GatedMatmulProblem
from search_spaces.matmul import MatmulProblem
from search_spaces.problem import NAMES, canonical, dtype_name
from search_spaces.scaled_matmul.problem import ScaledMatmulProblem
from search_spaces.space import meant

A = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("fp16", "float16"), ("half", "float16"),
        ("i8", "int8"), ("s8", "int8"), ("u8", "uint8"), ("i32", "int32"), ("fp8", "float8_e4m3fn"),
        ("f8e4m3fn", "float8_e4m3fn"), ("e5m2", "float8_e5m2"), ("BF16", "bfloat16"), ("Float32", "float32"),
        ("torch.bfloat16", "bfloat16"), ("jnp.float32", "float32"), ("pred", "bool"), ("f64", "float64"),
    ],
)  # fmt: skip
def test_a_short_dtype_is_the_whole_one(short, name):
    assert dtype_name(short) == name
    assert canonical(f"{short}[8, 128]") == f"{name}[8,128]"
    problem = linear.operation.problem.parse({"x": f"{short}[8, 128]", "w": "f32[128,8]"})
    assert problem.canonical() == f'{{"w":"float32[128,8]","x":"{name}[8,128]"}}'


def test_what_has_a_name_of_its_own_keeps_it():
    for name in (*NAMES, "float8_e4m3", "float8_e4m3b11fnuz", "complex64"):
        assert dtype_name(name) == name
        assert jnp.dtype(name).name == name


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (lambda: MatmulProblem(8, 8, 8, "bf16"), lambda: MatmulProblem(8, 8, 8, "bfloat16")),
        (
            lambda: MatmulProblem(8, 8, 8, "i8", out_dtype="i32"),
            lambda: MatmulProblem(8, 8, 8, "int8", out_dtype="int32"),
        ),
        (lambda: MatmulProblem(8, 8, 8, "f32", bias="f32"), lambda: MatmulProblem(8, 8, 8, "float32", bias="float32")),
        (lambda: MatmulProblem(8, 8, 8, "f16", out_dtype="f16"), lambda: MatmulProblem(8, 8, 8, "float16")),
        (
            lambda: GatedMatmulProblem(8, 8, 8, "f16", bias="f16"),
            lambda: GatedMatmulProblem(8, 8, 8, "float16", bias="float16"),
        ),
        (
            lambda: ScaledMatmulProblem(8, 8, 8, "fp8", "f32"),
            lambda: ScaledMatmulProblem(8, 8, 8, "float8_e4m3fn", "float32"),
        ),
        (
            lambda: FlashAttentionProblem.parse(
                dict.fromkeys(("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim"), "8") | {"dtype": "bf16"}
            ),
            lambda: FlashAttentionProblem(8, 8, 8, 8, 8, 8),
        ),
        (lambda: load("softmax").problem(8, 8, "f32"), lambda: load("softmax").problem(8, 8, "float32")),
    ],
)
def test_a_problem_of_short_dtypes_is_that_of_whole_ones(short, whole):
    assert short() == whole()
    assert hash(short()) == hash(whole())
    assert short().canonical() == whole().canonical()


def test_jobs_and_commands_take_short_dtypes():
    short, whole = (
        jobs.parse(f'operation = "matmul"\n[fields]\ndtype = "{dtype}"\n[[problem]]\nm = 8\nn = 8\nk = [8, 16]')
        for dtype in ("f32", "float32")
    )
    assert [str(task) for task in short] == [str(task) for task in whole]
    assert [str(task) for task in short] == [f"matmul m=8 n=8 k={k} dtype=float32" for k in (8, 16)]
    for fields in (["matmul", "m=8", "n=8", "k=8", "dtype=f32"], ["matmul", "m=8", "n=8", "k=8", "dtype=FP32"]):
        ran = CliRunner().invoke(app, ["explain", *fields])
        assert (ran.exit_code, "dtype=float32" in ran.output) == (0, True), ran.output


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: MatmulProblem(8, 8, 8, "bfloat"), "dtype='bfloat' is not one of .*; did you mean 'bfloat16'"),
        (lambda: MatmulProblem(8, 8, 8, "flaot32"), "did you mean 'float32'"),
        (lambda: MatmulProblem(8, 8, 8, bias="float"), "leave it out for none; did you mean 'float"),
        (lambda: load("softmax").problem(8, 8, "float64"), "dtype='float64' is not one of"),
        (
            lambda: linear.operation.problem(x="floaty32[8,8]", w="f32[8,8]"),
            "there is no dtype 'floaty32'; did you mean",
        ),
        (lambda: linear.operation.problem(x="f4[8,8]", w="f32[8,8]"), "there is no dtype 'f4'"),
        (lambda: linear.operation.problem(x="float[8,8]", w="f32[8,8]"), "there is no dtype 'float'; did you mean"),
        (lambda: load("matmull"), "no operation 'matmull'; did you mean 'matmul'"),
        (lambda: load("flash_atention"), "did you mean 'flash_attention'"),
        (lambda: load("attention"), "did you mean 'flash_attention'"),
        (lambda: load("rmsnorm"), "did you mean 'rms_norm'"),
        (lambda: load("MatMul"), "did you mean 'matmul'"),
        (lambda: hardware.find("h1000"), "no hardware 'h1000'; did you mean 'NVIDIA H100 80GB HBM3'"),
        (lambda: hardware.find("NVIDIA H20O"), "did you mean 'NVIDIA H200'"),
        (lambda: hardware.find("RTX 4080"), "did you mean 'NVIDIA GeForce RTX 4090'"),
        (lambda: hardware.find("v7"), "no hardware 'v7'"),
        (lambda: hardware.find(""), "matches several chips"),
        (lambda: scheduler.tuned_matmul(A, A, backends="interprte"), "did you mean 'interpret'"),
        (lambda: jobs.parse('operation = "matmul"\nbugdet = 3\n[[problem]]\nm = 8'), "did you mean 'budget'"),
    ],
)
def test_what_was_meant_is_told(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: scheduler.tuned_flash_attention(A, A, A, is_causal=True),
            "keyword argument 'is_causal'.* mean 'causal'",
        ),
        (lambda: scheduler.tuned_flash_attention(A, A, A, sm_scale=1.0), "did you mean 'scale'"),
        (lambda: scheduler.tuned_flash_attention(A, A, A, sliding_window=3), "did you mean 'window'"),
        (lambda: scheduler.tuned_matmul(A, A, transpose_B=True), "did you mean 'transpose_b'"),
        (lambda: scheduler.tuned_matmul(A, A, dtype="float32"), "did you mean 'preferred_element_type'"),
        (lambda: scheduler.tuned_matmul(A, A, on_mis="xla"), "did you mean 'on_miss'"),
        (lambda: scheduler.tuned_softmax(A, dim=0), "did you mean 'axis'"),
        (lambda: scheduler.tuned_softmax(A, return_lse=True, backend="xla"), "did you mean 'backends'"),
        (lambda: scheduler.tuned_silu_and_mul(A, schedul={}), "did you mean 'schedule'"),
        (lambda: scheduler.tuned_rms_norm(A, A[0], epsilon=1e-5), "did you mean 'eps'"),
        (lambda: scheduler.tuned_gated_matmul(A, A, activaton="silu"), "did you mean 'activation'"),
        (lambda: scheduler.tuned_scaled_matmul(A, A, A, A, outdtype="f32"), "did you mean 'out_dtype'"),
        (lambda: scheduler.tuned("softmax")(A, axes=-1), "did you mean 'axis'"),
        (lambda: linear(A, A, activatoin="silu"), "has no parameter 'activatoin'; did you mean 'activation'"),
        (lambda: scheduler.tune("matmul", {"m": 8, "n": 8, "k": 8}, trials=3), "did you mean 'budget'"),
        (lambda: optimize(jnp.sin, secnods=1), "optimize has no option 'secnods'; did you mean 'seconds'"),
        (lambda: optimize(jnp.sin, static_argnum=0), "did you mean 'static_argnum"),
    ],
)
def test_an_unknown_option_of_a_call_names_the_one_that_was_meant(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_words_of_others_are_known_only_where_they_mean_something():
    assert meant("dim", ["rows", "columns"]) is None
    assert meant("dim", ["axis", "din"]) == "axis"
    assert meant("zzz", ["axis"]) is None
    assert meant("", ["axis"]) is None
    assert meant("x", []) is None


# Nothing of the inside


@pytest.mark.parametrize(
    "call",
    [
        lambda: scheduler.tuned_matmul("a", A),
        lambda: scheduler.tuned_matmul(A, A, bias="b"),
        lambda: scheduler.tuned_matmul(A, {}),
        lambda: scheduler.tuned_softmax(object()),
        lambda: scheduler.tuned_rms_norm(A, "w"),
        lambda: linear(A, "w"),
        lambda: linear(A, {"w": A}),
    ],
)
def test_what_is_no_array_is_named_by_what_the_caller_wrote(call):
    with pytest.raises(
        TypeError, match=r"must be an array, not (str|dict|object)|requires ndarray or scalar arguments"
    ) as raised:
        call()
    assert not re.search(r"_function|<locals>|0x[0-9a-f]+", str(raised.value))


def test_a_file_that_lacks_an_operation_names_those_that_it_has(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from own_kernels import linear as product\nother = 3\n")
    for name, words in (
        ("prodcut", "mine.py has no attribute 'prodcut'; did you mean 'product'"),
        ("missing", "are: product"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            load(f"{file}:{name}")
        assert "tile_scheduler_file" not in str(raised.value)
    broken = tmp_path / "broken.py"
    broken.write_text("import sys\nraise ValueError(f'in {__name__}')\n")
    with pytest.raises(ValueError, match="cannot load operation") as raised:
        load(f"{broken}:x")
    assert "tile_scheduler_file" not in str(raised.value)


# Jobs


@pytest.mark.parametrize(
    ("top", "words"),
    [
        ("budget = 0", "budget=0 is out of range; give an integer from 1"),
        ('budget = "8"', "budget='8' is a str"),
        ("budget = 8.0", "budget=8.0 is a float"),
        ("budget = true", "budget=True is a bool"),
        ("seconds = -1", "seconds=-1 is out of range"),
        ("seconds = nan", "seconds=nan is out of range"),
        ('seconds = "1"', "seconds='1' is a str"),
        ('backends = "interprte"', "no backend 'interprte'; did you mean 'interpret'"),
        ("backends = 3", "backends must be comma-separated names"),
        ('backends = ["xla"]', "comma-separated names"),
        ('hardware = "h100"', "a job has no 'hardware'"),
        ("trials = 3", "a job has no 'trials'; did you mean 'budget'"),
        ('operation = "matmull"', "did you mean 'matmul'"),
        ('[fields]\ndtpye = "f32"', "no field 'dtpye'; did you mean 'dtype'"),
    ],
)
def test_what_all_problems_of_a_job_share_is_refused_before_the_first(top, words):
    head = "" if "operation" in top else 'operation = "matmul"\n'
    with pytest.raises(ValueError, match=words):
        jobs.parse(f"{head}{top}\n[[problem]]\nm = 8\nn = 8\nk = 8\n[[problem]]\nm = 16\nn = 8\nk = 8")


def test_what_one_problem_has_wrong_is_its_own():
    text = 'operation = "matmul"\nbackends = "interpret"\n[fields]\nm = 8\nn = 8\n[[problem]]\nk = 8\nbudget = 0\n'
    wrong, right = jobs.parse(text + "[[problem]]\nk = 16")
    assert isinstance(wrong, jobs.Malformed)
    assert "budget=0" in wrong.reason
    assert str(right) == "matmul m=8 n=8 k=16 dtype=bfloat16"
    both = 'backends = "mosaic_gpu"\n[[problem]]\noperation = "softmax"\nrows = 8\ncolumns = 8\n'
    assert len(jobs.parse(both + '[[problem]]\noperation = "matmul"\nm = 8\nn = 8\nk = 8')) == 2


# Files to write


def refusals(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    return {
        "no parent": (tmp_path / "missing" / "x.gz", "No such file or directory"),
        "no grandparent": (tmp_path / "a" / "b" / "x.gz", "No such file or directory"),
        "a file for a parent": (tmp_path / "file" / "x.gz", "Not a directory"),
    }


SWEEP = ["sweep", "matmul", "m=8", "n=8", "k=8", "dtype=f32", "--sample", "1"]


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("work was begun")

    monkeypatch.setattr("scheduler.measure.pool.start_runner", never)
    monkeypatch.setattr("scheduler.cli.listing.chosen", never)
    job = tmp_path / "job.toml"
    job.write_text('operation = "matmul"\n[[problem]]\nm = 8\nn = 8\nk = 8\n')
    before = None
    for out, words in [*refusals(tmp_path).values(), (tmp_path / "folder", "Is a directory")]:
        before = before or sorted(tmp_path.rglob("*"))
        for command in (SWEEP, ["report"]):
            ran = CliRunner().invoke(app, [*command, "--out", str(out)])
            assert (ran.exit_code, words in " ".join(ran.output.split())) == (1, True), ran.output
        assert sorted(tmp_path.rglob("*")) == before
    for out in (tmp_path / "missing" / "x", tmp_path / "file", tmp_path / "file" / "x"):
        ran = CliRunner().invoke(app, ["sweep", "--job", str(job), "--out", str(out)])
        assert (ran.exit_code, str(out) in "".join(ran.output.split())) == (1, True), ran.output
        assert sorted(tmp_path.rglob("*")) == before
