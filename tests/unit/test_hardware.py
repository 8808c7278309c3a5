"""Chips: a table whose figures agree with each other, and what is found where no row is."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest
from failures import failures
from many_records import record_of

from scheduler.core import hardware
from scheduler.core.errors import NoCandidate, UnknownChip
from scheduler.core.hardware import CPU, GIB, KIB, Abilities, describe, detect, find, rows, siblings, table
from scheduler.core.records import Entry
from scheduler.dispatch import dispatch
from scheduler.inspect.doctor import examine
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.ragged_dot import RAGGED_DOT, RaggedDotProblem
from search_spaces.target import Target

EVERY = tuple(table())
GPUS = rows("cuda")


def test_figures_of_a_chip_agree_with_each_other():
    def check(row):
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            numbers = value.values() if field.name == "flops_per_s" else [value]
            may_lack = field.name in ("onchip_reserved_bytes", "onchip_default_bytes", "l2_bytes", "tmem_bytes")
            assert all(n > 0 or may_lack for n in numbers if not isinstance(n, str | bool | tuple | Abilities))
        assert row.onchip_default_bytes <= row.onchip_bytes
        assert row.onchip_bytes + row.onchip_reserved_bytes <= row.onchip_bytes_per_core
        assert row.l2_bytes < row.memory_bytes
        if row.l2_bytes:
            assert row.hbm_bytes_per_s < row.l2_bytes_per_s
            assert row.l2_latency_s < row.memory_latency_s
        else:  # copies into on-chip memory come from device memory
            assert row.hbm_bytes_per_s == row.l2_bytes_per_s
            assert row.l2_latency_s == row.memory_latency_s

    assert failures(check, EVERY, lambda row: row.kind) == []


def test_siblings_are_of_the_same_architecture_and_the_most_similar_comes_first():
    h100, h200 = find("h100"), find("h200")
    assert h100.kind == "NVIDIA H100 80GB HBM3"
    for kind, most_similar in (("H100 NVL", "GH200 480GB"), ("GH200 144G", "H200"), ("H100 PCIe", "H100 NVL")):
        assert siblings(find(kind))[0].kind == f"NVIDIA {most_similar}"
    renamed = dataclasses.replace(h100, kind="NVIDIA H800")
    assert siblings(renamed)[0] == h100
    assert h200 in siblings(renamed)
    assert {row.architecture for row in siblings(h200)} == {"sm_90"}
    assert siblings(CPU) == siblings(find("v6e")) == []


def test_on_a_gpu_fewer_bits_are_faster():
    def check(row):
        rates = [row.peak(arithmetic) for arithmetic in ("float32", "tf32", "bfloat16")]
        assert rates == sorted(rates)
        assert row.peak("bf16_3x") == row.peak("bfloat16") / 3
        assert row.peak("bfloat16") == row.peak("float16")

    assert failures(check, GPUS, lambda row: row.kind) == []


def test_the_peak_is_that_of_all_cores_at_a_possible_clock():
    def check(row):
        # Dense bfloat16 FLOP of one core, from the whitepapers; a GeForce accumulates in float32 at half of that rate.
        per_clock = {"sm_100": 8192, "sm_90": 4096, "sm_80": 2048, "sm_86": 1024, "sm_89": 1024}[row.architecture]
        clock = row.peak("bfloat16") / row.cores / (per_clock / 2 if "GeForce" in row.kind else per_clock)
        assert 1.3e9 < clock < 2.6e9
        assert row.clock_hz == pytest.approx(row.boost * clock, rel=0.01)

    assert failures(check, GPUS, lambda row: row.kind) == []


def test_an_arithmetic_without_a_rate_of_its_own_runs_as_float32():
    assert find("NVIDIA H200").peak("int4") == find("NVIDIA H200").peak("float32")


def test_ridge_points_are_those_of_the_data_sheets():
    ridges = [
        find(kind).ridge("bfloat16") for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    ]
    assert ridges == pytest.approx([206, 295, 153], abs=1)


def test_an_h200_block_may_ask_for_227_kib():
    assert find("NVIDIA H200").onchip_bytes == 227 * KIB == 232_448


def test_ids_tell_slices_and_variants_of_a_chip_apart():
    h200 = find("NVIDIA H200")
    assert h200.id == "NVIDIA H200 (132 cores, 140 GiB)"
    variants = {h200.id}
    variants.add(dataclasses.replace(h200, cores=66).id)
    variants.add(dataclasses.replace(h200, memory_bytes=70 * GIB).id)
    assert len(variants) == 3
    assert len({row.id for row in EVERY}) == len(EVERY)


def test_a_row_is_found_by_its_name_and_describes_its_target():
    def check(row):
        assert find(row.kind) is row
        target = row.target
        assert (target.platform, target.kind, target.architecture, target.cores) == (
            row.platform,
            row.kind,
            row.architecture,
            row.cores,
        )

    assert failures(check, EVERY, lambda row: row.kind) == []


def test_a_word_of_one_name_is_that_chip_even_if_it_is_a_part_of_another():
    assert [find(name).kind for name in ("b200", "gb200")] == ["NVIDIA B200", "NVIDIA GB200"]


def test_an_unknown_name_is_answered_with_those_known():
    with pytest.raises(ValueError, match=r"no hardware 'H2OO'.*NVIDIA H200.*cpu"):
        find("H2OO")


def test_a_slice_has_its_share_of_the_peak():
    whole, half = find("NVIDIA H200"), describe(Target("cuda", "NVIDIA H200", "sm_90", 66))
    assert half.cores == 66
    assert half.peak("bfloat16") == whole.peak("bfloat16") / 2
    assert half.id != whole.id


@pytest.mark.parametrize(
    ("architecture", "cores", "kin"),
    [("sm_90", 114, "NVIDIA H100 80GB HBM3"), ("sm_80", 56, "NVIDIA A100-SXM4-80GB"), ("sm_89", 58, "NVIDIA L40S")],
)
def test_a_chip_without_a_row_borrows_the_figures_of_its_kin_under_its_own_name(architecture, cores, kin):
    row, found = find(kin), describe(Target("cuda", "NVIDIA Unheard-of", architecture, cores))
    assert (found.kind, found.architecture, found.cores) == ("NVIDIA Unheard-of", architecture, cores)
    assert found.onchip_bytes == row.onchip_bytes
    assert found.peak("float32") == pytest.approx(row.peak("float32") * cores / row.cores)


UNKNOWN = [
    SimpleNamespace(platform="tpu", device_kind="TPU v3", core_count=1),
    SimpleNamespace(platform="gpu", device_kind="NVIDIA B300 SXM6 AC", compute_capability="10.3", core_count=148),
    SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5", core_count=40),
    SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 5090", compute_capability="12.0", core_count=170),
]


@pytest.mark.parametrize("device", UNKNOWN, ids=lambda device: device.device_kind)
def test_a_chip_without_a_row_never_borrows_the_figures_of_another_architecture(device):
    with pytest.raises(UnknownChip, match=rf"{device.device_kind} .* is not in the table of chips"):
        detect(device)


@pytest.fixture
def unknown(monkeypatch):
    """On which a call finds itself."""
    dispatch.reload()
    monkeypatch.setattr(jax, "local_devices", lambda **_: [UNKNOWN[0]])
    yield UNKNOWN[0]
    dispatch.reload()


@pytest.mark.parametrize("on_miss", dispatch.ON_MISS)
def test_on_an_unknown_chip_xla_answers_and_says_why(unknown, on_miss, caplog):
    problem = MatmulProblem(64, 64, 64)
    with caplog.at_level("INFO", "scheduler"):
        found = dispatch.decide(MATMUL, problem, "tpu", dispatch.options(MATMUL, on_miss=on_miss))
    assert found.kernel is MATMUL.library
    assert "TPU v3" in found.reason


def test_on_an_unknown_chip_nobody_answers_for_xla(unknown):
    with pytest.raises(NoCandidate, match=r"TPU v3 .* is not in the table"):
        dispatch.decide(MATMUL, MatmulProblem(64, 64, 64), "tpu", dispatch.options(MATMUL, backends="pallas"))


def test_doctor_says_why_xla_answers_on_an_unknown_chip(unknown):
    (finding,) = (finding for finding in examine(lambda: detect(unknown)) if finding.what == "hardware")
    assert finding.state == "note"
    assert re.search("TPU v3 .* is not in the table of chips.*all calls use XLA", finding.detail)


@pytest.mark.parametrize(
    ("operation", "problem"),
    [(MATMUL, MatmulProblem(4096, 4096, 4096)), (RAGGED_DOT, RaggedDotProblem(4096, 8, 4096, 4096))],
    ids=["matmul", "ragged_dot"],
)
def test_on_blackwell_xla_answers_until_the_problem_is_tuned(operation, problem, tmp_path):
    chip, kernel = find("B200"), operation.kernel("jax_blackwell")
    options = dispatch.options(operation, target=chip.kind)
    best = prune(kernel, problem, chip, CostModel(chip), keep=1).candidates()[0]
    dispatch.reload()
    assert dispatch.decide(operation, problem, "cuda", options).kernel is operation.library
    searched = record_of(operation, problem, chip, library_s=1e-3)
    fast = dataclasses.replace(searched.entries[0].measurement, median_s=1e-4, samples_s=(1e-4,) * 16)
    winner = Entry(kernel.backend, kernel.version, best.schedule, fast, 1e-4)
    with contextlib.closing(Store(tmp_path / "cache.db")) as store:
        store.put(dataclasses.replace(searched, entries=(winner, *searched.entries)))
    dispatch.reload()
    decision = dispatch.decide(operation, problem, "cuda", options)
    assert (decision.kernel, decision.schedule.tile_n) == (kernel, best.schedule["tile_n"])


def test_doctor_says_on_blackwell_that_xla_answers_and_what_a_search_would_try():
    (finding,) = (found for found in examine(lambda: find("B200")) if found.what == "Pallas kernels")
    assert finding.state == "note"
    assert re.search("none is verified on sm_100: XLA answers until the problem is tuned", finding.detail)
    assert re.search(r"a search tries jax_blackwell \(2 operations\)", finding.detail)
    assert not [found for found in examine(lambda: find("H200")) if found.what == "Pallas kernels"]


def test_a_cpu_is_one_constant_row_whatever_it_is():
    assert describe(Target("cpu", "whatever", "x86", 64)) is CPU
    assert detect(SimpleNamespace(platform="cpu", device_kind="cpu")) is CPU


def test_a_device_is_described_by_what_its_driver_says():
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132, memory_stats=lambda: None
    )
    found = detect(device)
    assert (found.platform, found.architecture, found.cores) == ("cuda", "sm_90", 132)
    assert found.peak("bfloat16") == find("NVIDIA H200").peak("bfloat16")
    assert hardware.detect(SimpleNamespace(**vars(device) | {"core_count": 16})).cores == 16
