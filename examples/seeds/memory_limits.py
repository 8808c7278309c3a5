"""Two memories to fill: K grows until device memory ends (A), BK grows until on-chip memory ends (B).

    python examples/seeds/memory_limits.py [--hardware a100]

The blocks of the teaching kernel name all of k, and yet only what a step asks for is on chip. A predicts the K that no
memory holds, and tries it where a GPU is here. B predicts the BK that no core holds, beside what the compiler says: the
GPU's where one is here, else that of a process that compiles without one; and what Mosaic GPU says of the shipped
kernel, which any machine can ask.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import compile_without_device as compiler
import jax
import jax.numpy as jnp
import numpy as np
from example_options import arguments, is_here
from teaching_matmul import TEACHING_MATMUL, Blocks, TeachingMatmul

import scheduler
from scheduler.core import hardware
from scheduler.core.hardware import GIB, KIB, Hardware
from scheduler.measure.buffers import least_buffer_bytes
from search_spaces import Columns, Kernel
from search_spaces.matmul import MATMUL, MatmulProblem

FIRST_K = 65536
BLOCK_KS = (16, 32, 64, 128, 256)
PIPELINED = MatmulProblem(m=4096, n=4096, k=4096)
# Triton counts elements in 32 bits: of longer operands, memory is taken and given back, and nothing runs.
ADDRESSABLE = 2**31


def of_k(k: int) -> MatmulProblem:
    return MatmulProblem(m=1024, n=1024, k=k, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Length:
    """Experiment A at one K.

    Attributes:
      needed_bytes: operands and result.
      onchip_bytes: of one block, whatever K is.
      fits: whether device memory holds the first.
      said: what a GPU said when it was tried; "" where none was.
    """

    k: int
    needed_bytes: int
    onchip_bytes: int
    fits: bool
    said: str = ""


def lengths(chip: Hardware, available_bytes: int) -> list[Length]:
    """K doubles up to the first for which device memory is predicted to be too small."""
    found: list[Length] = []
    for k in (FIRST_K << doubling for doubling in itertools.count()):
        needed, onchip = least_buffer_bytes(of_k(k)), _demanded(TeachingMatmul(), of_k(k), Blocks(128, 128, 32), chip)
        found.append(Length(k, needed, onchip, needed <= available_bytes))
        if not found[-1].fits:
            return found
    raise AssertionError("no memory is endless")


def tried(length: Length) -> Length:
    """The same on the GPU that is here: operands of ones and the result are there at once, then given back."""
    problem = of_k(length.k)
    try:
        a, b = (jax.block_until_ready(jnp.ones(x.shape, x.dtype)) for x in problem.operands())
        if a.size < ADDRESSABLE:
            run = jax.jit(
                lambda a, b: TeachingMatmul().run(problem, Blocks(128, 128, 32), hardware.detect().target, a, b)
            )
            right = bool((run(a, b) == length.k).all())
            return dataclasses.replace(length, said="ran, and the result is " + ("right" if right else "wrong"))
        jax.block_until_ready(jnp.ones(problem.result().shape, problem.result().dtype))
        return dataclasses.replace(length, said="fits, and is too long for the 32-bit offsets of Triton")
    except jax.errors.JaxRuntimeError as error:
        return dataclasses.replace(length, said=str(error).splitlines()[0][:160])


@dataclasses.dataclass(frozen=True)
class Step:
    """Experiment B at one BK.

    Attributes:
      onchip_bytes: that one block is predicted to ask for.
      fits: whether a block of the chip has so many.
      said: what the compiler says, that it does what it was asked to, or its message; "" where it was not asked.
    """

    block_k: int
    onchip_bytes: int
    fits: bool
    said: str = ""

    @property
    def requested_bytes(self) -> int | None:
        """What the compiler's message says was asked for."""
        return compiler.requested_bytes(self.said)


def steps(chip: Hardware, block_ks: Sequence[int] = BLOCK_KS) -> list[Step]:
    """Of the teaching kernel's blocks of 128 x 128."""
    asked = [_demanded(TeachingMatmul(), of_k(4096), Blocks(128, 128, block_k), chip) for block_k in block_ks]
    return [Step(k, needed, needed <= chip.onchip_bytes) for k, needed in zip(block_ks, asked, strict=True)]


def compiled(chip: Hardware, predicted: Sequence[Step]) -> list[Step]:
    """The same with what the compiler says."""
    problem, blocks = of_k(4096), [Blocks(128, 128, step.block_k) for step in predicted]
    if is_here(chip):
        said = [compiler.said_of(TeachingMatmul(), problem, one, chip, problem.operands()) for one in blocks]
    else:
        said = compiler.verdicts(chip, TEACHING_MATMUL, problem, blocks)
    return [dataclasses.replace(step, said=one) for step, one in zip(predicted, said, strict=True)]


def pipelined(chip: Hardware) -> list[Step]:
    """The shipped Hopper kernel, lowered for that chip, with a BK that grows from the model's own choice."""
    kernel = MATMUL.kernel("mosaic_gpu")
    first = scheduler.predict(MATMUL, PIPELINED, hardware=chip.kind, backends=kernel.backend).schedule
    best = kernel.space(PIPELINED, chip.target).decode(first)
    return [_lowered(kernel, dataclasses.replace(best, tile_k=times * best.tile_k), chip) for times in (1, 2, 4)]


def _lowered(kernel: Kernel[Any, Any], point: Any, chip: Hardware) -> Step:
    needed = _demanded(kernel, PIPELINED, point, chip)
    step = Step(point.tile_k, needed, needed <= chip.onchip_bytes, "lowers")
    run = jax.jit(lambda *args: kernel.run(PIPELINED, point, chip.target, *args))
    try:
        run.trace(*PIPELINED.operands()).lower(lowering_platforms=("cuda",))
    except ValueError as error:
        return dataclasses.replace(step, said=str(error).splitlines()[0])
    return step


def _demanded(kernel: Kernel[Any, Any], problem: MatmulProblem, point: Any, chip: Hardware) -> int:
    """Bytes on chip of one block, of schedules beyond the space, too."""
    footprint = kernel.footprint(problem, Columns.of([point]), chip.target)
    return int(np.asarray(footprint.onchip_bytes).item())


def main(argv: list[str] | None = None) -> None:
    chip: Hardware = arguments(__doc__, argv, plot=False).hardware
    here = is_here(chip)
    stats = (jax.devices()[0].memory_stats() or {}) if here else {}
    available = int(stats.get("bytes_limit", chip.memory_bytes))
    print(f"A. {chip.kind}: {available / GIB:.0f} GiB of device memory" + (" for JAX" if stats else ", a prediction"))
    for length in lengths(chip, available):
        length = tried(length) if here else length
        verdict = "fits" if length.fits else "does not fit"
        print(
            f"  K = {length.k:9}: {length.needed_bytes / GIB:6.1f} GiB {verdict:12} one block asks for "
            f"{length.onchip_bytes / KIB:.0f} KiB on chip" + (f"; tried: {length.said}" if length.said else "")
        )

    print(
        f"\nB. blocks of 128 x 128 of the teaching kernel; a block of {chip.kind} has {chip.onchip_bytes} bytes on chip"
    )
    predicted, why = steps(chip), None if here else compiler.missing()
    _print(predicted if why else compiled(chip, predicted))
    if why:
        print(f"  predictions alone: {why}")

    if MATMUL.kernel("mosaic_gpu").supports(PIPELINED, chip.target) is None:
        print(f"\n   likewise the shipped kernel, {PIPELINED}, lowered by Mosaic GPU")
        _print(pipelined(chip))


def _print(found: Sequence[Step]) -> None:
    for step in found:
        verdict = "fits" if step.fits else "does not fit"
        print(f"  BK = {step.block_k:4}: {step.onchip_bytes:8} bytes predicted, {verdict:12} {step.said}")


if __name__ == "__main__":
    main()
