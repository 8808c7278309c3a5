"""What the examples of the teaching documents say: their figures, computed here a second way where there is one."""

import dataclasses
import functools
import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler.core import hardware
from scheduler.core.hardware import CPU
from search_spaces import Columns
from search_spaces.matmul import MatmulProblem
from search_spaces.rows.formulas import SILU_AND_MUL
from search_spaces.rows.hopper import coalescing

sys.path.append(str(Path(__file__).parents[2] / "examples" / "seeds"))
import arithmetic_intensity
import block_sizes
import compile_without_device
import io_aware_attention
import memory_limits
import teaching_attention
import teaching_matmul
import vector_width
from teaching_attention import AttentionBlocks, Errors, TeachingAttention
from teaching_matmul import Blocks, TeachingMatmul

pytestmark = pytest.mark.slow

SEEDS = Path(__file__).parents[2] / "examples" / "seeds"
H200, A100 = hardware.find("NVIDIA H200"), hardware.find("A100")
CHIPS = pytest.mark.parametrize("chip", [H200, A100], ids=lambda chip: chip.architecture)


# Arithmetic intensity


@CHIPS
def test_intensity_is_the_side_of_a_block_over_the_size_of_an_element(chip):
    sides = (1, 16, 32, 64, 128, 256)
    rows = arithmetic_intensity.intensities(chip, [Blocks(side, side, 16) for side in sides])
    assert [row.flops_per_byte for row in rows] == [side / 2 for side in sides]
    assert rows[0].peak_share < 0.01
    assert [row.reuse for row in rows] == pytest.approx(sides)


@CHIPS
def test_block_k_changes_no_intensity_and_fills_on_chip_memory(chip):
    rows = arithmetic_intensity.intensities(chip, [Blocks(128, 128, k) for k in (16, 32, 64)])
    assert {row.flops_per_byte for row in rows} == {64.0}
    assert [row.onchip_bytes / rows[0].onchip_bytes for row in rows] == [1, 2, 4]


def walked(group, results):
    """Blocks of A and B that the first programs need, as the kernel itself places them."""
    places = [tuple(map(int, teaching_matmul.place(jnp.int32(g), group, 9))) for g in range(results)]
    a, b = {(i, k) for i, _ in places for k in range(9)}, {(k, j) for _, j in places for k in range(9)}
    return len(a) + len(b)


def test_nine_results_take_90_blocks_row_by_row_and_54_in_groups():
    assert arithmetic_intensity.blocks_loaded(H200, group=1) == walked(1, 9) == 90
    assert arithmetic_intensity.blocks_loaded(H200, group=3) == walked(3, 9) == 54


@pytest.mark.parametrize(("group", "results"), [(1, 27), (3, 27), (9, 81), (3, 3), (1, 5)])
def test_blocks_are_counted_as_the_kernel_walks_them(group, results):
    assert arithmetic_intensity.blocks_loaded(H200, group, results) == walked(group, results)


def test_groups_spare_device_memory():
    problem = MatmulProblem(16384, 16384, 4096)
    demand = arithmetic_intensity.footprint(problem, H200, [Blocks(128, 128, 64), Blocks(128, 128, 64, group=8)])
    rows, groups = arithmetic_intensity.loads_of(demand, H200).memory_bytes
    assert rows > 2 * groups


def test_the_drawing_says_what_was_computed():
    figure = arithmetic_intensity.drawn(H200)
    said = " ".join(text for axes in figure.axes for text in (axes.get_title("left"), axes.get_xlabel()))
    assert all(words in said for words in ("A: 9 blocks", "B: 81 blocks", "together 90", "A: 27", "together 54")), said


# The teaching kernel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_schedules_of_the_teaching_kernel_are_right(dtype):
    problem, kernel = MatmulProblem(256, 128, 256, dtype), TeachingMatmul()
    args = problem.inputs(seed=0)
    expected, allowed = np.asarray(problem.reference(*args)), problem.tolerance()
    space = kernel.space(problem, CPU.target)
    schedules = list(space.schedules(space.legal()[0]))
    assert len(schedules) == 2 * 2 * 3
    sample = random.Random(0).sample(schedules, 3)
    for schedule in (*sample, Blocks(64, 64, 64, group=2), Blocks(64, 64, 128, group=4)):
        actual = np.asarray(kernel.run(problem, schedule, CPU.target, *args), np.float32)
        assert (np.abs(actual - expected) <= allowed.absolute + allowed.relative * np.abs(expected)).all(), schedule


def test_what_the_views_cannot_show_is_refused_in_words():
    kernel = TeachingMatmul()
    for problem in (MatmulProblem(128, 128, 64, batch=2), MatmulProblem(128, 128, 64, transpose_b=True)):
        assert "no batch, no transposes" in kernel.supports(problem, CPU.target)
    assert "float32 or bfloat16" in kernel.supports(MatmulProblem(128, 128, 64, "int8", out_dtype="int32"), CPU.target)
    points, dropped = kernel.space(MatmulProblem(100, 128, 64, "float32"), CPU.target).legal()
    assert len(points) == 0
    assert any("no ragged block" in reason for reason in dropped)


def test_the_teaching_kernel_is_tuned_found_and_differentiated():
    problem = MatmulProblem(128, 128, 64, "float32")
    record = scheduler.tune(teaching_matmul.TEACHING_MATMUL, problem, budget=3)
    assert {entry.backend for entry in record.entries} == {"teaching", "xla"}
    call = scheduler.tuned(teaching_matmul.TEACHING_MATMUL)
    a, b = problem.inputs(seed=1)
    found = call(a, b, on_miss="error")
    assert jnp.allclose(found, a @ b, atol=1e-3)
    assert jax.grad(lambda a: call(a, b).sum())(a).shape == a.shape


def test_the_teaching_kernel_lowers_for_a_gpu():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    problem, mesh = (
        MatmulProblem(256, 256, 256, "float32"),
        jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device),
    )
    run = jax.jit(lambda a, b: TeachingMatmul().run(problem, Blocks(128, 128, 32, 2), H200.target, a, b))
    with jax.sharding.use_abstract_mesh(mesh):
        text = run.trace(*problem.operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text


# Two memories


@pytest.mark.parametrize("available", [2**33, H200.memory_bytes])
def test_a_predicts_the_first_length_that_no_memory_holds(available):
    found = memory_limits.lengths(H200, available)
    assert [length.fits for length in found] == [True] * (len(found) - 1) + [False]
    assert found[-2].needed_bytes <= available < found[-1].needed_bytes
    assert len({length.onchip_bytes for length in found}) == 1
    *_, last = found
    a, b = memory_limits.of_k(last.k).operands()
    assert last.needed_bytes == a.size * 4 + b.size * 4 + 1024 * 1024 * 4


def test_b_predicts_what_the_documents_compiler_said():
    """Their GPU had 101,376 bytes, refused BK = 64, and said that 131,072 were requested."""
    theirs = dataclasses.replace(A100, architecture="sm_89", onchip_bytes=101376)
    found = {step.block_k: step for step in memory_limits.steps(theirs)}
    assert [k for k, step in found.items() if step.fits] == [16, 32]
    assert found[64].onchip_bytes == 131072


NEEDS_COMPILER = pytest.mark.skipif(
    compile_without_device.missing() is not None, reason="JAX's CUDA plugin is not installed"
)


@CHIPS
@NEEDS_COMPILER
def test_b_predicts_to_the_byte_what_the_compiler_requests(chip):
    steps = memory_limits.compiled(chip, memory_limits.steps(chip))
    assert [step.fits for step in steps] == [step.said == compile_without_device.COMPILES for step in steps]
    assert [step.requested_bytes for step in steps if not step.fits] == [s.onchip_bytes for s in steps if not s.fits]
    assert not all(step.fits for step in steps)


@CHIPS
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (teaching_matmul.TEACHING_MATMUL, MatmulProblem(512, 512, 1024, "float32")),
        (teaching_matmul.TEACHING_MATMUL, MatmulProblem(512, 512, 1024, "bfloat16")),
        (teaching_attention.TEACHING_ATTENTION, block_sizes.problem_of(1024)),
        (teaching_attention.TEACHING_ATTENTION, block_sizes.problem_of(1024, heads=2, head_dim=128)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_footprints_of_teaching_kernels_are_what_the_compiler_wants(chip, operation, problem):
    kernel = operation.kernels[0]
    space = kernel.space(problem, chip.target)
    legal = space.legal()[0]
    schedules = random.Random(0).sample(list(space.schedules(legal)), 8)
    predicted = kernel.footprint(problem, Columns.of(schedules), chip.target).onchip_bytes
    assert compile_without_device.requests(chip, operation, problem, schedules) == predicted.tolist()


@pytest.mark.skipif(compile_without_device.missing() is None, reason="JAX's CUDA plugin is installed")
def test_without_a_compiler_predictions_stand_alone_and_say_so(capsys):
    memory_limits.main(["--hardware", "a100"])
    assert "predictions alone: the compiler for NVIDIA GPUs is not here: pip install" in capsys.readouterr().out


def test_b_predicts_to_the_byte_what_mosaic_gpu_refuses():
    fits, *others = memory_limits.pipelined(H200)
    assert (fits.fits, fits.said) == (True, "lowers")
    assert [step.requested_bytes for step in others] == [step.onchip_bytes for step in others]
    assert not any(step.fits for step in others)


# Block sizes


@pytest.mark.parametrize("length", [1024, 4096])
def test_block_sizes_name_what_the_documents_count(length):
    """There: (Q + K + V + S + O + m and l) * 2 bytes, and ceil(N / Br) * ceil(N / Bc) iterations."""
    pairs, d = list(itertools.product((16, 32, 64, 128, 256), repeat=2)), 64
    for size, (br, bc) in zip(block_sizes.sizes(A100, block_sizes.problem_of(length), pairs), pairs, strict=True):
        assert size.named_bytes == 2 * (br * d + bc * d + bc * d + br * bc + br * d + 2 * br)
        assert size.iterations == -(-length // br) * -(-length // bc)
        assert size.onchip_bytes < size.named_bytes


@CHIPS
def test_sizes_that_no_chip_holds_are_named_with_what_is_missing(chip):
    found = block_sizes.sizes(chip, block_sizes.problem_of(1024, head_dim=128), [(64, 64), (256, 256), (16, 4096)])
    assert [size.limit for size in found] == ["", "spills registers", "does not fit on chip"]
    assert block_sizes.best(found).blocks == AttentionBlocks(64, 64)


def test_the_tiling_has_a_block_of_s_for_each_step_of_each_row():
    figure = block_sizes.tiling(block_sizes.problem_of(256), AttentionBlocks(64, 128), H200)
    labels = [{text.get_text() for text in axes.texts} for axes in figure.axes]
    rows, columns = "1234", "12"
    assert labels[:2] == [{f"Q{i}" for i in rows}, {f"K{j}" for j in columns}]
    assert labels[2] == {f"S{i}{j}" for i in rows for j in columns}


# Flash attention in its teaching form


def test_the_three_error_figures_are_those_of_the_documents():
    assert Errors.of([1.0, 2.0], [1.0, 4.0]) == Errors(2.0, 1.0, pytest.approx(0.25))


def test_teaching_and_tuned_attention_match_the_standard_one(capsys):
    teaching_attention.main()
    figures = re.findall(r"largest absolute (\S+), mean absolute (\S+), mean relative (\S+)", capsys.readouterr().out)
    assert len(figures) == 3  # in blocks of 64, as tuned, and ours
    for largest, mean, relative in (map(float, found) for found in figures):
        assert mean < largest < 1e-5
        assert mean < 1e-6
        assert relative < 1e-4


@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 256), (64, 32), (256, 16)])
def test_block_sizes_change_no_result(block_q, block_kv):
    problem = dataclasses.replace(teaching_attention.PROBLEM, heads=2, kv_heads=2, head_dim=32)
    args, kernel = problem.inputs(seed=0), TeachingAttention()
    actual = kernel.run(problem, AttentionBlocks(block_q, block_kv), CPU.target, *args)
    assert Errors.of(actual, teaching_attention.standard_attention(*args)).largest < 1e-5


def test_what_the_teaching_form_leaves_out_is_refused():
    causal = dataclasses.replace(teaching_attention.PROBLEM, causal=True)
    assert "attends to all keys" in TeachingAttention().supports(causal, CPU.target)
    assert "bfloat16 or float16" in TeachingAttention().supports(teaching_attention.PROBLEM, H200.target)


# Attention and device memory


def test_fusion_saves_what_the_documents_say():
    """There, for a length of 1024: 106.95 MB in three kernels, 6.29 MB in one, 94.1 % less."""
    found = io_aware_attention.saving(H200, 1024)
    assert (found.unfused_bytes / 1e6, found.fused_bytes / 1e6) == pytest.approx((106.95, 6.29), abs=0.01)
    assert found.saved == pytest.approx(0.941, abs=1e-3)
    three, one = found.predicted_s
    assert one < three
    assert found.measured_s is None


@pytest.mark.parametrize("length", io_aware_attention.LENGTHS)
def test_three_launches_wait_for_memory_and_one_for_arithmetic(length):
    three, one = io_aware_attention.standard(H200, length), io_aware_attention.flash(H200, length)
    assert three.memory_share > 0.5 > one.memory_share
    assert one.core_bytes >= one.memory_bytes >= one.compulsory_bytes * 0.99
    assert three.memory_bytes > 5 * one.memory_bytes
    assert max(three.compute_s, three.memory_s) < three.predicted_s


def test_points_lie_under_the_roofline_where_the_documents_have_them():
    bound = {point.name: point.bound for point in io_aware_attention.points(H200)}
    assert bound["softmax"] == bound["attention in three"] == "memory"
    assert bound["large product (4096)"] == bound["attention in one launch"] == "arithmetic"
    for point in io_aware_attention.points(A100):
        assert point.flops_per_s <= A100.peak("float16")
        assert point.flops_per_s <= point.flops_per_byte * A100.hbm_bytes_per_s * 1.001
    assert A100.ridge("float16") == pytest.approx(156, rel=0.03)  # of the documents, which take 2.0 TB/s


def test_both_ways_are_timed_and_agree():
    three, one = io_aware_attention.measured(CPU, 64)
    assert three > 0 < one


# Vector width


def test_sectors_wanted_by_a_warp():
    shares = [
        vector_width.wanted_share(vector_width.warp(stride, 4, start), 4, 32)
        for stride, start in ((1, 0), (1, 4), (2, 0), (137, 0))
    ]
    assert shares == [1.0, 0.8, 0.5, 0.125]


@pytest.mark.parametrize(
    ("d", "vector"), [(1024, 8), (1024, 1), (1000, 8), (1000, 4), (1000, 1), (1002, 2), (1002, 1), (1003, 1), (1012, 4)]
)
def test_the_share_that_the_footprint_declares_is_that_of_the_sectors(d, vector):
    row, access = 2 * d, 2 * vector
    starts = [vector_width.warp(1, access, start=row * i) for i in range(64)]
    counted = np.mean([1 / vector_width.wanted_share(at, access, 32) for at in starts])
    assert 1 / counted == pytest.approx(float(coalescing(row, access)), rel=1e-9)


def test_accesses_are_as_wide_as_rows_allow():
    found = {d: vector_width.row(H200, vector_width.problem_of(16384, d)) for d in (4096, 1000, 1002, 1003)}
    assert found[4096].access_bytes == 16
    assert [found[d].access_bytes for d in (1002, 1003)] == [4, 2]
    assert all(2 * d % one.access_bytes == 0 for d, one in found.items())
    assert found[4096].wanted == 1 > found[1000].wanted > found[1002].wanted > found[1003].wanted


def test_bandwidth_grows_with_d_and_stays_below_the_memorys():
    for tokens in vector_width.TOKENS:
        rates = [vector_width.row(H200, vector_width.problem_of(tokens, d)).bytes_per_s for d in vector_width.WIDTHS]
        assert rates == sorted(rates)
        assert rates[-1] < H200.hbm_bytes_per_s
    assert rates[-1] > 0.85 * H200.hbm_bytes_per_s


def test_remainders_are_right_and_what_is_too_short_is_refused():
    assert all(vector_width.right(d) for d in (1000, 1003, 24, 1))
    assert "less than a warpgroup loads" in vector_width.row(H200, vector_width.problem_of(32, 1)).refused


def test_a_schedule_is_timed_here():
    problem, kernel = vector_width.problem_of(8, 64), SILU_AND_MUL.kernel("interpret")
    schedule = kernel.space(problem, CPU.target).points().row(0)
    run = functools.partial(scheduler.tuned_silu_and_mul, backends=kernel.backend, schedule=schedule)
    assert vector_width.timed(CPU, problem, run) > 0


def test_narrow_accesses_are_more_of_them_and_take_longer():
    problem = vector_width.problem_of(16384, 4096)
    found = vector_width.widths(H200, problem)
    assert [width.access_bytes for width in found] == [16, 8, 4, 2]
    assert [width.transactions / found[0].transactions for width in found] == [1, 2, 4, 8]
    assert found[0].predicted_s <= found[1].predicted_s < found[3].predicted_s
    for schedule in vector_width.schedules_of_widths():
        hopper.lower(SILU_AND_MUL.kernel("mosaic_gpu"), problem, schedule)


# As programs


@pytest.mark.parametrize(
    ("example", "pictures", "says"),
    [
        (arithmetic_intensity, ("plot",), "load 90 blocks row by row, 54 in groups"),
        (teaching_matmul, ("plot",), "differs from the float32 product by"),
        (block_sizes, ("plot", "tiles"), "for 96 heads the model would take Br ="),
        (io_aware_attention, ("plot", "traffic", "parts"), "fused 6.3, 94.1% less"),
        (vector_width, ("plot",), "d = 1003 right"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_program_prints_and_draws(example, pictures, says, tmp_path, capsys):
    files = [tmp_path / f"{name}.{kind}" for name, kind in zip(pictures, ("svg", "png", "svg"), strict=False)]
    told = [word for name, file in zip(pictures, files, strict=True) for word in (f"--{name}", str(file))]
    example.main(["--hardware", "h200", *told])
    assert says in capsys.readouterr().out
    assert all(file.stat().st_size > 5000 for file in files)


def test_a_program_runs_by_its_path_and_a_wrong_chip_ends_it_in_a_sentence():
    ran = subprocess.run(
        [sys.executable, SEEDS / "memory_limits.py", "--hardware", "h300"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "no hardware 'h300'; did you mean 'NVIDIA H200'? (known: NVIDIA H200" in ran.stderr


def test_footprints_of_teaching_kernels_hold_for_many_schedules_at_once():
    blocks = [Blocks(64, 64, 32), Blocks(128, 128, 64)]
    many = TeachingMatmul().footprint(memory_limits.of_k(4096), Columns.of(blocks), H200.target)
    ones = [TeachingMatmul().footprint(memory_limits.of_k(4096), Columns.of([b]), H200.target) for b in blocks]
    assert list(many.onchip_bytes) == [int(one.onchip_bytes[0]) for one in ones]


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        ("teaching_matmul.py:TEACHING_MATMUL", "m=1024 n=1024 k=1024 dtype=float32"),
        (
            "teaching_attention.py:TEACHING_ATTENTION",
            "batch=1 q_len=512 kv_len=512 heads=2 kv_heads=2 head_dim=64 dtype=float16",
        ),
    ],
)
def test_the_command_line_explains_a_teaching_kernel(operation, problem, tmp_path):
    command = [sys.executable, "-m", "scheduler", "explain", f"{SEEDS}/{operation}", *problem.split()]
    ran = subprocess.run([*command, "--hardware", "a100"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "block_" in ran.stdout


@pytest.mark.parametrize("example", [io_aware_attention, vector_width], ids=lambda module: module.__name__)
def test_a_chip_for_which_no_kernel_is_shipped_ends_it_in_a_sentence(example):
    with pytest.raises(SystemExit, match=r"not for TPU v4.*; name a Hopper GPU with --hardware"):
        example.main(["--hardware", "v4"])


def test_a_drawing_that_cannot_be_made_is_refused_before_anything_is_computed(capsys):
    with pytest.raises(SystemExit):
        block_sizes.main(["--plot", "sizes.pdf"])
    said = capsys.readouterr()
    assert "sizes.pdf is neither .svg nor .png" in said.err
    assert not said.out
