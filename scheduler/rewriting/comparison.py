"""Compares a function, and its regions, with tuned versions of them: whether they agree up to rounding."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from scheduler.measure.verification import rounded_differently
from scheduler.rewriting.noise import FINEST
from search_spaces import checking, fingerprint, lowering_compat, partitioning_compat, recognise
from search_spaces.checking import VALUE_KINDS, without_autotuning
from search_spaces.configuration import measurements
from search_spaces.problem import Problem
from search_spaces.recognise import Node, Region, Value

T = TypeVar("T")

# A tuned version may be wrong by this factor of what rounding does to the plain one.
FACTOR = 3.0
# Relative rounding of matmuls with coarser arithmetic than their operands.
PRODUCTS = {"tf32": 2.0**-10, "bf16_3x": 2.0**-16}
# The largest error of one element may be this factor of the one in the root mean square, relative to the largest one.
PEAK = 8.0
# A region of several stages hands on rounded results. Flash attention's backward pass, for example, reads the rounded
# output, while the equations of a softmax keep its row sums in float32. In a GPT-2 with keys of a large mean, dq then
# has an error of 1.3 %, and by the equations one of 0.2 % (cuDNN and this package's kernel, H200). On the function's
# own values, such a region may be wrong by `LIBRARY_FACTOR` times the error of the library of its operations. That
# error counts up to `MOST_OF_LIBRARY`: if the region was recognised wrongly, it is larger.
LIBRARY_FACTOR, MOST_OF_LIBRARY = 1.5, 0.03
# Runs with noise: the largest change among them counts.
NOISY_RUNS = 3
# Elements of a result that may change as if their sign had been lost, at most an eighth of them. The update of a sign
# optimizer is such a result. If no element flips in three runs, at most 2.3 flips are expected at 99.9 % confidence,
# and then at most 8 occur with the same confidence (Poisson).
FLIPS = 8

Errors = npt.NDArray[np.float64]


def products_rounding(problems: Iterable[Problem]) -> float:
    """Returns the coarsest relative rounding of the products of these problems."""
    return max((PRODUCTS.get(problem.arithmetic, FINEST) for problem in problems), default=FINEST)


def least_rounding(problems: Iterable[Problem]) -> float:
    """Returns the relative error that a computation of these problems may have: a quarter of its coarsest unit."""
    problems = list(problems)
    dtypes = {s.dtype for problem in problems for s in (*problem.operands(), *problem.results())}
    return max(products_rounding(problems), *(_unit(dtype) / 4 for dtype in dtypes))


# ------------------------------------------------------------------------------
# A whole function: its results may change as they do with noise at each product and each cast.


def disagreement(expected: Any, actual: Any, noisy: Callable[[int], Any]) -> str | None:
    """Describes where `actual` differs from `expected` by more than rounding; returns None if it does not.

    A result may differ by one unit in its last place (at least `FINEST`) in the root mean square, and by `PEAK` units
    in one element. The first is relative to the root mean square of the result, the second to its largest element.
    Elements that are not finite must match. A result may consist of rounding errors alone, such as a gradient that is
    zero, the sign of such a gradient, or the index of the larger of two equal numbers. It may therefore differ by
    `FACTOR` times its largest change in `NOISY_RUNS` runs with noise, and `FLIPS` of its elements by up to twice its
    largest element.

    Args:
      noisy: Computes the results with noise, for a seed. Called only if a result exceeds the first tolerance.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True))
    off = [_off(right, got) for right, got in pairs]
    least = [_unit(right.dtype) * np.array([1.0, PEAK, 0.0]) for right, _ in pairs]
    wrong = [i for i, _ in enumerate(pairs) if not _within(off[i], least[i])]
    allowed = {i: least[i] for i in wrong}
    for seed in range(NOISY_RUNS) if wrong else ():
        moved = jax.tree.leaves(noisy(seed))
        allowed = {i: np.maximum(x, FACTOR * _off(pairs[i][0], moved[i])) for i, x in allowed.items()}
    for i, x in allowed.items():
        right, got = pairs[i]
        if not _within(off[i], x) and not _within(_off(right, got, min(FLIPS, right.size // 8)), x):
            return _difference_text(f"result{names[i]} {_type_text(right)}", right.dtype, off[i], x)
    return None


def compile_errors(results: Iterable[Any], beside: concurrent.futures.Executor) -> None:
    """Compiles what `disagreement` runs for these results, so that JAX finds the programs."""
    for shape, dtype in {(x.shape, x.dtype) for x in results if x.size and jnp.issubdtype(x.dtype, jnp.inexact)}:
        struct = jax.ShapeDtypeStruct(shape, dtype)
        beside.submit(_errors.lower(struct, struct, 0).compile)


def _unit(dtype: Any) -> float:
    return max(float(jnp.finfo(dtype).eps), FINEST) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _within(off: Any, allowed: Any) -> bool:
    return bool(np.all(off <= allowed))  # False for NaN


@measurements()
def _off(right: Any, got: Any, flips: int = 0) -> Errors:
    """Returns the relative RMS error, the relative largest error, and the number of mismatched non-finite elements.

    Args:
      flips: Number of elements left out: those with the largest errors, of at most twice the largest element.
    """
    if not right.size or right.dtype == jax.dtypes.float0:  # float0: the derivative with respect to an integer
        return np.zeros(3)
    if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
        right, got = jax.random.key_data(right), jax.random.key_data(got)
    return np.asarray(jax.device_get(_errors(right, got, flips)), np.float64)  # as in `compile_errors`


@functools.partial(jax.jit, static_argnums=2)
def _errors(right: jax.Array, got: jax.Array, flips: int = 0) -> jax.Array:
    if not jnp.issubdtype(right.dtype, jnp.inexact):
        share = (right != got).mean(dtype=jnp.float32)
        return jnp.array([share, share, 0.0])
    wide = functools.partial(jnp.asarray, dtype=jnp.promote_types(right.dtype, jnp.float32))
    right, got = wide(right), wide(got)
    finite = jnp.isfinite(right)
    same = (right == got) | (jnp.isnan(right) & jnp.isnan(got))
    unlike = jnp.where(finite, ~jnp.isfinite(got), ~same).sum()
    size = jnp.where(finite, jnp.abs(right), 0.0)
    # Dividing by the largest element keeps squares from overflowing or underflowing.
    largest = size.max()
    scale = jnp.where(largest > 0, largest, 1.0)
    error = jnp.where(finite & jnp.isfinite(got), jnp.abs(right - got), 0.0) / scale
    if flips:
        _, where = lax.top_k(jnp.where(error <= 2 + 1 / 16, error, -1.0).ravel(), flips)
        error = error.ravel().at[where].set(0.0)
    mean = jnp.sqrt((error**2).mean()) / jnp.where(largest > 0, jnp.sqrt(((size / scale) ** 2).mean()), 1.0)
    return jnp.array([mean, error.max(), unlike.astype(mean.dtype)])


def _type_text(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _difference_text(name: str, dtype: Any, off: Any, allowed: Any) -> str:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return f"{off[0]:.2%} of the elements of {name} differ (allowed: {allowed[0]:.2%})"
    if off[2] > allowed[2]:
        return f"{off[2]:.0f} elements of {name} are finite in one of them alone, or other infinities"
    return (
        f"{name} differs by {off[0]:.2g} of its size in the mean square (allowed: {allowed[0]:.2g}) "
        f"and by {off[1]:.2g} of its largest element (allowed: {allowed[1]:.2g})"
    )


# ------------------------------------------------------------------------------
# A region: its results in float32 are the reference, and the errors of the plain version are the measure.


def errors(
    tuned: Sequence[Any],
    plain: Sequence[Any],
    wide: Sequence[Any],
    others: Sequence[Sequence[Any]],
    libraries: Sequence[Any] = (),
) -> jax.Array:
    """Returns the errors of the results of two versions as ``[results, 9]``, to be read by `verdict`.

    Args:
      wide: the results in float32.
      others: the results of other versions that are as good as the plain one.
      libraries: the results by the libraries of the tuned operations, or none.
    """
    rows = []
    for i, (got, right, exact) in enumerate(zip(tuned, plain, wide, strict=True)):
        theirs = [_errors(right, other[i]) for other in others] if right.size else []
        of_library = _errors(exact, libraries[i]) if libraries and right.size else jnp.zeros(3)
        if not right.size:
            rows.append(jnp.zeros(9))
        elif not jnp.issubdtype(right.dtype, jnp.inexact):
            rows.append(jnp.concatenate([_errors(right, got), functools.reduce(jnp.maximum, theirs), jnp.zeros(3)]))
        else:
            own = [_errors(exact, got)[:2], _errors(right, got)[2:]]
            rows.append(
                jnp.concatenate([*own, functools.reduce(jnp.maximum, [_errors(exact, right), *theirs]), of_library])
            )
    return jnp.stack(rows)


def verdict(found: Any, results: Sequence[Any], least: float, library_factor: float = 0.0) -> str | None:
    """Describes the first result with an error above `FACTOR` times that of the plain version; None if none has.

    The same holds for the number of elements that are finite in one version alone: where a sum of huge terms cancels,
    its rounding decides whether its square overflows.

    Args:
      found: from `errors`.
      results: with shapes and dtypes.
      least: the error that is allowed in any case, from `least_rounding`.
      library_factor: the error may be so many times that of the libraries in the root mean square, and twice that in
        one element.
    """
    for i, (row, x) in enumerate(zip(np.asarray(found, np.float64), results, strict=True)):
        off, plain, of_library = np.split(row, 3)
        unit = max(_unit(x.dtype) / 4, least) if _unit(x.dtype) else 0.0
        allowed = np.maximum(FACTOR * plain, [unit, PEAK * unit, 0.0])
        if of_library[0] <= MOST_OF_LIBRARY:
            allowed = np.maximum(allowed, of_library * [library_factor, 2 * library_factor, 0.0])
        if not _within(off, allowed):
            return _difference_text(f"result {i} {_type_text(x)}", x.dtype, off, allowed)
    return None


# ------------------------------------------------------------------------------
# Compares a region with the tuned calls that replace it: two random draws, and special operands.

# (operation, problem, params, operands) -> results of a tuned call.
TunedCall = Callable[..., Any]

# Random operands, with their seeds, and operands with squares that overflow or underflow float32 and bfloat16.
DRAWS = {"random": 0, "other random": 1}
SCALES = {"huge": 2.0**80, "minute": 2.0**-80}

DISAGREE = "its kernels disagree with its equations"
_checked: dict[Any, str | None] = {}


def region_disagreement(
    region: Region, calls: Sequence[TunedCall], key: Any = None, differentiable: Sequence[TunedCall] = ()
) -> str | None:
    """Says how tuned calls disagree with the equations of a region by more than rounding; None if they do not.

    Both are computed once for each kind of region on this device, for inputs of the same shapes.

    Args:
      key: what else the calls depend on, such as their schedules.
      differentiable: calls for comparing gradients with those of the equations, too. Other schedules than those of
        `calls` may run them: this compares the meaning of gradients.
    """
    found = RegionComparison(region)
    kind = found.kind, key, bool(differentiable)
    return checked(
        kind,
        lambda: outside_of_traces(lambda: found.with_calls(calls).disagreement() or found.of_gradients(differentiable)),
    )


def checked(kind: Any, disagreement: Callable[[], str | None]) -> str | None:
    """Says how kernels disagree with their equations, by a comparison that runs once for each kind; None if not."""
    if kind not in _checked:
        wrong = disagreement()
        _checked[kind] = wrong and f"{DISAGREE}: {wrong}"
    return _checked[kind]


def outside_of_traces(run: Callable[[], T]) -> T:
    if not isinstance(jnp.zeros(()), jax.core.Tracer):
        return run()
    with concurrent.futures.ThreadPoolExecutor(1) as outside:  # a trace belongs to its thread
        return outside.submit(run).result()


class Comparison:
    """Compares tuned calls with equations, in one compiled program. The equations in float32 are the reference.

    Args:
      plain, wide, tuned: The functions, which return lists: the equations, the equations in float32, the calls.
      operands, results: Their shapes and dtypes.
      least: From `least_rounding`.
      special: The kinds of special operands on which the results must agree.
      coarse: The equations with rounded operands of products (`coarsely`), if that changes anything.
      library: The calls by the libraries of their operations, if they hand on rounded results.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        wide: Callable[..., Any],
        tuned: Callable[..., Any],
        operands: Sequence[Any],
        results: Sequence[Any],
        least: float,
        special: Sequence[str] = (),
        coarse: Callable[..., Any] | None = None,
        library: Callable[..., Any] | None = None,
    ) -> None:
        self._plain, self._wide, self._tuned, self._coarse, self._library = plain, wide, tuned, coarse, library
        self._operands, self._results, self._least, self._special = operands, results, least, special
        self._compiled: concurrent.futures.Future[Any] | None = None
        self._drawings = list[Drawing]()

    @partitioning_compat.empty_mesh()
    def compile(self, beside: concurrent.futures.Executor) -> None:
        """Lowers the programs now, unless they are, and compiles them beside."""
        if self._compiled:
            return
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._operands]
        options = without_autotuning(jax.default_backend())
        run = jax.jit(lambda *own: self._errors(own, self._tuned(*own)), compiler_options=options)
        self._compiled = beside.submit(run.lower(*structs).compile)
        self._drawings = drawings(structs, beside, special=bool(self._special))

    def on(self, *operands: Any) -> str | None:
        """Describes how the results for these operands disagree; None if they do not."""
        return self._verdict(operands, self._least, LIBRARY_FACTOR)

    @partitioning_compat.empty_mesh()
    def disagreement(self) -> str | None:
        """Describes how the results disagree for random or special operands; None if they do not."""
        for kind in (*DRAWS, *self._special):
            operands = self._drawn(kind)
            # By luck, the plain version rounds some special operands exactly.
            least = self._least if kind in DRAWS else 4 * self._least
            wrong = self._verdict(operands, least)
            if wrong and kind not in DRAWS:
                # Of 0 times infinity XLA makes 0 where it fuses a mask, but not if equations run one by one.
                found = self._errors(operands, jax.jit(self._tuned)(*operands))
                wrong = verdict(found, self._results, least) and wrong
            if wrong:
                return f"{wrong} ({kind} operands)"
        return None

    def _errors(self, operands: Sequence[Any], tuned: Sequence[Any]) -> jax.Array:
        # Without the barrier, XLA drops a rounding if its result is widened at once.
        tuned, right = lax.optimization_barrier((list(tuned), list(self._plain(*operands))))
        # Narrow dtypes round more than the operands of their float32 version.
        narrow = all(_unit(x.dtype) for x in right)
        moved = [x if narrow and is_narrow(x.dtype) else rounded_differently(x, i) for i, x in enumerate(operands)]
        others = [self._plain(*moved), *([self._coarse(*operands)] if self._coarse else [])]
        libraries = self._library(*operands) if self._library else ()
        return errors(tuned, right, self._wide(*operands), others, libraries)

    def _verdict(self, operands: Sequence[Any], least: float, library_factor: float = 0.0) -> str | None:
        compared = self._program()
        placed = map(jax.device_put, operands, compared.input_shardings[0])  # on all devices of a mesh
        return verdict(compared(*placed), self._results, least, library_factor)

    def _program(self) -> Any:
        if self._compiled is None:
            with concurrent.futures.ThreadPoolExecutor() as beside:
                self.compile(beside)
        assert self._compiled is not None
        return self._compiled.result()

    def _drawn(self, kind: str) -> Sequence[jax.Array]:
        self._program()
        index = VALUE_KINDS.index(kind) if kind in VALUE_KINDS else -1
        seed, scale = 10 * DRAWS.get(kind, 0), SCALES.get(kind, 1.0)
        return [draw(seed + i, index, scale) for i, draw in enumerate(self._drawings)]


class RegionComparison:
    """The equations of a region as functions of its roots.

    Attributes:
      kind: Equal for regions with equal equations and problems.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        # From the roots to the inputs and results, in order.
        self._nodes = recognise.equations_between((*region.inputs, *region.results), region.roots)
        text = recognise.program_text(self._nodes, region.roots, region.results)
        self.kind = text, tuple(stage.problem for stage in region.stages)
        self._results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in region.results)
        self._least = least_rounding(stage.problem for stage in region.stages)

    def _evaluated(self, roots: Sequence[Any], results: Sequence[Value], *compute: Any) -> list[Any]:
        known = dict(zip(map(id, self._region.roots), roots, strict=True))
        return recognise.evaluate(self._nodes, known, results, *compute)

    def _plain(self, *roots: Any) -> list[Any]:
        return self._evaluated(roots, self._region.results)

    def _coarse(self, *roots: Any) -> list[Any]:
        return self._evaluated(roots, self._region.results, coarsely)

    def _wide(self, *roots: Any) -> list[Any]:
        return self._evaluated([*map(widened, roots)], self._region.results, in_float32)

    def _tuned(self, calls: Sequence[TunedCall]) -> Callable[..., list[Any]]:
        def run(*roots: Any) -> list[Any]:
            values = iter(self._evaluated(roots, self._region.inputs))
            handed_on, results = None, list[Any]()
            for stage, call in zip(self._region.stages, calls, strict=True):
                found, handed_on = stage.run(call, handed_on, *(next(values) for _ in stage.inputs))
                results += found
            return results

        return run

    def with_calls(self, calls: Sequence[TunedCall], libraries: Sequence[TunedCall] = ()) -> Comparison:
        """Returns the comparison of the region with calls of its stages.

        Args:
          libraries: The same calls by the libraries of their operations.
        """
        tuned, roots = self._tuned(calls), self._region.roots
        coarse = self._coarse if mixes_dtypes(self._nodes) else None
        library = self._tuned(libraries) if len(libraries) > 1 else None
        of = self._results, self._least, self._special()
        return Comparison(self._plain, self._wide, tuned, roots, *of, coarse, library)

    def of_gradients(self, calls: Sequence[TunedCall]) -> str | None:
        """Describes how the gradients of the region and of calls disagree; None if they do not, or without calls."""
        if not calls:
            return None
        plain, wide, tuned = (_gradients_of(f, self._results) for f in (self._plain, self._wide, self._tuned(calls)))
        of = [x for x in self._region.roots if jnp.issubdtype(x.dtype, jnp.inexact)]
        try:
            wrong = Comparison(plain, wide, tuned, self._region.roots, of, self._least).disagreement()
        except jax.errors.JaxRuntimeError:  # the gradients of the equations need more memory than the values
            return None
        return None if wrong is None else f"gradients: {wrong}"

    def _special(self) -> Sequence[str]:
        """Returns the kinds of special operands on which the results must agree.

        A kernel may compute float16 in float32, and then overflows later. Where an operation excludes infinities, as
        attention does, a softmax of large logits would magnify their rounding.
        """
        dtypes = {x.dtype for x in (*self._region.roots, *(x for node in self._nodes for x in node.results))}
        if any(jnp.issubdtype(x, jnp.floating) and float(jnp.finfo(x).max) < max(SCALES.values()) for x in dtypes):
            return ()
        common = set.intersection(*(set(stage.problem.special()) for stage in self._region.stages))
        infinite = "inf" in common
        return [kind for kind in VALUE_KINDS if kind in common and (infinite or kind != "large")] + [*SCALES] * infinite


@partitioning_compat.empty_mesh()
def of_product(
    problem: Problem, call: Callable[..., Sequence[Any]], primitive: Any, params: Any, *args: Any
) -> Comparison:
    """Returns the comparison of a single equation with a call that takes its arrays."""

    def plain(*own: Any) -> list[Any]:
        return [primitive.bind(*own, **params)]

    def wide(*own: Any) -> list[Any]:
        return [primitive.bind(*map(widened, own), **wide_params(params))]

    return Comparison(plain, wide, call, args, jax.eval_shape(plain, *args), least_rounding([problem]))


def _gradients_of(run: Callable[..., list[Any]], results: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the gradients of results by floating-point arguments, for random cotangents of these dtypes."""

    def gradients(*arrays: Any) -> list[Any]:
        found, back = jax.vjp(run, *arrays)
        drawn = [normal(x, 100 + i) for i, x in enumerate(results)]
        return [
            x
            for x in back([x.astype(of.dtype) for x, of in zip(drawn, found, strict=True)])
            if x.dtype != jax.dtypes.float0
        ]

    return gradients


# ------------------------------------------------------------------------------
# Operands of comparisons, drawn by compiled programs: one for each kind of operand, which all comparisons share.


# ``draw(seed, kind, scale)`` returns an operand; `kind` is the index in `VALUE_KINDS`, or -1.
Drawing = Callable[[int, int, float], jax.Array]

_compiled: dict[Any, concurrent.futures.Future[Any]] = {}


def drawings(structs: Sequence[Any], beside: concurrent.futures.Executor, *, special: bool) -> list[Drawing]:
    """Returns functions that draw these operands of a comparison. New programs are compiled by the executor.

    Args:
      special: Whether operands with special values are drawn, too.
    """
    changes = {number: rest for number, *rest in checking.changed(structs, integers=False)} if special else {}
    return [_drawing(x, number, changes.get(number), beside) for number, x in enumerate(structs)]


def _drawing(x: Any, number: int, changes: Sequence[bool] | None, beside: concurrent.futures.Executor) -> Drawing:
    first, in_offset = changes or (False, False)
    kind = x.shape, x.dtype, changes is not None, first
    if kind not in _compiled:
        program = jax.jit(functools.partial(_drawn, x, changes is not None, first))
        _compiled[kind] = beside.submit(program.lower(np.int32(0), np.int32(0), np.uint32(0), np.float32(1)).compile)

    def draw(seed: int, index: int, scale: float) -> jax.Array:
        own = -1 if index == VALUE_KINDS.index("offset") and not in_offset else index
        drawn: jax.Array = _compiled[kind].result()(np.int32(seed), np.int32(own), np.uint32(number), np.float32(scale))
        return drawn

    return draw


def _drawn(
    x: Any, changes: bool, first: bool, seed: jax.Array, kind: jax.Array, number: jax.Array, scale: jax.Array
) -> jax.Array:
    drawn = normal(x, seed)
    if changes:
        drawn = jnp.where(kind >= 0, checking.altered(drawn, kind, number, first=first), drawn)
    return drawn * scale.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else drawn


def normal(x: Any, seed: int | jax.Array) -> jax.Array:
    """Draws a standard normal array of the shape of `x`, which is converted to its dtype."""
    return jax.random.normal(jax.random.key(seed), x.shape, jnp.float32).astype(x.dtype)


# ------------------------------------------------------------------------------
# The equations of a region in float32, as the reference of a comparison, or with rounded operands.


def in_float32(node: Node, args: Sequence[Any]) -> Sequence[Any]:
    """Computes an equation in float32 if it uses a narrower dtype."""
    equation, args = node.equation, [*map(widened, args)]
    if node.name != "bitcast_convert_type" and not any(map(fingerprint.is_jaxpr, equation.params.values())):
        return lowering_compat.evaluate_equation(equation.replace(params=wide_params(equation.params)), *args)
    own = [x.astype(of.dtype) if is_narrow(of.dtype) else x for x, of in zip(args, node.inputs, strict=True)]
    return [*map(widened, lowering_compat.evaluate_equation(equation, *own))]


def coarsely(node: Node, args: Sequence[Any]) -> Sequence[Any]:
    """Computes an equation. A product of two dtypes rounds both operands to the narrower one.

    So does a kernel of attention: in models, a gradient of float32 is multiplied by keys of bfloat16.
    """
    if node.name == "dot_general":
        narrow = min((x.dtype for x in args), key=_bits)
        args = [lax.optimization_barrier(x.astype(narrow)).astype(x.dtype) for x in args]
    return lowering_compat.evaluate_equation(node.equation, *args)


def mixes_dtypes(nodes: Iterable[Node]) -> bool:
    """Returns whether a product among the equations has operands of two dtypes."""
    return any(node.name == "dot_general" and len({x.dtype for x in node.inputs}) > 1 for node in nodes)


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
