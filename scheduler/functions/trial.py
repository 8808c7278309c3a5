"""Tries one call of a function with and without tuned kernels: compiles, compares, times, and keeps one version."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core import hardware, text
from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import CPU
from scheduler.core.status_line import StatusLine
from scheduler.core.text import seconds_text
from scheduler.dispatch.dispatch import Options
from scheduler.functions import ablation, comparison, interleaved, stored_decisions
from scheduler.functions.ablation import Lowered, Replaced
from scheduler.functions.in_place import InPlace
from scheduler.functions.interleaved import Seconds
from scheduler.functions.noise import with_noise
from search_spaces.checking import without_autotuning
from search_spaces.configuration import comparisons

# ------------------------------------------------------------------------------
# The arguments of one call: the key of their compiled version, the dynamic part, and copies of donated arrays.

Static = tuple[tuple[int, ...], tuple[str, ...]]
_NUMBERS = (bool, int, float, complex)
# Of many arguments, a report has this many texts, and the arrays of a parameter by name up to this number.
MOST_TYPES, MOST_NAMED = 6, 3
# Types of concrete arrays seen so far.
_arrays: set[type] = set()


class Arguments:
    """The arguments of one call of a jitted function.

    Args:
      static: Indices and names of the static arguments.
      parameters: Returns a name for each of `args`, as far as known; equal names are one parameter.
      shown: Returns the arguments that a report shows, from those of the call; None shows the latter.
    """

    def __init__(
        self,
        static: Static,
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
        kinds = [(x.aval, x.sharding, x.committed) if type(x) in _arrays else _leaf_key(x) for x in leaves]
        return tree, tuple(kinds), static

    def call(self, compiled: Any) -> Any:
        """Calls a compiled version with these arguments."""
        args, kwargs = self.dynamic
        return compiled(*args, **kwargs)

    def copied(self, donated: Sequence[bool]) -> Arguments:
        """Returns these arguments, with donated leaves of `dynamic` copied."""
        if not any(donated):
            return self
        leaves = [_copy(x) if given_up else x for x, given_up in zip(self.leaves, donated, strict=True)]
        args, kwargs = jax.tree.unflatten(jax.tree.structure(self.dynamic), leaves)
        rest = iter(args)
        whole = tuple(x if number in self._numbers else next(rest) for number, x in enumerate(self.args))
        return Arguments(self._static, whole, kwargs | {name: self.kwargs[name] for name in self._names})

    @property
    def numbers(self) -> bool:
        """Whether `dynamic` contains Python numbers."""
        return any(isinstance(x, _NUMBERS) for x in self.leaves)

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
            return Arguments(((), ()), *self._shown(*self.args, **self.kwargs), self._parameters).text()
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
        return x.aval, x.sharding, x.committed
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    if isinstance(x, _NUMBERS):
        return type(x)
    raise TypeError(f"expected an array, found {type(x).__name__}")


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _parameter_texts(name: str, given: Sequence[Any]) -> list[str]:
    """Returns each array of a parameter with its name, or for more than `MOST_NAMED` their number and bytes."""
    leaves = [(jax.tree_util.keystr(path), x) for each in given for path, x in jax.tree.leaves_with_path(each)]
    if len(leaves) <= MOST_NAMED:
        return [f"{name}{path}: {_type_text(x)}" for path, x in leaves]
    return [f"{name}: {len(leaves)} arrays ({_size_text(sum(getattr(x, 'nbytes', 0) for _, x in leaves))})"]


def _size_text(size: int) -> str:
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
    name = next((name for name, unit in units.items() if size >= unit), "B")
    return f"{size / units[name]:.3g} {name}"


def _type_text(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


# Reasons to keep a version without timing.
XLA_IS_USED = "XLA's version is used"
SEVERAL_PROCESSES = (
    f"{XLA_IS_USED}: each process of a job would decide for itself, and processes could differ: give them one plan "
    "(scheduler.plan)"
)
NOTHING_REPLACED = f"{XLA_IS_USED}: no kernel is selected for its matmuls, grouped products, attention or row programs"
NONE_ON_A_CPU = f"{XLA_IS_USED}: there is no kernel for a CPU, and other changes are not tried there"
PLANNED = "from the plan, identically in all processes of the job"
UNTIMED = "not timed"
# What a report says of equations on a CPU, in the form of `Lowered.left`.
LEFT_ON_A_CPU = "products: no kernel for a CPU"


@dataclasses.dataclass(frozen=True)
class Decided:
    """The version used for some arguments, and the reason.

    Attributes:
      function, arguments: The function's name, and its arguments as text.
      compiled: The tuned version (`jax.stages.Compiled`) if it is kept; None if XLA's version is kept.
      reason: The decision as a sentence: what is used, and what it gains or why.
      replaced: Kernels of the tuned version, whichever version was kept.
      left: Why other equations are left to XLA -> number of kinds of such equations.
      changes: Other changes of the tuned version, which need no kernel, as text.
      plain, tuned: Seconds per call, from the same rounds; None if nothing was timed.
      plain_bytes, tuned_bytes: Peak device memory of each version; None if nothing was compared, or if XLA does not
        report it.
    """

    function: str
    arguments: str
    compiled: Any
    reason: str
    replaced: tuple[Replaced, ...] = ()
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain: Seconds | None = None
    tuned: Seconds | None = None
    plain_bytes: int | None = None
    tuned_bytes: int | None = None
    changes: tuple[str, ...] = ()

    @property
    def kept(self) -> str:
        """The version used: "tuned" or "plain"."""
        return "plain" if self.compiled is None else "tuned"

    def __str__(self) -> str:
        lines = [f"{self.function}({self.arguments})", f"  {self.reason}"]
        used = "by a kernel" if self.kept == "tuned" else "tried, and not used"
        changed = "by XLA, changed" if self.kept == "tuned" else "tried, and not used"
        if self.plain is not None and self.tuned is not None:
            lines.append(f"  {_times_text(self.plain, self.tuned, self._tried)}")
        if self.plain_bytes is not None and self.tuned_bytes is not None:
            lines.append(f"  peak memory: {self._tried} {_mib(self.tuned_bytes)}, XLA {_mib(self.plain_bytes)}")
        lines += [f"  {used}: {each}" for each in self.replaced]
        lines += [f"  {changed}: {each}" for each in self.changes]
        return "\n".join(lines + [f"  {each}" for each in _left_texts(self.left)])

    @property
    def _tried(self) -> str:
        return f"with {_used_text(self.replaced, self.changes)}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A jitted function and the arguments to try it with.

    Attributes:
      seconds: Maximum time spent on timing. None keeps the tuned version without timing if its results agree.
      status: Shows what the decision waits for.
    """

    function: str
    jitted: Any
    given: Arguments
    options: Mapping[str, Options]
    seconds: float | None
    status: StatusLine = dataclasses.field(default_factory=StatusLine)

    @comparisons()
    def decide(self) -> Decided:
        """Decides which version to keep.

        Raises:
          CacheMiss: A matmul or attention call has no record and the policy is "error".
          SchedulerError: The call is part of a trace.
          Exception: Any error raised while tracing the function.
        """
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            raise SchedulerError(
                "an optimized function was called while JAX traces another one: optimize the outer function"
            )
        with self.status.shown(f"optimize({self.function})"):
            return self._decide()

    def _decide(self) -> Decided:
        self.status.step("tracing")
        traced = self.jitted.trace(*self.given.args, **self.given.kwargs)
        several = jax.process_count() > 1
        if several and any(options.plan is None for options in self.options.values()):
            return self._decision(SEVERAL_PROCESSES)
        if effects := getattr(traced.jaxpr, "effects", ()):
            kinds = ", ".join(sorted({type(effect).__name__ for effect in effects}))
            return self._decision(
                f"{XLA_IS_USED}: the function has side effects ({kinds}), which would occur several times if both "
                "versions were tried"
            )
        try:
            self.status.step("selecting kernels")
            if self._on_a_cpu_by_default():
                lowered = ablation.lower_with_kernels(traced, self.options)
                if not lowered.replaced:
                    left = {LEFT_ON_A_CPU: sum(lowered.left.values())} if lowered.left else {}
                    return self._decision(NONE_ON_A_CPU, dataclasses.replace(lowered, left=left))
            key = None if several else self._key(traced)
            if key is not None and (found := self._recalled(key, traced)) is not None:
                return found
            lowered, compiled, noisy = self._compiled(traced, compared=not several)
            if compiled is None:
                return self._decision(NOTHING_REPLACED, lowered)
            if several:
                return self._uses(PLANNED, lowered, compiled)
            return self._try_both(key, lowered, compiled, noisy, traced)
        except SchedulerError:
            raise
        except Exception as error:  # falls back to XLA's version, which raises any error of its own
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return self._fall_back(f"trying the tuned version failed: {cause}")

    @comparisons()
    def lower(self) -> Any:
        """Lowers the version with all kernels (`jax.stages.Lowered`)."""
        traced = self.jitted.trace(*self.given.args, **self.given.kwargs)
        return ablation.lower_with_kernels(traced, self.options, regions_on=self._platform()).lowered

    def _on_a_cpu_by_default(self) -> bool:
        """Returns whether only a record can name a kernel: on a CPU, without backends or a plan."""
        named = any(each.backends is not None or each.plan is not None for each in self.options.values())
        return not named and self._devices()[0].platform == CPU.platform

    def _platform(self) -> str | None:
        """Returns the platform of the call; None if it runs on several devices, between which XLA divides it."""
        devices = self._devices()
        return hardware.target_of(devices[0]).platform if len(devices) == 1 else None

    def _devices(self) -> list[jax.Device]:
        return self.given.devices() or jax.local_devices()[:1]

    def _key(self, traced: Any) -> str | None:
        return stored_decisions.key_of(traced.lower(), self.options.values(), self._devices(), self.seconds is None)

    def _recalled(self, key: str, traced: Any) -> Decided | None:
        """Returns the decision of an earlier process, if the same kernels would run; only its version is compiled."""
        if (known := stored_decisions.find(key)) is None:
            return None
        lowered = ablation.lower_with_kernels(traced, self.options, regions_on=self._platform(), compared=False)
        if stored_decisions.digest(lowered.lowered.as_text()) != known.tuned_text:
            return None
        self.status.step("compiling the tuned version")
        compiled = lowered.lowered.compile() if known.kept == "tuned" else None
        return self._decision(f"{known.reason} (decided on {known.date})", lowered, compiled, **known.measured)

    def _compiled(self, traced: Any, *, compared: bool) -> tuple[Lowered, Any, Any]:
        """Lowers and compiles the tuned version, without the kernels that disagree with their equations in place.

        Returns:
          The lowered and the compiled version, and the plain version with rounding noise, which takes a seed and the
          leaves of the arguments. None stands for versions that are not needed.
        """
        platform, refused = self._platform(), dict[Any, str]()
        options = without_autotuning(jax.default_backend())
        while True:
            lower = functools.partial(ablation.lower_with_kernels, traced, self.options, regions_on=platform)
            lowered = lower(refused=refused)
            if not lowered.replaced and not lowered.changes:
                return lowered, None, None
            self.status.step("compiling the tuned version")
            if not compared:
                return lowered, lowered.lowered.compile(), None
            in_place = InPlace()
            observed = lower(refused=refused, in_place=in_place).lowered
            products = comparison.products_rounding(each.problem for each in lowered.replaced)
            noisy = jax.jit(with_noise(traced.jaxpr, products), compiler_options=options).lower(0, *self.given.leaves)
            with concurrent.futures.ThreadPoolExecutor() as beside:  # XLA compiles without the interpreter's lock
                beside.submit(traced.lower().compile)  # JAX finds this program when the plain version is called
                compiled, with_noise_compiled = (beside.submit(each.compile) for each in (lowered.lowered, noisy))
                compared_in_place = beside.submit(observed.compile, compiler_options=options)
            wrong = self._disagreements(compared_in_place, in_place, traced)
            if not wrong:
                return lowered, compiled.result(), with_noise_compiled.result()
            for reason in wrong.values():
                self._warn(f"a kernel is not used: {reason}")
            refused |= wrong
            self.status.step("selecting kernels")

    def _disagreements(
        self, observed: concurrent.futures.Future[Any], in_place: InPlace, traced: Any
    ) -> Mapping[Any, str]:
        """Runs the function with comparisons once. Returns the kernels that disagree with their equations -> how."""
        try:
            compiled = observed.result()
            self.status.step("comparing each kernel with its equations")
            jax.block_until_ready(self.given.copied(_donated(traced)).call(compiled))
        except jax.errors.JaxRuntimeError:  # equations in float32 beside the function may need too much memory
            return {}
        return in_place.refusals()

    def _try_both(self, key: str | None, lowered: Lowered, compiled: Any, noisy: Any, traced: Any) -> Decided:
        donated = _donated(traced)

        def plain() -> Any:
            return self._plain(self.given.copied(donated))

        def tuned() -> Any:
            return self.given.copied(donated).call(compiled)

        self.status.step("comparing the results of both versions")
        expected = jax.block_until_ready(plain())
        if wrong := comparison.disagreement(expected, tuned(), lambda seed: noisy(seed, *self.given.leaves)):
            return self._fall_back(f"the tuned version computed different results: {wrong}", lowered)
        del expected
        memory = {"plain_bytes": peak_bytes(traced.lower().compile()), "tuned_bytes": peak_bytes(compiled)}
        if self.seconds is None:
            return self._stored(key, lowered, self._uses(UNTIMED, lowered, compiled, **memory))
        self.status.step("timing both versions")
        runs = {"plain": plain, "tuned": tuned}
        times = interleaved.time_interleaved(runs, seconds=self.seconds, devices=self.given.devices())
        speed = interleaved.speed_text(times["tuned"], times["plain"])
        if interleaved.is_faster(times["tuned"], times["plain"]):
            return self._stored(key, lowered, self._uses(speed, lowered, compiled, **times, **memory))
        tried = _used_text(lowered.replaced, lowered.changes)
        reason = f"{XLA_IS_USED}: no sure gain (the version with {tried} is {speed})"
        return self._stored(key, lowered, self._decision(reason, lowered, **times, **memory))

    def _stored(self, key: str | None, lowered: Lowered, decided: Decided) -> Decided:
        """Stores a decision for later processes and returns it."""
        if key is not None:
            names = ("plain", "tuned", "plain_bytes", "tuned_bytes")
            measured = {name: x for name in names if (x := getattr(decided, name)) is not None}
            text = stored_decisions.digest(lowered.lowered.as_text())
            stored_decisions.put(key, text, decided.kept, decided.reason, measured)
        return decided

    def _plain(self, given: Arguments) -> Any:
        return self.jitted(*given.args, **given.kwargs)

    def _decision(self, reason: str, lowered: Lowered | None = None, compiled: Any = None, **measured: Any) -> Decided:
        replaced, left = (lowered.replaced, lowered.left) if lowered else ((), {})
        changes = lowered.changes if lowered else ()
        return Decided(self.function, self.given.text(), compiled, reason, replaced, left, changes=changes, **measured)

    def _uses(self, gain: str, lowered: Lowered, compiled: Any, **measured: Any) -> Decided:
        used = _used_text(lowered.replaced, lowered.changes)
        memory = _memory_text(measured.get("plain_bytes"), measured.get("tuned_bytes"))
        return self._decision(f"uses {used}: {gain}{memory}", lowered, compiled, **measured)

    def _fall_back(self, reason: str, lowered: Lowered | None = None) -> Decided:
        reason = f"{XLA_IS_USED}: {reason}"
        self._warn(reason)
        return self._decision(reason, lowered)

    def _warn(self, message: str) -> None:
        self.status.erase()
        text.warn_safely(f"{self.function}: {message}")


def _donated(traced: Any) -> list[bool]:
    """Returns for each leaf of the arguments whether the call donates it."""
    return [leaf.donated for leaf in jax.tree.leaves(traced.args_info)]


# ------------------------------------------------------------------------------
# The words of a report.


def _used_text(replaced: Sequence[Replaced], changes: Sequence[str]) -> str:
    """Returns "14 kernels", "1 kernel and 2 other changes" or "2 changes without a kernel"."""
    counted = {"kernel": len(replaced), "other change" if replaced else "change": len(changes)}
    used = " and ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counted.items() if n)
    return used if replaced else f"{used} without a kernel"


def _times_text(plain: Seconds, tuned: Seconds, tried: str) -> str:
    interval = interleaved.interval_text(tuned, plain)
    return f"time of a call: {tried} {seconds_text(tuned.median_s)}, XLA {seconds_text(plain.median_s)}; {interval}"


def _memory_text(plain: int | None, tuned: int | None) -> str:
    """Returns ", 40 % less memory"; "" if the difference is below 1 %, or unknown."""
    share = round(100 * (tuned / plain - 1)) if plain and tuned else 0
    return f", {abs(share)} % {'less' if share < 0 else 'more'} memory" if share else ""


def _left_texts(left: Mapping[str, int]) -> list[str]:
    """Returns a line for all reasons that differ in numbers alone."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for reason, kinds in left.items():
        groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", reason), []).append((reason, kinds))
    lines = []
    for group in groups.values():
        what, _, why = group[0][0].partition(": ")
        kinds = sum(kinds for _, kinds in group)
        stay = f"{kinds} kinds of {what} stay" if kinds > 1 else f"1 kind of {what} stays"
        lines.append(f"{stay} with XLA: {'for example, ' if len(group) > 1 else ''}{why}")
    return lines


def peak_bytes(compiled: Any) -> int | None:
    """Returns the peak device memory of a compiled function, arguments and results included; None if not reported."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    given, made = found.argument_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes
    return int(given + made + found.temp_size_in_bytes)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
