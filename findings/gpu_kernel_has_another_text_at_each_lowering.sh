#!/usr/bin/env bash
# JAX 0.11.2 (not 0.10.2, not 0.12.0.1): a Pallas kernel for Mosaic GPU has another lowered text each time that it is
# lowered in one process. What was lowered before thus decides the key of JAX's persistent compilation cache: a process
# that lowers the same programs in another order finds nothing in the cache. No GPU is needed to see it.
# Expected: the text depends on the kernel alone.
# Seen: three lowerings, three texts; the attributes `kernel_hash` and `module` of the custom call differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.11.2 jaxlib==0.11.2 numpy==2.5.5
cat >"$folder/program.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def tile(*shape):
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def body(a, b, c, a_tile, b_tile, c_tile, arrived):
    plgpu.copy_gmem_to_smem(a, a_tile, arrived)
    plgpu.copy_gmem_to_smem(b, b_tile, arrived)
    plgpu.barrier_wait(arrived)

    def product(acc):
        plgpu.wgmma(acc, a_tile, b_tile)
        plgpu.wgmma_wait(0)
        return acc[...]

    c_tile[...] = pl.run_scoped(product, plgpu.ACC((64, 128), jnp.float32)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(c_tile, c)
    plgpu.wait_smem_to_gmem(0)


kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
    scratch_types=[tile(64, 64), tile(64, 128), tile(64, 128), plgpu.Barrier(num_arrivals=2)],
)
operands = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
texts = {
    jax.jit(lambda a, b: kernel(a, b)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text() for _ in range(3)
}
print(jax.__version__, len(texts), "texts of three lowerings")
assert len(texts) == 3, "the behaviour has changed"
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
