"""Among which schedules a search chooses: when the library's programs are left out of it."""

from types import SimpleNamespace

import pytest

from scheduler.core.hardware import CPU, find
from scheduler.search.candidates import collect
from scheduler.search.task import SearchOptions, Task
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem

H200 = find("h200")


def backends(operation, problem, hardware=H200, allowed=None):
    runner = SimpleNamespace(hardware=hardware)
    found = collect(Task(operation, problem, SearchOptions(4, backends=allowed)), runner)
    return {candidate.backend for candidate in found.of}, found.dropped


def square(problem, length, **fields):
    return problem(16384 // length, length, length, 16, 16, 128, **fields)


@pytest.mark.parametrize("length", [1024, 16384])
def test_xla_is_left_out_where_the_logits_that_it_writes_take_longer_than_a_kernel(length):
    found, dropped = backends(FLASH_ATTENTION, square(FlashAttentionProblem, length))
    assert found == {"mosaic_gpu", "cudnn"}
    assert dropped["xla: cannot win, by the bytes that it moves"] >= 1
    found, _ = backends(FLASH_ATTENTION_BACKWARD, square(FlashAttentionBackwardProblem, 16384, causal=True))
    assert "xla" not in found


def test_xla_stays_where_its_logits_fit_a_cache():
    assert "xla" in backends(FLASH_ATTENTION, FlashAttentionProblem(1, 512, 512, 4, 4, 64))[0]
    assert "xla" in backends(FLASH_ATTENTION, FlashAttentionProblem(32, 1, 4096, 32, 4, 128))[0]


def test_cudnn_is_tried_before_the_models_order():
    runner, problem = SimpleNamespace(hardware=H200), square(FlashAttentionProblem, 1024)
    found = collect(Task(FLASH_ATTENTION, problem, SearchOptions(4)), runner)
    assert [found.of[index].backend for index in found.seeds] == ["cudnn"]


def test_xla_stays_where_no_kernel_competes_or_kernels_are_interpreted():
    long = square(FlashAttentionProblem, 16384)
    assert backends(FLASH_ATTENTION, long, allowed=frozenset({"xla"}))[0] == {"xla"}
    assert "xla" in backends(FLASH_ATTENTION, long, hardware=CPU)[0]
