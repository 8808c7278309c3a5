#!/usr/bin/env bash
# JAX 0.12.0.1 (also 0.10.2): `jax.debug.callback` of an array that XLA divides over devices makes XLA warn of an
# "Involuntary full rematerialization", as if the program were slow. With a constraint that replicates the array before
# the callback there is no warning. Both programs gather the array once.
# Expected: the same warning for equal programs, or none: a callback needs the whole array on one device.
# Seen: a warning of spmd_partitioner.cc for the first program only; one all-gather in each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat >"$folder/program.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def run(x):
    y = jnp.tanh(x)
    shown = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec())) if "whole" in sys.argv else y
    jax.debug.callback(lambda shown: None, shown)
    return 2 * y


x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
print(jax.__version__, jax.jit(run).lower(x).compile().as_text().count(" all-gather("), "all-gather")
PROGRAM
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
for array in divided whole; do
  "$folder/venv/bin/python" "$folder/program.py" "$array" 2>"$folder/$array"
  echo "$array: $(grep -c "Involuntary full rematerialization" "$folder/$array" || true) warnings"
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
0.12.0.1 1 all-gather
divided: 1 warnings
0.12.0.1 1 all-gather
whole: 0 warnings
SEEN
