"""Evaluates the equations of a region in float32, as the reference of a comparison, or with rounded operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from search_spaces import checking, fingerprint, lowering_compat
from search_spaces.recognise import Node, Value


def evaluated_wide(nodes: Sequence[Node], known: Sequence[tuple[Value, Any]], results: Sequence[Value]) -> list[Any]:
    """Computes arrays by equations in order, in float32 wherever the equations use a narrower dtype."""
    values = {id(value): widened(x) for value, x in known}

    def read(x: Value) -> Any:
        return values[id(x)] if id(x) in values else widened(x.literal)

    for node in nodes:
        found = _in_float32(node, [read(x) for x in node.inputs])
        values |= {id(x): each for x, each in zip(node.results, found, strict=True) if id(x) not in values}
    return [read(x) for x in results]


def evaluated_coarsely(nodes: Sequence[Node], known: Mapping[int, Any], results: Sequence[Value]) -> list[Any]:
    """Computes arrays by equations in order. Products of two dtypes round both operands to the narrower one.

    So does a kernel of attention: in models, a gradient of float32 is multiplied by keys of bfloat16.
    """
    values = dict(known)

    def read(x: Value) -> Any:
        return values.get(id(x), x.literal)

    for node in nodes:
        args = [read(x) for x in node.inputs]
        if node.name == "dot_general":
            narrow = min((x.dtype for x in args), key=_bits)
            args = [lax.optimization_barrier(x.astype(narrow)).astype(x.dtype) for x in args]
        found = lowering_compat.evaluate_equation(node.equation, *args)
        values |= {id(x): each for x, each in zip(node.results, found, strict=True) if id(x) not in known}
    return [read(x) for x in results]


def mixes_dtypes(nodes: Iterable[Node]) -> bool:
    """Returns whether a product among the equations has operands of two dtypes."""
    return any(node.name == "dot_general" and len({x.dtype for x in node.inputs}) > 1 for node in nodes)


def _in_float32(node: Node, args: Sequence[Any]) -> Sequence[Any]:
    equation = node.equation
    if node.name != "bitcast_convert_type" and not any(map(fingerprint.is_jaxpr, equation.params.values())):
        return lowering_compat.evaluate_equation(equation.replace(params=wide_params(equation.params)), *args)
    own = [x.astype(of.dtype) if is_narrow(of.dtype) else x for x, of in zip(args, node.inputs, strict=True)]
    return [*map(widened, lowering_compat.evaluate_equation(equation, *own))]


def wide_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters of an equation with which it computes in float32, and products with the highest precision."""
    dtypes = ("new_dtype", "preferred_element_type", "dtype")
    wide = {
        name: jnp.dtype(jnp.float32) if name in dtypes and x is not None and is_narrow(x) else x
        for name, x in params.items()
    }
    return wide | ({"precision": (lax.Precision.HIGHEST,) * 2} if "precision" in wide else {})


def is_narrow(dtype: Any) -> bool:
    """Returns whether it is a floating-point dtype of less than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)


def widened(x: Any) -> Any:
    """Returns an array of a narrower floating-point dtype in float32, and anything else as it is."""
    return checking.widened(jnp.asarray(x)) if hasattr(x, "dtype") and is_narrow(x.dtype) else x


def _bits(dtype: Any) -> int:
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.inexact) else 64
