"""Random keys of rows: the words of a key as two operands with one element per row, and what a function draws of it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces import jax_compat
from search_spaces.recognise import Node
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.program import Atom, Number, within
from search_spaces.rows.shapes import Array, Shapes, objects


def is_key(x: Any) -> bool:
    """Returns whether an array has random keys as elements."""
    return bool(jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key))


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
class Key:
    """A random key per row, in place of an atom of an `Array`."""

    words: tuple[Atom, ...]


# The primitives that compute alike with signed and unsigned integers, or only move them. Programs have int32 alone.
_OF_UNSIGNED = frozenset(
    {"add", "sub", "mul", "and", "or", "xor", "shift_left", "shift_right_logical", "eq", "ne", "lt", "le", "gt", "ge"}
    | {"select_n", "convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "reshape", "squeeze", "slice"}
    | {"split", "concatenate", "stack", "unstack", "expand_dims", "dynamic_slice", "gather"}
    | {"random_wrap", "random_fold_in", "threefry2x32", "threefry2x32_13", "threefry2x32_20"}
)
LEAST = Number(float(-(2**31)), "int32")


def require_signed(node: Node) -> None:
    """Raises NoProgram for an equation of uint32 of which int32 has no equal."""
    if node.name not in _OF_UNSIGNED and any(x.dtype == jnp.uint32 for x in node.inputs):
        raise NoProgram(f"uses {node.name} of uint32: convert to int32 first")


class Keys(Shapes):
    """Translates the primitives of random keys and bits."""

    @abc.abstractmethod
    def _inlined(self, function: Callable[..., Any], node: Node, *arrays: Array) -> Array:
        """Returns the result of a function of uint32 arrays."""

    @abc.abstractmethod
    def _map(self, emit: Callable[..., Atom], *arrays: Array) -> Array:
        """Applies an equation to arrays of the same shape, or scalars."""

    def _random_seed(self, _: Any) -> Array:
        raise NoProgram("makes a random key, of which all rows draw the same: take a key for each row as an argument")

    def _random_wrap(self, node: Node) -> Array:
        return _keys(self._array(node.inputs[0]))

    def _random_unwrap(self, node: Node) -> Array:
        return _words(self._array(node.inputs[0]))

    def _random_bits(self, node: Node) -> Array:
        width, shape = node.params["bit_width"], node.params["shape"]
        return self._drawn(node, lambda of, words: of.random_bits(words, width, shape))

    def _random_fold_in(self, node: Node) -> Array:
        return _keys(self._drawn(node, lambda of, words, number: of.fold_in(words, number)))

    def _random_split(self, node: Node) -> Array:
        return _keys(self._drawn(node, lambda of, words: of.split(words, node.params["shape"])))

    def _drawn(self, node: Node, draw: Callable[..., Any]) -> Array:
        key, *others = map(self._array, node.inputs)
        if key.blocks.shape:
            raise NoProgram(f"uses {node.name} of an array of keys: draw from one after the other")
        functions = jax_compat.key_functions(node.inputs[0].dtype)
        return self._inlined(lambda *words: draw(functions, *words), node, _words(key), *others)

    def _iota_2x32_shape(self, node: Node) -> list[Array]:
        shape = node.params["shape"]
        return [self._full(Number(0.0, "int32"), shape), self._counted(node, shape)]

    def _threefry2x32(self, node: Node) -> list[Array]:
        return self._threefry2x32_20(node)

    def _threefry2x32_20(self, node: Node) -> list[Array]:
        return list(self._threefry(node, "threefry2x32_20"))

    def _threefry2x32_13(self, node: Node) -> list[Array]:
        return list(self._threefry(node, "threefry2x32_13"))

    def _threefry(self, node: Node, name: str) -> Iterator[Array]:
        for word in (0, 1):

            def emit(*atoms: Atom, word: int = word) -> Atom:
                return self.make.emit(name, *atoms, params=(word,), dtype="int32")

            yield self._map(emit, *map(self._array, node.inputs))

    def _bitcast_convert_type(self, node: Node) -> Array:
        before, after, x = node.inputs[0].dtype, jnp.dtype(node.params["new_dtype"]), self._array(node.inputs[0])
        if {before.itemsize, after.itemsize} != {4}:
            raise NoProgram(f"reads the bits of {before} as {after}")
        if (dtype := within(str(after))) == within(str(before)):
            return x
        return self._map(lambda atom: self.make.emit("bitcast", atom, params=(dtype,), dtype=dtype), x)


def _keys(words: Array) -> Array:
    keys = [Key(tuple(each)) for each in words.blocks.reshape(-1, words.blocks.shape[-1])]
    return Array(objects(keys, words.blocks.shape[:-1]), vector=False)


def _words(keys: Array) -> Array:
    words = [key.words for key in keys.blocks.reshape(-1)]
    return Array(objects([x for each in words for x in each], (*keys.blocks.shape, len(words[0]))), vector=False)
