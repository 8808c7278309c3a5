#!/usr/bin/env bash
# JAX 0.12.0.1 (0.10.2 too): a deep copy of a `jax.jit` function can be called, and has the methods `lower`,
# `trace` and `eval_shape`, but each of these raises. The same holds for one inside a copied dict.
# Expected: the copy lowers as the original does, or copying raises.
# Seen: AttributeError: 'jaxlib._jax.PjitFunction' object has no attribute '_fun'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat >"$folder/program.py" <<'PROGRAM'
import copy

import jax

add = jax.jit(lambda x: x + 1)
again = copy.deepcopy({"step": add})["step"]
print(jax.__version__, add(1.0), again(1.0))
add.lower(1.0)
for name in ("lower", "trace", "eval_shape"):
    try:
        getattr(again, name)(1.0)
    except AttributeError as error:
        print(name, error)
        assert "_fun" in str(error), "the behaviour has changed"
    else:
        raise AssertionError("the behaviour has changed")
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
