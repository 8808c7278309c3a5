"""The random generator Threefry-2x32, and `threefry13`: random keys that draw with 13 of its 20 rounds.

Instructions of an H100 to draw 32 bits, in the machine code of dropout, and expected milliseconds of 10^9 elements:

  ==================  ============  ==================  ====
  generator           instructions  of those, ALU only    ms
  ==================  ============  ==================  ====
  JAX's threefry2x32            67                  45   3.0
  `threefry13`                  40                  27   1.8
  ==================  ============  ==================  ====

Memory needs 1.2 ms for bfloat16 rows that are read and written, and 2.4 ms if a residual and a sum are, too. The ALUs
of an SM compute 64 rotations, exclusive ors or additions per clock; ptxas leaves most additions to other units. Each of
Philox-2x32's ten rounds needs some 13 instructions, because Pallas has no upper half of a product.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extended

# Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry2x32(key0: Any, key1: Any, count0: Any, count1: Any, *, rounds: int) -> tuple[Any, Any]:
    """Returns two words of random bits for a key of two words and a counter of two words, all uint32 or all int32."""
    dtype = np.dtype(count1.dtype)

    def word(x: int) -> Any:
        return np.uint32(x).view(dtype)

    keys = key0, key1, key0 ^ key1 ^ word(_PARITY)
    x, y = count0 + key0, count1 + key1
    for number in range(rounds):
        rotation = _ROTATIONS[number % 8]
        x = x + y
        y = x ^ (lax.shift_left(y, word(rotation)) | lax.shift_right_logical(y, word(32 - rotation)))
        if number % 4 == 3:
            group = number // 4 + 1
            x, y = x + keys[group % 3], y + (keys[(group + 1) % 3] + word(group))
    return x, y


@jax.jit
def threefry2x32_20(*args: Any) -> tuple[Any, Any]:
    """Computes `threefry2x32` with 20 rounds by JAX's primitive."""
    unsigned = [lax.bitcast_convert_type(x, jnp.uint32) for x in jnp.broadcast_arrays(*args)]
    first, second = extended.threefry2x32_p.bind(*unsigned)
    return lax.bitcast_convert_type(first, args[0].dtype), lax.bitcast_convert_type(second, args[0].dtype)


@jax.jit
def threefry2x32_13(*args: Any) -> tuple[Any, Any]:
    """Computes `threefry2x32` with 13 rounds by XLA."""
    words = functools.partial(threefry2x32, rounds=13)
    # XLA for CPUs fuses the derivation of a key into each use of the key, and compiles for minutes.
    return lax.platform_dependent(*args, cpu=lambda *x: lax.optimization_barrier(words(*x)), default=words)


# ------------------------------------------------------------------------------
# Random keys: derived as JAX's are, with 20 rounds, so that only bits are cheaper.


def _key(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _random_bits(words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    count = math.prod(shape)
    if count > 2**32:
        raise NotImplementedError(f"threefry13 draws at most 2^32 elements at once, not {count}: split the key")
    counter = lax.iota(np.uint32, count).reshape(shape)
    first, second = threefry2x32_13(words[0], words[1], np.uint32(0), counter)
    if bit_width == 64:
        return first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint64)
    return first.astype(f"uint{bit_width}")


threefry13 = extended.define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
    split=lambda words, shape: jax.random.key_data(jax.random.split(_key(words), shape)),
    random_bits=_random_bits,
    fold_in=lambda words, number: jax.random.key_data(jax.random.fold_in(_key(words), number)),
    name="threefry13",
    tag="fry13",
)
