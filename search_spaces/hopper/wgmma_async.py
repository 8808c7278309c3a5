"""Accumulators as values: a loop may carry them while wgmmas that add to them are in flight.

They must not be used in computations before `wait` has returned them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu

from search_spaces.hopper.dsmem import ptx
from search_spaces.jax_compat import mosaic_gpu_code, plgpu


def wait(groups: int, *accumulators: jax.Array) -> Any:
    """Waits until at most the last `groups` wgmma groups are in flight; returns the accumulators, ready for use."""
    layout = plgpu.Layout.WGMMA

    @mosaic_gpu_code(
        lambda *values: values if len(values) != 1 else values[0],
        arg_types=(layout,) * len(accumulators),
        return_type=tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout) for x in accumulators)
        if len(accumulators) != 1
        else plgpu.ShapeDtypeStruct(accumulators[0].shape, accumulators[0].dtype, layout=layout),
    )
    def finish(_: Any, *values: Any) -> Any:
        ptx(f"wgmma.wait_group.sync.aligned {groups};")
        if not values:
            return ()
        return mgpu.optimization_barrier(*values)

    return finish(*accumulators)
