"""What the compiler of a chip that is not here says of a program: on-chip memory, cycles, that there is too little."""

import json
import sys

import pytest
from static_profiles import compiled, needs_libtpu

from scheduler.contrib.tpu import estimate
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import find

pytestmark = pytest.mark.slow


@needs_libtpu
@pytest.mark.parametrize("chip", ["TPU v4", "v6e"])
def test_a_product_takes_a_little_longer_than_its_arithmetic(chip, tmp_path):
    said = json.loads(compiled(__file__, chip, tmp_path, "4096", cycles=True).splitlines()[-1])
    hardware = find(chip)
    assert 0 < said["spill_bytes"] < said["onchip_bytes"] <= hardware.onchip_default_bytes
    if hardware.static_cycles:
        roof_s = 2 * 4096**3 / hardware.peak("bfloat16")
        assert roof_s < said["cycles"] / hardware.clock_hz < 1.2 * roof_s
    else:
        assert said["cycles"] is None


@needs_libtpu
def test_a_kernel_that_needs_too_much_is_told_apart_from_one_that_is_wrong(tmp_path):
    said = json.loads(compiled(__file__, "v5e", tmp_path, "scratch").splitlines()[-1])
    assert said["asked"] > find("v5e").onchip_default_bytes


def test_a_chip_without_such_a_compiler_says_so():
    with pytest.raises(SchedulerError, match="no compiler for NVIDIA H200 runs on a host without that chip"):
        estimate.static_profile(lambda x: x, (), find("h200"))


def _program(chip: str, what: str) -> dict[str, object]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    if what != "scratch":
        square = jax.ShapeDtypeStruct((int(what),) * 2, jnp.bfloat16)
        return vars(estimate.static_profile(lambda a, b: a @ b, (square, square), find(chip)))

    def kernel(x, out, scratch):
        @pl.when(pl.program_id(0) == 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += jnp.broadcast_to(x[...], scratch.shape[:1] + x.shape)
        out[...] = scratch[...].sum(axis=0)

    rows = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    blocks = pl.BlockSpec((8, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=rows,
        grid=(8,),
        in_specs=[blocks],
        out_specs=blocks,
        scratch_shapes=[pltpu.VMEM((5000, 8, 128), jnp.float32)],
    )
    try:
        return vars(estimate.static_profile(call, (rows,), find(chip)))
    except estimate.OutOfOnchipMemory as error:
        return {"asked": error.requested}


if __name__ == "__main__":
    print(json.dumps(_program(*sys.argv[1:])))
