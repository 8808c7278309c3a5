"""The arguments of one call: the key of their compiled version, the dynamic part, and copies of donated arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core.errors import SchedulerError

Static = tuple[tuple[int, ...], tuple[str, ...]]
_NUMBERS = (bool, int, float, complex)
# Types of concrete arrays seen so far.
_arrays: set[type] = set()


class Arguments:
    """The arguments of one call of a jitted function.

    Args:
      static: Indices and names of the static arguments.
    """

    def __init__(self, static: Static, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        numbers, names = static
        self._static, self.args, self.kwargs = static, args, kwargs
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
        kinds = [(x.aval, x.sharding, x.committed) if type(x) in _arrays else _kind(x) for x in leaves]
        return tree, tuple(kinds), static

    def call(self, compiled: Any) -> Any:
        """Calls a compiled version with these arguments."""
        args, kwargs = self.dynamic
        return compiled(*args, **kwargs)

    def copied(self, donated: Sequence[bool]) -> Arguments:
        """Returns these arguments, with donated leaves of `dynamic` copied."""
        return self.changed(lambda x, number: _copy(x) if donated[number] else x) if any(donated) else self

    def changed(self, change: Callable[[Any, int], Any]) -> Arguments:
        """Returns these arguments, with each leaf of `dynamic` replaced by ``change(leaf, number)``."""
        leaves = [change(x, number) for number, x in enumerate(self._leaves)]
        args, kwargs = jax.tree.unflatten(jax.tree.structure(self.dynamic), leaves)
        rest = iter(args)
        whole = tuple(x if number in self._numbers else next(rest) for number, x in enumerate(self.args))
        return Arguments(self._static, whole, kwargs | {name: self.kwargs[name] for name in self._names})

    @property
    def numbers(self) -> bool:
        """Whether `dynamic` contains Python numbers."""
        return any(isinstance(x, _NUMBERS) for x in self._leaves)

    def devices(self) -> list[jax.Device]:
        """Returns the devices of this process that hold arrays of the arguments."""
        arrays = (x for x in self._leaves if isinstance(x, jax.Array))
        return sorted({d for x in arrays for d in x.sharding.addressable_devices}, key=lambda d: d.id)

    @functools.cached_property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.dynamic)

    def described(self) -> str:
        """Returns shapes and dtypes as text, abbreviated if there are many."""
        texts = [_typed(x) for x in self._leaves]
        static = [repr(self.args[number]) for number in sorted(self._numbers)]
        static += [f"{name}={self.kwargs[name]!r}" for name in sorted(self._names)]
        shown = texts if len(texts) <= 6 else [*texts[:5], f"... {len(texts) - 5} more"]
        return ", ".join(shown + static)


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer):
            raise SchedulerError(
                "an optimized function was called while JAX traces another one (jit, grad, vmap, scan): optimize the "
                "outer function, which is called with arrays, and call the plain one inside"
            )
        _arrays.add(type(x))
        return x.aval, x.sharding, x.committed
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    if isinstance(x, _NUMBERS):
        return type(x)
    raise TypeError(f"{type(x).__name__} is no array")


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _typed(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__
