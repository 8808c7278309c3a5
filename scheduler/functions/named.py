"""A function that a command line names, and the shapes of its arrays as text."""

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
# An extent, and what divides it: 8, 8@x, 8@(x,y).
_EXTENT = re.compile(r"\s*(\d+)(?:@(?:(\w+)|\(([\w, ]*)\)))?\s*(?:,|$)")
# As JAX prints dtypes.
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_SHORT |= {
    f"{short}{bits}": f"{long}{bits}" for short, long in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}


def function(
    name: str, arrays: Sequence[str] = (), mesh: Mesh | None = None
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The function of that name, and what it is to be traced with.

    Args:
      name: ``package.module:STEP`` or ``file.py:STEP``. The module is imported, which runs it.
      arrays: of the function, as ``bfloat16[4096,512]``. A function without arguments needs none: it makes its own,
        which take no memory where it is only traced.
      mesh: what arrays are divided over: ``bfloat16[4096@data,512]``.

    Raises:
      ValueError: there is no such function, or it takes other arguments than these.
    """
    if not name.rpartition(":")[0]:
        raise ValueError(f"{name!r} names no function: write package.module:STEP or file.py:STEP")
    try:
        found = value_of(name)
    except Exception as error:  # whatever a user's file raises
        raise ValueError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}, not a function")
    given = tuple(array(text, mesh) for text in arrays)
    try:
        inspect.signature(found).bind(*given)
    except TypeError as error:
        raise ValueError(
            f"{name}: {error}; give the shapes of its arrays (bfloat16[4096,512] ...), or name a function without "
            "arguments that calls it"
        ) from error
    except ValueError:  # it has no signature
        pass
    return found, given


def to_time(name: str, arrays: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and arguments to time it with: `function`, whose floats are drawn at random and whose integers are 0.

    One that takes no arguments returns both, as ``(function, (argument, ...))``: what it computed alone, XLA would
    compute while it compiles.

    Raises:
      ValueError: as `function`, or it returns something else.
    """
    found, shapes = function(name, arrays)
    if shapes:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return found, tuple(_drawn(key, s) for key, s in zip(keys, shapes, strict=True))
    made = found()
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list):
        return made[0], tuple(made[1])
    raise ValueError(
        f"{name} takes no arguments and returns no (function, (argument, ...)) to time: return these, or give the "
        "shapes of a function's arrays (bfloat16[4096,512] ...)"
    )


def _drawn(key: jax.Array, s: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(s.dtype, jnp.floating):
        return jax.random.normal(key, s.shape, jnp.float32).astype(s.dtype)
    return jnp.zeros(s.shape, s.dtype)


def array(text: str, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
    """Of a text such as ``bfloat16[4096,512]``, or ``bf16[4096,512]`` as JAX prints it.

    Args:
      mesh: what it is divided over, as JAX prints that of types: ``bf16[4096@data,512@(x,y)]``.

    Raises:
      ValueError: it is none, or of no such mesh.
    """
    if (match := _ARRAY.fullmatch(text.strip())) is None or (axes := _axes(match[2])) is None:
        raise ValueError(f"{text!r} is no array: write its dtype and extents, as in bfloat16[4096,512]")
    divided = [name for _, names in axes for name in names]
    if len(set(divided)) < len(divided):
        raise ValueError(f"{text!r} names an axis of the mesh twice: it can divide one axis of an array")
    spec = PartitionSpec(*(names or None for _, names in axes))
    if mesh is None and any(spec):
        raise ValueError(f"{text!r} is divided over a mesh: give --mesh with the extents of its axes")
    try:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        dtype = jnp.dtype(_SHORT.get(match[1], match[1]))
        return jax.ShapeDtypeStruct([extent for extent, _ in axes], dtype, sharding=sharding)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no array: {error}") from error


def _axes(text: str) -> list[tuple[int, tuple[str, ...]]] | None:
    """Of each axis its extent, and what divides it; None where the text has something else."""
    found = list(_EXTENT.finditer(text))
    if "".join(match[0] for match in found) != text.rstrip():
        return None
    names = (re.findall(r"\w+", match[2] or match[3] or "") for match in found)
    return [(int(match[1]), tuple(axes)) for match, axes in zip(found, names, strict=True)]
