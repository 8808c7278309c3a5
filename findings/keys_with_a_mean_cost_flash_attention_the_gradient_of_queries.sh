#!/usr/bin/env bash
# JAX 0.11.2, `jax.experimental.pallas.ops.gpu.attention.mha` in bfloat16, interpreted on a CPU: if the keys and values
# have a mean, the gradient of the queries loses accuracy. Adding a constant to all keys does not change it in exact
# arithmetic. The backward pass subtracts row sums of the output times its cotangent, and the output is rounded; the
# derivative of a softmax in XLA keeps these sums in float32.
# Expected: relative errors against float32 like those of the derivative of the equations, 0.2 to 0.5 %, for any mean.
# Seen: 0.3 % for means of 0, 6 to 7 % for means of 1, and 40 to 60 % for means of 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.11.2 jaxlib==0.11.2 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import warnings

import jax
import jax.numpy as jnp

warnings.simplefilter("ignore")
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

SHAPE, SCALE = (1, 256, 1, 64), 64**-0.5


def equations(q, k, v):
    logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * SCALE
    logits = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), logits, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(v.dtype), v)


def kernel(q, k, v):
    sizes = BlockSizes(64, 64, 64, 64, 64, 64)
    return mha(q, k, v, segment_ids=None, sm_scale=SCALE, causal=True, block_sizes=sizes, interpret=True)


def error(found, right):
    return float(jnp.sqrt(((found.astype(jnp.float32) - right) ** 2).mean() / (right**2).mean()))


for mean in (0, 1, 3):
    draws = (jax.random.normal(key, SHAPE) for key in jax.random.split(jax.random.key(0), 4))
    parts = [x * size + offset for x, size, offset in zip(draws, (0.1, 0.3, 1, 1), (0, mean, mean, 0))]
    q, k, v, d = (x.astype(jnp.bfloat16) for x in parts)
    wide = [x.astype(jnp.float32) for x in (q, k, v, d)]
    with jax.default_matmul_precision("highest"):
        right = jax.vjp(equations, *wide[:3])[1](wide[3])[0]
    by_kernel, by_xla = (error(jax.vjp(f, q, k, v)[1](d)[0], right) for f in (kernel, equations))
    kind = next(f"{low} to {high} %" for low, high in ((0, 1), (5, 8), (40, 60)) if low <= 100 * by_kernel < high)
    print(f"{jax.__version__} mean {mean}: kernel {kind}, equations below 1 %: {by_xla < 0.01}")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
0.11.2 mean 0: kernel 0 to 1 %, equations below 1 %: True
0.11.2 mean 1: kernel 5 to 8 %, equations below 1 %: True
0.11.2 mean 3: kernel 40 to 60 %, equations below 1 %: True
SEEN
