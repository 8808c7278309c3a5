"""Loads a function named on a command line, and parses the shapes of its arrays."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from search_spaces import value_of

_ARRAY = re.compile(r"(\w+)\[([\w@(), ]*)\]")
# An extent and its mesh axes: 8, 8@x, 8@(x,y).
_EXTENT = re.compile(r"\s*(\d+)(?:@(?:(\w+)|\(([\w, ]*)\)))?\s*(?:,|$)")
# Short names of dtypes, as printed by JAX.
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_SHORT |= {
    f"{short}{bits}": f"{long}{bits}" for short, long in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}


def function(
    name: str, arrays: Sequence[str] = (), mesh: Mesh | None = None
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the named function, and the shapes to trace it with.

    Args:
      name: ``package.module:STEP`` or ``file.py:STEP``. The module is imported, which runs it.
      arrays: Shapes of the function's arrays, as ``bfloat16[4096,512]``. A function without arguments needs none. It
        creates its own arrays, which take no memory while it is only traced.
      mesh: The mesh of sharded arrays: ``bfloat16[4096@data,512]``.

    Raises:
      ValueError: There is no such function, or its arguments do not match `arrays`.
    """
    if not name.rpartition(":")[0]:
        raise ValueError(f"expected package.module:STEP or file.py:STEP, found {name!r}")
    try:
        found = value_of(name)
    except Exception as error:  # any error of the user's file
        raise ValueError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} must be a function, found {type(found).__name__}")
    given = tuple(array(text, mesh) for text in arrays)
    try:
        inspect.signature(found).bind(*given)
    except TypeError as error:
        raise ValueError(
            f"{name}: {error}; give the shapes of its arrays (bfloat16[4096,512] ...), or name a function without "
            "arguments that calls it"
        ) from error
    except ValueError:  # no signature
        pass
    return found, given


def array(text: str, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
    """Parses a shape such as ``bfloat16[4096,512]``, or ``bf16[4096,512]`` as printed by JAX.

    Args:
      mesh: The mesh over which the array is sharded, as JAX prints sharded types: ``bf16[4096@data,512@(x,y)]``.

    Raises:
      ValueError: The text is not a valid shape, or does not match the mesh.
    """
    if (match := _ARRAY.fullmatch(text.strip())) is None or (axes := _axes(match[2])) is None:
        raise ValueError(f"expected an array such as bfloat16[4096,512], found {text!r}")
    divided = [name for _, names in axes for name in names]
    if len(set(divided)) < len(divided):
        raise ValueError(f"{text!r} uses an axis of the mesh twice")
    spec = PartitionSpec(*(names or None for _, names in axes))
    if mesh is None and any(spec):
        raise ValueError(f"{text!r} is sharded over a mesh: give --mesh with the extents of its axes")
    try:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        dtype = jnp.dtype(_SHORT.get(match[1], match[1]))
        return jax.ShapeDtypeStruct([extent for extent, _ in axes], dtype, sharding=sharding)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a valid array: {error}") from error


def _axes(text: str) -> list[tuple[int, tuple[str, ...]]] | None:
    """Parses the extent and the mesh axes of each array axis; None if the text is invalid."""
    found = list(_EXTENT.finditer(text))
    if "".join(match[0] for match in found) != text.rstrip():
        return None
    names = (re.findall(r"\w+", match[2] or match[3] or "") for match in found)
    return [(int(match[1]), tuple(axes)) for match, axes in zip(found, names, strict=True)]
