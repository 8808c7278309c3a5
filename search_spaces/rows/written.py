"""The functions that users wrote, by the row programs derived from them: the references that check these programs."""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend import core

from search_spaces import fingerprint, lowering_compat, recognise

# ------------------------------------------------------------------------------
# The equations of a function, computed in float32.


def wide(closed: Any, *args: Any) -> list[Any]:
    """Evaluates a jaxpr as its equations are, with results of 8 and 16 bits held in float32.

    Casts round as they are written. Only arithmetic is not rounded. If an argument is float64, all is held in float64.
    """
    real = jnp.dtype(jnp.float64 if any(jnp.result_type(x) == jnp.float64 for x in args) else jnp.float32)
    return _evaluated(closed, real, args)


def _evaluated(closed: Any, real: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = fingerprint.opened_jaxpr(closed)

    def held(x: Any) -> Any:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < real.itemsize
        return x.astype(real) if narrow else x

    def read(atom: Any) -> Any:
        if not isinstance(atom, core.Literal):
            return known[atom]
        return held(np.asarray(atom.val, atom.aval.dtype))  # type: ignore[attr-defined]

    known = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), map(held, (*getattr(closed, "consts", ()), *args)), strict=True)
    )
    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        if (inner := recognise.body(equation)) is not None:
            results = _evaluated(inner, real, inputs)
        elif equation.primitive.name == "convert_element_type":
            (x,), dtype = inputs, equation.params["new_dtype"]
            widens = all(jnp.issubdtype(each, jnp.floating) for each in (x.dtype, dtype)) and dtype.itemsize >= 4
            results = [x if widens else x.astype(dtype)]
        else:
            if equation.primitive.name in _BY_DTYPE or any(fingerprint.held_jaxprs(equation)):
                inputs = [x.astype(atom.aval.dtype) for x, atom in zip(inputs, equation.invars, strict=True)]
            results = lowering_compat.evaluate_equation(equation, *inputs)
        known.update(zip(equation.outvars, map(held, results), strict=True))
    return list(map(read, jaxpr.outvars))


# Their results depend on the dtype of their operands, not only on the values.
_BY_DTYPE = frozenset({"bitcast_convert_type", "nextafter"})


def mapped(function: Callable[..., Any], kinds: Sequence[str], axes: tuple[int, int], arrays: Sequence[Any]) -> Any:
    """Maps a function of one row over this many axes before, and after, the axis of the columns."""
    for axis in (-1,) * axes[1] + (0,) * axes[0]:
        function = jax.vmap(function, [axis if kind in ("row", "scalar") else None for kind in kinds], axis)
    return function(*arrays)


# ------------------------------------------------------------------------------
# Functions by the text of their programs.


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """A function of one row as its user wrote it.

    Attributes:
      jaxpr: of the function, without the axes of rows.
      kinds: as in `Operand`, for each array.
      segments: rows of the program in one row of the function.
    """

    jaxpr: Any
    kinds: tuple[str, ...]
    segments: int = 1

    def over_rows(self, p: Any, *arrays: jax.Array, rounded: bool = False) -> tuple[jax.Array, ...]:
        """Computes the function by XLA, for operands and results as in a problem of its program.

        Args:
          rounded: compute in the dtypes of the function; else as `wide` does.
        """
        inner = (p.inner,) if p.axis == -2 else ()
        shapes = [x.aval.shape for x in fingerprint.opened_jaxpr(self.jaxpr).invars]
        own = [
            x.reshape(-1, *shape, *inner) if kind in ("row", "scalar") else x.reshape(shape)
            for x, shape, kind in zip(arrays, shapes, self.kinds, strict=True)
        ]
        run = core.jaxpr_as_fun(self.jaxpr) if rounded else functools.partial(wide, self.jaxpr)
        found = mapped(run, self.kinds, (1, len(inner)), own)
        return tuple(
            x.sum(0) if of.kind == "row sum" else x.reshape(-1, *s.shape[1:])
            for x, s, of in zip(found, p.results(), p.arrays[1], strict=True)
        )


# At most so many are kept; a program without its function is its own reference.
_MOST = 1024
_written: dict[str, Written | Exported] = {}


def remember(text: str, function: Written | Exported) -> None:
    """Makes `function` the reference of the program of this text, in place of an earlier function."""
    if len(_written) >= _MOST:
        _written.clear()
    _written[text] = function


def written(text: str) -> Written | Exported | None:
    """Returns the function of which the program of this text was derived last in this process."""
    return _written.get(text)


@functools.lru_cache(maxsize=64)
def exported(function: Written, p: Any) -> str:
    """Returns a function as text, for any number of rows, for processes that know only its program."""
    rows = export.symbolic_shape("rows")[0] * function.segments
    shapes = [
        jax.ShapeDtypeStruct((rows, *s.shape[1:]) if of.kind in ("row", "scalar") else s.shape, s.dtype)
        for s, of in zip(p.operands(), p.arrays[0], strict=True)
    ]
    made = export.export(jax.jit(functools.partial(function.over_rows, p)), platforms=["cpu", "cuda", "tpu"])(*shapes)
    return f"{function.segments} {base64.b85encode(made.serialize()).decode()}"


@dataclasses.dataclass(frozen=True)
class Exported:
    """A function that another process exported, in the place of a `Written`."""

    text: str

    @property
    def segments(self) -> int:
        return _loaded(self.text)[1]

    def over_rows(self, p: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        found: tuple[jax.Array, ...] = tuple(_loaded(self.text)[0].call(*arrays))
        return found


@functools.lru_cache(maxsize=64)
def _loaded(text: str) -> tuple[export.Exported, int]:
    segments, _, made = text.partition(" ")
    return export.deserialize(bytearray(base64.b85decode(made))), int(segments)
