"""The arguments of one call: the key of their compiled version, the dynamic part, and copies of donated arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from scheduler.core.errors import SchedulerError
from scheduler.rewriting.call_tree import NONE, NUMBERS, Names

# Of many arguments, a report has this many texts, and the arrays of a parameter by name up to this number.
MOST_TYPES, MOST_NAMED = 6, 3
# Types of concrete arrays seen so far.
_arrays: set[type] = set()


class CallArguments:
    """The arguments of one call of a jitted function.

    Args:
      static: Indices and names of the static arguments.
      parameters: Returns a name for each of `args`, as far as known; equal names are one parameter.
      shown: Returns the arguments that a report shows, from those of the call; None shows the latter.
    """

    def __init__(
        self,
        static: Names,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Callable[[], Sequence[str]] = tuple,
        shown: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
    ) -> None:
        numbers, names = static
        self._shown = shown
        self._static, self.args, self.kwargs, self._parameters = static, args, kwargs, parameters
        self._numbers = (
            {number % len(args) for number in numbers if -len(args) <= number < len(args)} if numbers else ()
        )
        self._names = kwargs.keys() & names if names else ()

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that a compiled version takes, without the static ones."""
        args, kwargs = self.args, self.kwargs
        if self._numbers:
            args = tuple(x for number, x in enumerate(args) if number not in self._numbers)
        if self._names:
            kwargs = {name: x for name, x in kwargs.items() if name not in self._names}
        return args, kwargs

    def key(self) -> Any:
        """Returns a key that is equal for calls of the same compiled version.

        Raises:
          TypeError: An argument is not an array, or a static argument is not hashable. JAX gives a more detailed error.
          SchedulerError: The call is part of a trace.
        """
        leaves, tree = jax.tree.flatten(self.dynamic)
        static = (
            tuple((number, self.args[number]) for number in sorted(self._numbers)),
            tuple((name, self.kwargs[name]) for name in sorted(self._names)),
        )
        # Inlined for arrays: models have hundreds of them, and a function call for each would be slower.
        kinds = [
            (x.aval, _normalized(x.sharding, x.ndim), x.committed) if type(x) in _arrays else _leaf_key(x)
            for x in leaves
        ]
        return tree, tuple(kinds), static

    def call(self, compiled: Any) -> Any:
        """Calls a compiled version with these arguments."""
        args, kwargs = self.dynamic
        return compiled(*args, **kwargs)

    def copied(self, donated: Sequence[bool]) -> CallArguments:
        """Returns these arguments, with donated leaves of `dynamic` copied."""
        if not any(donated):
            return self
        pairs = zip(self.leaves, donated, strict=True)
        leaves = [jnp.copy(x) if given_up and isinstance(x, jax.Array) else x for x, given_up in pairs]
        args, kwargs = jax.tree.unflatten(jax.tree.structure(self.dynamic), leaves)
        rest = iter(args)
        whole = tuple(x if number in self._numbers else next(rest) for number, x in enumerate(self.args))
        return CallArguments(self._static, whole, kwargs | {name: self.kwargs[name] for name in self._names})

    @property
    def numbers(self) -> bool:
        """Whether `dynamic` contains Python numbers."""
        return any(isinstance(x, NUMBERS) for x in self.leaves)

    def devices(self) -> list[jax.Device]:
        """Returns the devices of this process that hold arrays of the arguments."""
        arrays = (x for x in self.leaves if isinstance(x, jax.Array))
        return sorted({d for x in arrays for d in x.sharding.addressable_devices}, key=lambda d: d.id)

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """The leaves of `dynamic`."""
        return jax.tree.leaves(self.dynamic)

    def text(self) -> str:
        """Returns shapes and dtypes as text. If there are many, it has the names of arrays, and sums of parameters."""
        if self._shown is not None:
            return CallArguments(NONE, *self._shown(*self.args, **self.kwargs), self._parameters).text()
        texts = [_type_text(x) for x in self.leaves]
        if len(texts) > MOST_TYPES:
            names, given = self._parameters(), dict[str, list[Any]]()
            for number, x in enumerate(self.args):
                if number not in self._numbers:
                    given.setdefault(names[number] if number < len(names) else f"argument {number}", []).append(x)
            given |= {name: [x] for name, x in self.kwargs.items() if name not in self._names}
            texts = [text for name, xs in given.items() for text in _parameter_texts(name, xs)]
        static = [repr(self.args[number]) for number in sorted(self._numbers)]
        static += [f"{name}={self.kwargs[name]!r}" for name in sorted(self._names)]
        shown = (
            texts if len(texts) <= MOST_TYPES else [*texts[: MOST_TYPES - 1], f"... {len(texts) - MOST_TYPES + 1} more"]
        )
        return ", ".join(shown + static)


def _leaf_key(x: Any) -> Any:
    if isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer):
            raise SchedulerError(
                "an optimized function was called while JAX traces another one (jit, grad, vmap, scan): optimize the "
                "outer function, which is called with arrays, and call the plain one inside"
            )
        _arrays.add(type(x))
        return x.aval, _normalized(x.sharding, x.ndim), x.committed
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    if isinstance(x, NUMBERS):
        return type(x)
    raise TypeError(f"expected an array, found {type(x).__name__}")


@functools.lru_cache(1024)
def _normalized(given: Any, ndim: int) -> Any:
    """Returns a sharding, equal for specs that differ in trailing axes that are not divided."""
    if not isinstance(given, NamedSharding):
        return given
    spec = PartitionSpec(*given.spec, *(None,) * (ndim - len(given.spec)))
    return NamedSharding(given.mesh, spec, memory_kind=given.memory_kind)


def _parameter_texts(name: str, given: Sequence[Any]) -> list[str]:
    """Returns each array of a parameter with its name, or for more than `MOST_NAMED` their number and bytes."""
    leaves = [(jax.tree_util.keystr(path), x) for each in given for path, x in jax.tree.leaves_with_path(each)]
    if len(leaves) <= MOST_NAMED:
        return [f"{name}{path}: {_type_text(x)}" for path, x in leaves]
    size, units = sum(getattr(x, "nbytes", 0) for _, x in leaves), {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
    unit = next((unit for unit, n in units.items() if size >= n), "B")
    return [f"{name}: {len(leaves)} arrays ({size / units[unit]:.3g} {unit})"]


def _type_text(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__
