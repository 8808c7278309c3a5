#!/usr/bin/env bash
# JAX 0.12.0.1 on a CPU: XLA computes x / broadcast(y) as x * broadcast(1 / y), although 1 / y may overflow.
# Expected: 1e-38 / 1e-38 is 1, as without `jax.jit`.
# Seen: a row of [1e-38, 5e-39] that is divided by its maximum is NaN in a jitted function: the reciprocal is infinite,
# and numbers below 1.2e-38 are taken for 0. A row of [3e-38, 1.5e-38] gives [1, 0.5].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat >"$folder/program.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np


def normalized(x):
    return x / jnp.max(x, axis=-1, keepdims=True)


small, larger = (np.array([[x, x / 2]], np.float32) for x in (1e-38, 3e-38))
run = jax.jit(normalized).lower(small).compile()
found, right = np.asarray(run(small)), np.asarray(run(larger))
print(jax.__version__, found, right, "divide" in run.as_text(), "multiply" in run.as_text())
assert np.isnan(found).all() and right.tolist() == [[1.0, 0.5]], "the behaviour has changed"
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
