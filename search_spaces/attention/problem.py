"""The scaled dot-product attention problem: shapes, the keys that each query sees, and its sharding."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces import checking
from search_spaces.problem import Problem, nbytes
from search_spaces.sharding import Sharding

DTYPES = ("bfloat16", "float16", "float32")
# Gemma 2's cap of attention logits (arXiv:2408.00118, table 1). A search measures with it if logits are capped.
SOFTCAP = 50.0


class Lengths(NamedTuple):
    """Number of queries and keys in each sequence of a batch, ``int32[batch]``; None means full length."""

    q: Any = None
    kv: Any = None


class Bounds:
    """The keys that a query sees, from extents, the window's bounds and whether there are lengths.

    Attributes:
      q_len, kv_len: number of queries and keys; symbolic under `jax.export`.
      left, right: query i sees keys from ``i - left`` to ``i + right``; None means no bound.
      q_lengths, kv_lengths: whether an operand gives the number of queries or keys of each sequence.
    """

    q_len: int
    kv_len: int
    q_lengths: bool
    kv_lengths: bool

    @property
    def left(self) -> int | None:
        raise NotImplementedError

    @property
    def right(self) -> int | None:
        raise NotImplementedError

    @property
    def every_query_sees(self) -> bool:
        """Whether each query sees a key, for any operands."""
        return not (self.q_lengths or self.kv_lengths) and _reaches(self.kv_len, self.left, self.q_len)

    @property
    def every_key_is_seen(self) -> bool:
        """Whether each key is seen by a query, for any operands."""
        return not (self.q_lengths or self.kv_lengths) and _reaches(self.q_len, self.right, self.kv_len)

    @property
    def pads_queries(self) -> bool:
        """Whether a sequence with keys may have queries that see none: those from `counted` on."""
        return self.q_lengths or (self.left is not None and not self.every_query_sees)

    @property
    def pads_keys(self) -> bool:
        """Whether a sequence with queries may have keys that none of them sees: those from `counted` on."""
        return self.kv_lengths or (self.right is not None and not self.every_key_is_seen)

    def counted(self, of: Lengths) -> Lengths:
        """Returns how many queries see a key, and how many keys are seen; they come first, because bounds only shift.

        Args:
          of: lengths of one sequence, or of each; any int32.

        Returns:
          Numbers from 0 to `q_len` and `kv_len`; one per sequence, if there are any lengths.
        """
        q = self.q_len if of.q is None else jnp.clip(of.q, 0, self.q_len)
        kv = self.kv_len if of.kv is None else jnp.clip(of.kv, 0, self.kv_len)
        seeing = q if self.left is None else _least(q, kv + self.left)
        seen = kv if self.right is None else _least(kv, q + self.right)
        return Lengths(
            seeing if of.kv is None else jnp.where(kv > 0, seeing, 0),
            seen if of.q is None else jnp.where(q > 0, seen, 0),
        )


def _reaches(count: int, shift: int | None, end: int) -> bool:
    """Returns whether ``count + shift`` is at least `end`; False for symbolic extents, which may not be comparable."""
    return shift is None or (isinstance(count, int) and isinstance(end, int) and count + shift >= end)


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


@dataclasses.dataclass(frozen=True)
class AttentionProblem(Problem, Bounds):
    """Queries ``q[batch, q_len, heads, head_dim]`` on keys and values ``[batch, kv_len, kv_heads, ...]``.

    Layout and semantics are those of `jax.nn.dot_product_attention`: query head n uses key head ``n // (heads //
    kv_heads)``, and a causal mask is aligned at the top left: query i sees keys 0 to i.

    Attributes:
      batch, q_len, kv_len, heads, kv_heads, head_dim: extents, at least 1; `heads` is a multiple of `kv_heads`.
      head_dim_v: of values and of the result; 0 means `head_dim`.
      causal: query i sees no key beyond i.
      window_left, window_right: query i sees keys from ``i - window_left`` to ``i + window_right``; -1 means no bound.
      q_lengths, kv_lengths: whether an operand ``int32[batch]`` gives the number of queries or keys of each sequence.
      softcap: logits are ``cap * tanh(logits / cap)``; the cap is a parameter of the call.
      dtype: of q, k, v and the result.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    q_lengths: bool = False
    kv_lengths: bool = False
    softcap: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name, least in (("head_dim_v", 0), ("window_left", -1), ("window_right", -1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        self._require("dtype", DTYPES)
        # Each problem has one spelling; otherwise a cache would store it twice.
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", 0)
        if self.causal and self.window_right != -1:  # A bound of i implies a bound of i + right.
            object.__setattr__(self, "window_right", -1)
        if self.window_left >= self.q_len - 1:  # No query is that far from the first key.
            object.__setattr__(self, "window_left", -1)
        if self.window_right >= self.kv_len - 1:
            object.__setattr__(self, "window_right", -1)
        super().__post_init__()

    @property
    def group(self) -> int:
        """Number of query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return self.head_dim_v or self.head_dim

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.dtype == "float32" else self.dtype

    @property
    def right(self) -> int | None:
        """Query i sees keys up to ``i + right``; None means all of them."""
        return 0 if self.causal else None if self.window_right < 0 else self.window_right

    @property
    def left(self) -> int | None:
        """Query i sees keys from ``i - left`` on; None means all of them."""
        return None if self.window_left < 0 else self.window_left

    @functools.cached_property
    def visible_pairs(self) -> int:
        """Number of pairs of a query and a key that it sees, in one head of one full-length sequence."""
        i = np.arange(self.q_len, dtype=np.int64)
        first = np.zeros_like(i) if self.left is None else np.maximum(i - self.left, 0)
        end = np.full_like(i, self.kv_len) if self.right is None else np.minimum(i + self.right + 1, self.kv_len)
        return int(np.maximum(end - first, 0).sum())

    @property
    def q_share(self) -> float:
        """Share of the queries that `random_lengths` keeps: timed sequences average half of the longest length."""
        return 0.5 if self.q_lengths else 1.0

    @property
    def kv_share(self) -> float:
        """Share of the keys that `random_lengths` keeps."""
        return 0.5 if self.kv_lengths else 1.0

    @property
    def longest_beyond_mean(self) -> float:
        """Excess of keys of the longest sequence of `random_lengths` over the mean, relative to the mean."""
        pairs = self.batch // 2
        return pairs / (pairs + 1) if self.kv_lengths else 0.0

    @property
    def pair_share(self) -> float:
        """Lower bound of the share of pairs that `random_lengths` keeps: a mean square is at least the squared mean."""
        one = self.q_share * self.kv_share
        return 0.25 if one < 1 and (self.right, self.left) != (None, None) else one

    @property
    def bytes_moved(self) -> float:
        """Counts only the queries, keys and values that lengths and mask leave."""
        q, *kv = map(nbytes, self.qkv())
        seeing = 1.0 if self.left is None else max(0, min(self.q_len, self.kv_len + self.left)) / self.q_len
        seen = 1.0 if self.right is None else max(0, min(self.kv_len, self.q_len + self.right)) / self.kv_len
        unread = (1 - min(self.q_share, seeing)) * q + (1 - min(self.kv_share, seen)) * sum(kv)
        return super().bytes_moved - unread

    @property
    def library_bytes_moved(self) -> float:
        """Counts XLA's traffic: it writes and reads logits in float32, then probabilities in the dtype."""
        itemsize = int(jnp.dtype(self.dtype).itemsize)
        return self.bytes_moved + 2.0 * (4 + itemsize) * self.batch * self.heads * self.q_len * self.kv_len

    def array(self, *shape: int, dtype: str = "") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))

    def qkv(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes of q, k and v."""
        p = self
        return (
            p.array(p.batch, p.q_len, p.heads, p.head_dim),
            p.array(p.batch, p.kv_len, p.kv_heads, p.head_dim),
            p.array(p.batch, p.kv_len, p.kv_heads, p.value_dim),
        )

    def out(self) -> jax.ShapeDtypeStruct:
        return self.array(self.batch, self.q_len, self.heads, self.value_dim)

    def lse(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of the log-sum-exp (natural logarithm) of each query's scaled, capped, visible logits."""
        return self.array(self.batch, self.heads, self.q_len, dtype="float32")

    def length_operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `q_lengths`, then `kv_lengths`, if the problem has them; they are the last operands."""
        return (self.array(self.batch, dtype="int32"),) * (self.q_lengths + self.kv_lengths)

    def lengths(self, args: Any) -> Lengths:
        """Returns the lengths among operands."""
        given = args[len(args) - self.q_lengths - self.kv_lengths :]
        return Lengths(given[0] if self.q_lengths else None, given[-1] if self.kv_lengths else None)

    def random_lengths(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns random lengths from 1 to full length; each pair of consecutive sequences adds up to full length.

        Each seed is therefore the same amount of work. If the batch is odd, the last sequence has half of the full
        length. A sequence has the same share of queries and of keys, as with padding.
        """
        share = np.random.default_rng(seed).random(self.batch // 2)
        shares = np.concatenate([np.stack([share, 1 - share], axis=1).ravel(), np.full(self.batch % 2, 0.5)])
        most = [n for n, given in ((self.q_len, self.q_lengths), (self.kv_len, self.kv_lengths)) if given]
        return tuple(jnp.asarray(np.clip(np.ceil(shares * n), 1, n), jnp.int32) for n in most)

    def special(self) -> tuple[str, ...]:
        """Returns the finite kinds: NaN and infinities of invisible keys are not yet left out everywhere."""
        return checking.FINITE

    def special_qkv(self, kind: str, qkv: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns special operands; for "large", only values are large, and all logits share one large number.

        Subtracting the maximum is then necessary, because exp would overflow. With larger logits, the softmax would
        magnify their rounding errors.
        """
        if kind != "large":
            return checking.with_special_values(qkv, kind, integers=False)
        q, k, v = qkv
        return *self.with_common_logit(q, k), *checking.with_special_values((v,), kind)

    @property
    def common_power(self) -> int:
        """Binary logarithm of the common element of queries and keys that makes an exponential of logits overflow."""
        return math.ceil(math.log2(128 / self.default_scale()) / 2)

    def with_common_logit(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        """Makes queries and keys add one number to all logits, beyond 88, where exp in float32 overflows."""
        return tuple(checking.run_program(_led_by, x, power=self.common_power) for x in (q, k))

    def neighbour(self) -> Problem | None:
        q_len, kv_len = (n - less if n > 8 else n for n, less in ((self.q_len, 1), (self.kv_len, 3)))
        below = dataclasses.replace(self, q_len=q_len, kv_len=kv_len)
        return None if below == self else below

    def default_scale(self) -> float:
        """Returns the scale of logits if a call does not give one: ``1 / sqrt(head_dim)``."""
        return float(self.head_dim**-0.5)


@functools.partial(jax.jit, static_argnames="power")
def _led_by(x: jax.Array, *, power: int) -> jax.Array:
    """Sets the first element of each head to a power of two."""
    return x.at[..., 0].set(2.0**power)


# ------------------------------------------------------------------------------
# Sharding of attention: by sequences and by heads; key heads stay with the query heads that use them.

P = TypeVar("P", bound=AttentionProblem)


def sharding_by_heads(p: P, operands: Sequence[str], results: Sequence[str]) -> Sharding[Any]:
    """Returns the sharding for arrays by name: "q", "k", "v", "out", "lse", or "lengths", in order.

    Key head n belongs to the query heads from ``n group`` on. With more devices than key heads, each device has a part
    of a group, and the gradients of its keys are summed over these devices.
    """
    heads = "(kv_heads group)" if p.group > 1 and p.kv_heads > 1 else "group" if p.group > 1 else "kv_heads"
    letters = {
        "q": f"batch q_len {heads} head_dim",
        "k": "batch kv_len kv_heads head_dim",
        "v": "batch kv_len kv_heads value_dim",
        "out": f"batch q_len {heads} value_dim",
        "lse": f"batch {heads} q_len",
        "lengths": "batch",
    }
    arrays = (", ".join(letters[name] for name in names) for names in (operands, results))
    return Sharding(
        rule=" -> ".join(arrays),
        divided=("batch", "kv_heads"),
        summed=("group",) if p.group > 1 else (),
        local=_local,
    )


def _local(p: P, extents: Mapping[str, int]) -> P:
    kv_heads = extents["kv_heads"]
    return dataclasses.replace(p, batch=extents["batch"], kv_heads=kv_heads, heads=kv_heads * extents.get("group", 1))


# ------------------------------------------------------------------------------
# Zeros the keys that no query sees, and the queries that see no key.
#
# A probability of 0 is not enough: 0 times NaN is NaN, and a cache of keys and values, or padding, may hold
# anything. With zeros there, products of masked elements are 0. Keys that only some queries do not see are kept.


def zero_keys(p: Bounds, of: Lengths, *arrays: Any) -> tuple[Any, ...]:
    """Zeros keys that no query sees, in arrays ``[batch, kv_len, ...]``."""
    return arrays if p.every_key_is_seen else tuple(_first(x, p.counted(of).kv) for x in arrays)


def zero_queries(p: Bounds, of: Lengths, *arrays: Any) -> tuple[Any, ...]:
    """Zeros queries that see no key, in arrays ``[batch, q_len, ...]``."""
    return arrays if p.every_query_sees else tuple(_first(x, p.counted(of).q) for x in arrays)


def fill_statistics(p: Bounds, of: Lengths, x: Any, value: float = 0.0) -> Any:
    """Sets ``[batch, heads, q_len]`` to `value` for queries that see no key."""
    if p.every_query_sees:
        return x
    return jnp.where(_there(p.counted(of).q, x.shape[2])[:, None], x, jnp.asarray(value, x.dtype))


def _first(x: Any, count: Any) -> jax.Array:
    there = _there(count, x.shape[1])
    return jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _there(count: Any, length: Any) -> jax.Array:
    """Returns a mask ``[batch or 1, length]`` of the first `count` elements."""
    return jnp.arange(length)[None] < jnp.atleast_1d(count)[:, None]
