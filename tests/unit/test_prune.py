"""Pruning: every point of a space is accounted for, and what is kept is ranked."""

import dataclasses

import numpy as np
import pytest
from counting import bytecodes
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.hardware import CPU, find
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import Columns, Footprint, Kernel, Operand, Phase, Space
from search_spaces.matmul.interpret import InterpretMatmul
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.xla import XlaMatmul

H200 = find("NVIDIA H200")
SMALL = MatmulProblem(m=256, n=192, k=320, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Demand:
    """A schedule whose fields are its demands."""

    kibibytes: int
    registers: int
    warps: int
    slow: int


class Demanding(Kernel):
    """A kernel whose footprint is what its schedule says."""

    backend = "demanding"
    version = 3

    def space(self, problem, target):
        return Space(
            Demand,
            choices={
                "kibibytes": (64, 227, 228),
                "registers": (128, 255, 256),
                "warps": (4, 16),
                "slow": (1, 2, 40),
            },
            rules={"slow ones are small": lambda s: (s.slow < 40) | (s.kibibytes < 228)},
        )

    def footprint(self, problem, schedules, target):
        s = schedules
        return Footprint(
            arithmetic=problem.arithmetic,
            grid=(np.full(len(s), 132),),
            step=Phase(loads=(Operand(bytes=np.full(len(s), 4096.0), axes=(0,)),), flops=s.slow * problem.flops / 132),
            tile=Phase(bytes_written=np.full(len(s), 4096.0)),
            onchip_bytes=s.kibibytes * 1024,
            registers=s.registers,
            registers_per_block=s.registers * s.warps * 32,
            threads=s.warps * 32,
            persistent=True,
        )

    def run(self, problem, schedule, target, /, *args, **params):
        raise NotImplementedError


def schedules(pruned):
    return [tuple(candidate.schedule.values()) for candidate in pruned.candidates()]


@settings(max_examples=40, deadline=None)
@given(
    problem=st.builds(
        MatmulProblem,
        m=st.integers(1, 300),
        n=st.integers(1, 300),
        k=st.integers(1, 300),
        dtype=st.sampled_from(["bfloat16", "float32"]),
    ),
    keep=st.none() | st.integers(1, 500),
    incumbent_s=st.none() | st.floats(1e-9, 10),
    onchip_bytes=st.integers(1_000, 4_000_000),
)
def test_every_point_of_the_space_is_kept_or_dropped_for_a_reason(problem, keep, incumbent_s, onchip_bytes):
    hardware, kernel = dataclasses.replace(CPU, onchip_bytes=onchip_bytes), InterpretMatmul()
    model = CostModel(hardware)
    pruned = prune(kernel, problem, hardware, model, keep=keep, incumbent_s=incumbent_s)
    space = kernel.space(problem, hardware.target)
    assert pruned.size == space.size == sum(pruned.dropped.values()) + len(pruned.points)
    assert all(count > 0 for count in pruned.dropped.values())
    assert len(pruned.points) == len(pruned.predicted_s) == len(pruned.onchip_bytes) == len(pruned.candidates())
    assert keep is None or len(pruned.points) <= keep
    assert np.all(np.diff(pruned.predicted_s) >= -1e-11)
    assert all(space.broken(schedule) is None for schedule in space.schedules(pruned.points))
    if len(pruned.points):
        again = kernel.footprint(problem, pruned.points, hardware.target)
        assert np.array_equal(pruned.onchip_bytes, again.onchip_bytes)
        assert np.all(pruned.onchip_bytes <= onchip_bytes)
        assert np.allclose(pruned.predicted_s, model.seconds(again))


def test_reasons_are_sentences_in_the_order_they_are_applied():
    model = CostModel(H200)
    incumbent_s = 10 * model.lower_bound(SMALL)
    pruned = prune(Demanding(), SMALL, H200, model, keep=2, incumbent_s=incumbent_s)
    assert list(pruned.dropped.items()) == [
        ("slow ones are small", 6),
        ("needs more on-chip memory than NVIDIA H200 has (232448 bytes)", 12),
        ("spills registers (255 per thread)", 12),
        ("needs more registers than one core has (65536)", 6),
        ("cannot beat the incumbent", 6),
        ("ranked below the first 2", 10),
    ]
    assert pruned.size == 54


def test_what_fits_exactly_is_kept():
    kept = schedules(prune(Demanding(), SMALL, H200, CostModel(H200)))
    assert (227, 255, 4, 1) in kept
    assert not any(kibibytes == 228 or registers == 256 for kibibytes, registers, _, _ in kept)


def test_an_incumbent_drops_only_what_provably_loses():
    model = CostModel(H200)
    everything = prune(Demanding(), SMALL, H200, model)
    rivals = prune(Demanding(), SMALL, H200, model, incumbent_s=float(everything.predicted_s[0]))
    assert schedules(rivals)[0] == schedules(everything)[0]


def test_ties_go_to_less_on_chip_memory_and_then_to_the_spaces_own_order():
    pruned = prune(Demanding(), SMALL, H200, CostModel(H200))
    tied = [(kibibytes, registers, warps) for kibibytes, registers, warps, slow in schedules(pruned) if slow == 1]
    assert tied == [(64, 128, 4), (64, 128, 16), (64, 255, 4), (227, 128, 4), (227, 128, 16), (227, 255, 4)]
    assert np.ptp(pruned.predicted_s[:6]) == 0


@dataclasses.dataclass(frozen=True)
class LaterDemand(Demand):
    """With a field that came later than stored schedules."""

    split: int = 1


class DemandingLater(Demanding):
    """A kernel with a later field, of which one value has been checked on a device."""

    def space(self, problem, target):
        space = super().space(problem, target)
        return Space(LaterDemand, {**space.choices, "split": (1, 2)}, space.rules)

    def verified(self, problem, schedules, target):
        return (schedules.split == 1) & (target.architecture == "sm_90")


def test_a_schedule_has_the_spelling_of_before_a_later_field_existed():
    before = prune(Demanding(), SMALL, H200, CostModel(H200)).candidates()
    after = prune(DemandingLater(), SMALL, H200, CostModel(H200)).candidates()
    assert len(after) == 2 * len(before)
    spelled = [candidate.schedule for candidate in after if "split" not in candidate.schedule]
    assert sorted(map(str, spelled)) == sorted(str(candidate.schedule) for candidate in before)
    assert {candidate.whole().schedule["split"] for candidate in after} == {1, 2}


def test_only_what_was_checked_on_the_architecture_is_kept_on_request():
    model = CostModel(H200)
    every, checked = (prune(DemandingLater(), SMALL, H200, model, verified=verified) for verified in (False, True))
    assert set(checked.points.split) == {1}
    assert checked.dropped["has not been checked on a device of architecture sm_90"] == len(every.points) / 2
    elsewhere = dataclasses.replace(H200, architecture="sm_100")
    assert len(prune(DemandingLater(), SMALL, elsewhere, CostModel(elsewhere), verified=True).points) == 0


def test_the_kept_ones_are_the_best_of_all():
    model = CostModel(CPU)
    every, few = (prune(InterpretMatmul(), SMALL, CPU, model, keep=keep) for keep in (None, 7))
    assert schedules(few) == schedules(every)[:7]
    assert few.dropped["ranked below the first 7"] == len(every.points) - 7


def test_candidates_carry_what_their_kernel_says_of_itself():
    candidate = prune(Demanding(), SMALL, H200, CostModel(H200), keep=1).candidates()[0]
    assert (candidate.backend, candidate.version, candidate.library) == ("demanding", 3, False)
    assert candidate.onchip_bytes == candidate.schedule["kibibytes"] * 1024
    assert {type(value) for value in candidate.schedule.values()} == {int}


@pytest.mark.parametrize("hardware", [CPU, H200])
def test_a_library_kernel_passes_with_its_one_point(hardware):
    model = CostModel(hardware)
    pruned = prune(XlaMatmul(), SMALL, hardware, model, keep=1, incumbent_s=1e-12)
    (candidate,) = pruned.candidates()
    assert (pruned.size, dict(pruned.dropped)) == (1, {})
    assert candidate.library
    assert candidate.schedule == {}
    assert candidate.predicted_s == model.library_seconds(SMALL)


def test_nothing_fits_a_chip_without_memory():
    hardware = dataclasses.replace(CPU, onchip_bytes=1)
    pruned = prune(InterpretMatmul(), SMALL, hardware, CostModel(hardware))
    assert pruned.candidates() == []
    assert sum(pruned.dropped.values()) == pruned.size


class Sized(Demanding):
    """A space of 100 points for each size of memory."""

    def __init__(self, sizes):
        self.sizes = sizes

    def space(self, problem, target):
        return Space(
            Demand,
            choices={
                "kibibytes": tuple(range(100, 100 + self.sizes)),
                "registers": tuple(range(100, 110)),
                "warps": (4, 8),
                "slow": (1, 2, 3, 4, 5),
            },
        )


def test_three_thousand_points_are_pruned_with_little_more_python_than_a_hundred():
    pruned = prune(Sized(30), SMALL, H200, CostModel(H200))
    assert len(pruned.points) == 3000
    assert isinstance(pruned.points, Columns)
    hundred, thousands = (bytecodes(lambda n=n: prune(Sized(n), SMALL, H200, CostModel(H200))) for n in (1, 30))
    assert thousands <= 1.1 * hundred
