"""The order of instructions that decides how fast flash attention is, read from machine code, without a GPU.

A kernel that computes the same values a tenth slower looks alike everywhere but here (search_spaces/flash_attention/
hopper/consumer.py says why). This file as a program writes the PTX of one schedule.
"""

import json
import re
import subprocess
import sys

import machine_code
import pytest

BASE = {
    "consumers": 2,
    "block_kv": 128,
    "stages": 2,
    "ping_pong": True,
    "persistent": False,
    "order": "plain",
    "section": 1,
    "epi_tile_n": 128,
}
PERSISTENT = {"persistent": True}
CAUSAL = {"causal": True}
ODD = {"q_len": 3001, "kv_len": 3001}
CASES = {  # name: head_dim, fields of the problem, fields of the schedule
    "head size 128": (128, {}, {}),
    "head size 128, persistent": (128, {}, PERSISTENT),
    "head size 128, 176 keys": (128, {}, {"block_kv": 176}),
    "head size 128, causal": (128, CAUSAL, {"order": "longest_first"}),
    "head size 128, causal, persistent": (128, CAUSAL, PERSISTENT | {"order": "snake"}),
    "head size 64": (64, {}, PERSISTENT | {"consumers": 3, "epi_tile_n": 64}),
    "head size 64, last tiles with queries for one of three consumers": (
        64,
        {"q_len": 1024},
        PERSISTENT | {"consumers": 3, "epi_tile_n": 64},
    ),
    "head size 64, causal, sections of which the last has fewer heads": (
        64,
        CAUSAL,
        PERSISTENT | {"order": "snake", "section": 5, "epi_tile_n": 64, "ping_pong": False},
    ),
    "head size 256": (256, {}, {"block_kv": 80, "epi_tile_n": 256}),
    "head size 256, persistent": (256, {}, PERSISTENT | {"block_kv": 64, "epi_tile_n": 64, "ping_pong": False}),
    "odd length": (128, ODD, {}),
    "odd length, causal": (128, ODD | CAUSAL, {"order": "longest_first"}),
    "odd length, causal, persistent": (128, ODD | CAUSAL, PERSISTENT | {"order": "snake"}),
    "odd length, head size 64": (64, ODD, PERSISTENT | {"consumers": 3, "epi_tile_n": 64}),
    "odd length, head size 96": (96, ODD, {"epi_tile_n": 96}),
    "odd length, head size 256": (256, ODD, {"block_kv": 80, "epi_tile_n": 256}),
}


NVDISASM = machine_code.tool("nvdisasm")
pytestmark = [machine_code.needed(*(() if NVDISASM else ("nvdisasm (nvidia-cuda-nvdisasm)",))), pytest.mark.slow]


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    """Of a case by name: what ptxas says, and its instructions."""
    compiled = {}

    def of(name):
        if name not in compiled:
            compiled[name] = _compile(CASES[name], tmp_path_factory.mktemp("sass"))
        return compiled[name]

    return of


def _compile(case, folder):
    said, _, cubin = machine_code.compiled(__file__, folder, json.dumps(case))
    return said, subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout


def _steady_loops(sass):
    """Opcodes of each innermost loop that multiplies and exponentiates."""
    opcodes, labels, branches = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*);", line):
            if target := re.search(r"`\((\.L_x_\d+)\)", found[2]):
                branches.append((target[1], len(opcodes)))
            opcodes.append(found[1])
    loops = [(labels[label], end) for label, end in branches if labels.get(label, end) < end]
    work = [(a, b) for a, b in loops if sum(code.startswith("MUFU.EX2") for code in opcodes[a:b]) >= 16]
    work = [(a, b) for a, b in work if any(code.startswith("HGMMA") for code in opcodes[a:b])]
    # That over tiles stores results.
    work = [(a, b) for a, b in work if not any(code.startswith("UTMASTG") for code in opcodes[a:b])]
    # Loops that hold another's end are outer ones, or go round by way of waits that ptxas has put behind all else.
    innermost: list[tuple[int, int]] = []
    for start, end in sorted(work, key=lambda loop: loop[1]):
        if not any(start <= other <= end for _, other in innermost):
            innermost.append((start, end))
    return [opcodes[start : end + 1] for start, end in innermost]


@pytest.mark.parametrize("name", CASES)
def test_exponentials_run_beside_the_product_of_values(name, instructions):
    loops = _steady_loops(instructions(name)[1])
    assert loops
    for loop in loops:
        waits = [at for at, code in enumerate(loop) if code.startswith("WARPGROUP.DEPBAR")]
        exponentials = [at for at, code in enumerate(loop) if code.startswith("MUFU.EX2")]
        assert len(waits) == 2
        assert waits[0] < exponentials[0]
        assert exponentials[-1] < waits[-1]


@pytest.mark.parametrize("name", CASES)
def test_no_register_of_the_steady_loop_is_spilled(name, instructions):
    for loop in _steady_loops(instructions(name)[1]):
        assert not [code for code in loop if code.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("name", CASES)
def test_no_product_waits_for_the_one_before(name, instructions):
    said = instructions(name)[0]
    assert "serialized" not in said
    assert "insufficient registers" not in said


def test_large_results_are_rescaled_between_both_products(instructions):
    name = "head size 256"
    head_dim = CASES[name][0]
    for loop in _steady_loops(instructions(name)[1]):
        products = [at for at, code in enumerate(loop) if code.startswith("HGMMA")]
        scaled = sum(code == "FMUL" for code in loop[products[0] : products[-1]])
        assert scaled >= 0.9 * head_dim / 2


def main(case: str) -> None:
    from search_spaces.flash_attention.hopper import FlashAttentionSchedule, MosaicGpuFlashAttention
    from search_spaces.flash_attention.problem import FlashAttentionProblem
    from search_spaces.target import Target

    head_dim, fields, schedule = json.loads(case)
    lengths = {"q_len": 3072, "kv_len": 2112 if schedule.get("block_kv") == 176 else 3840}
    problem = FlashAttentionProblem(batch=1, heads=16, kv_heads=16, head_dim=head_dim, **lengths | fields)
    one = FlashAttentionSchedule(**BASE | schedule)
    target = Target("cuda", "NVIDIA H200", "sm_90", 132)
    machine_code.compile_for_h200(
        lambda *args: MosaicGpuFlashAttention().run(problem, one, target, *args), problem.operands()
    )


if __name__ == "__main__":
    main(sys.argv[1])
