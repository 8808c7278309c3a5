#!/usr/bin/env bash
# JAX 0.12.0.1 (0.11.2 too): from the second call on, the trace of a Pallas kernel function is kept, with the values of
# what the function read. Each call below is eager, and sets FACTOR before.
# Expected: 2, 3, 4, 5, as with JAX 0.10.2.
# Seen: 2, 3, 3, 3. In a `jax.make_user_context` with another value the function is traced again, and gives 6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat >"$folder/program.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

FACTOR = [0.0]
RESULT = jax.ShapeDtypeStruct((8,), jnp.float32)
context = jax.make_user_context(0)


def body(x_ref, out_ref):
    out_ref[...] = x_ref[...] * FACTOR[0]


def with_factor(factor):
    FACTOR[0] = factor
    return float(pl.pallas_call(body, out_shape=RESULT, interpret=True)(jnp.ones(8))[0])


found = [with_factor(x) for x in (2.0, 3.0, 4.0, 5.0)]
with context(1):
    found.append(with_factor(6.0))
print(jax.__version__, found)
assert found == [2.0, 3.0, 3.0, 3.0, 6.0], "the behaviour has changed"
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
