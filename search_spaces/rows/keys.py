"""Random keys of rows: the words of a key as two operands with one element per row, and what a function draws of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces import jax_compat
from search_spaces.recognise import Node
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.program import Atom, Number, within
from search_spaces.rows.shapes import counted
from search_spaces.rows.translation import ONE_KEY, Array, Trace, objects, rule


def words_of(key: Any) -> tuple[Any, ...]:
    """Returns the words of random keys ``[...]``, each int32 ``[...]``."""
    if isinstance(key, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, key).shape[-1]
        return (jax.ShapeDtypeStruct(key.shape, jnp.int32),) * words
    words = lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)
    return tuple(words[..., i] for i in range(words.shape[-1]))


def key_of(words: Sequence[Any], impl: Any) -> jax.Array:
    """Returns the random key ``[]`` of these words, each int32 ``[]``."""
    unsigned = [lax.bitcast_convert_type(x, jnp.uint32) for x in words]
    return jax.random.wrap_key_data(jnp.stack(unsigned), impl=impl)


@dataclasses.dataclass(frozen=True)
class RandomKey:
    """A random key per row, in place of an atom of an `Array`."""

    words: tuple[Atom, ...]


@rule("random_seed")
def _random_seed(*_: Any) -> Array:
    raise NoProgram(ONE_KEY)


@rule("random_wrap")
def _keys(_t: Trace, _node: Node, words: Array) -> Array:
    keys = [RandomKey(tuple(each)) for each in words.blocks.reshape(-1, words.blocks.shape[-1])]
    return Array(objects(keys, words.blocks.shape[:-1]), vector=False)


@rule("random_unwrap")
def _words(_t: Trace, _node: Node, keys: Array) -> Array:
    words = [key.words for key in keys.blocks.reshape(-1)]
    return Array(objects([x for each in words for x in each], (*keys.blocks.shape, len(words[0]))), vector=False)


@rule("random_bits", "random_fold_in", "random_split")
def _drawn(t: Trace, node: Node, key: Array, *numbers: Array) -> Array:
    if key.blocks.shape:
        raise NoProgram(f"uses {node.name} of an array of keys: draw from one after the other")
    of, params = jax_compat.key_functions(node.inputs[0].dtype), node.params
    draw: Mapping[str, Callable[..., Any]] = {
        "random_bits": lambda words: of.random_bits(words, params["bit_width"], params["shape"]),
        "random_fold_in": of.fold_in,
        "random_split": lambda words: of.split(words, params["shape"]),
    }
    drawn = t.inlined(draw[node.name], _words(t, node, key), *numbers)
    return drawn if node.name == "random_bits" else _keys(t, node, drawn)


@rule("iota_2x32_shape")
def _iota_2x32_shape(t: Trace, node: Node) -> list[Array]:
    shape = node.params["shape"]
    return [t.full(Number(0.0, "int32"), shape), counted(t, node, shape)]


@rule("threefry2x32", "threefry2x32_13", "threefry2x32_20")
def _threefry(t: Trace, node: Node, *arrays: Array) -> list[Array]:
    name = "threefry2x32_20" if node.name == "threefry2x32" else node.name
    words = [functools.partial(t.emit, name, params=(word,), dtype="int32") for word in (0, 1)]
    return [t.map(word, *arrays) for word in words]


@rule("bitcast_convert_type")
def _bitcast_convert_type(t: Trace, node: Node, x: Array) -> Array:
    before, after = node.inputs[0].dtype, jnp.dtype(node.params["new_dtype"])
    if {before.itemsize, after.itemsize} != {4}:
        raise NoProgram(f"reads the bits of {before} as {after}")
    if (dtype := within(str(after))) == within(str(before)):
        return x
    return t.map(lambda atom: t.emit("bitcast", atom, params=(dtype,), dtype=dtype), x)
