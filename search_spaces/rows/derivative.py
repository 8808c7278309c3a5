"""The backward pass of a row program: again a row program. Its gradients of shared operands are sums over rows.

The function of one row is differentiated by `jax.vjp` and traced. The backward program then computes again what it
needs of the forward pass, from what is saved. Its operands, its results and numbers per row can be saved. The choice
reads the fewest bytes, then has the fewest stages, and then the fewest instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from search_spaces.rows.builder import NoProgram, pruned, rebuilt, renumbered
from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.program import Input, Operand, Program, Result, before_rounding, evaluate
from search_spaces.rows.reader import trace


@dataclasses.dataclass(frozen=True)
class Saved:
    """An array that the backward pass reads: an operand or a result of the forward pass, by its index.

    Results from the number of the function's own results on are scalars per row that only the backward pass needs.
    """

    kind: Literal["operand", "result"]
    index: int


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The two passes of a differentiated row function.

    Attributes:
      forward: the program of the forward pass; it may have more results than the function, all scalars per row.
      saved: what the backward pass reads besides cotangents.
      backward: its operands are those of `saved`, then a cotangent for each result of the function that `moving` lists;
        its results are gradients.
      moving: indices of the results that have cotangents.
      moved: for each operand that has a gradient, its index, and that of the gradient among the results of `backward`:
        operands share one if only their sum counts.
    """

    forward: Program
    saved: tuple[Saved, ...]
    backward: Program
    moving: tuple[int, ...]
    moved: tuple[tuple[int, int], ...]


def differentiate(
    function: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    kinds: Sequence[str],
    summed: Sequence[int] = (),
    *,
    bounded: bool = False,
) -> Derivative:
    """Returns the derivative of a function of one row, for arguments as those of `trace`.

    Args:
      summed: indices of results that are sums over rows: all rows share their cotangents.
      bounded: whether the caller proves that values of the backward pass stay so far within the range of their dtypes
        that rounded results may stand in for them, and that sums may be distributed (`Builder`).

    Raises:
      NoProgram: kernels on rows do not compute the function or its gradient.
      Exception: whatever the function raises.
    """
    moved = tuple(i for i, s in enumerate(shapes) if jnp.issubdtype(s.dtype, jnp.floating))
    found = jax.tree.leaves(jax.eval_shape(function, *shapes))
    moving = tuple(i for i, s in enumerate(found) if jnp.issubdtype(s.dtype, jnp.floating))
    if not moved or not moving:
        raise NoProgram("has no floating-point operand, or no floating-point result")
    if any(kinds[i] == "number" for i in moved):
        raise NoProgram("has a number for all rows, whose gradient no kernel on rows computes")

    def both(*arrays: Any) -> list[Any]:
        primals, cotangents = list(arrays[: len(shapes)]), arrays[len(shapes) :]

        def run(*some: Any) -> list[Any]:
            args = list(primals)
            for place, x in zip(moved, some, strict=True):
                args[place] = x
            return list(jax.tree.leaves(function(*args)))

        def moving_results(*some: Any) -> list[Any]:
            every = run(*some)  # once: cotangents of several results are added before they are rounded
            return [every[i] for i in moving]

        results, back = jax.vjp(moving_results, *(primals[i] for i in moved))
        whole = run(*(primals[i] for i in moved))
        for place, x in zip(moving, results, strict=True):
            whole[place] = x
        return [*whole, *back(list(cotangents))]

    cotangents = [found[i] for i in moving]
    one_column = any(s.shape == (1,) for s in found) and trace(function, shapes, kinds)[0].columns == 1
    of_rows = [bool(s.shape) and (s.size > 1 or one_column) for s in found]
    of_cotangents = ["shared" if i in summed else "row" if of_rows[i] else "scalar" for i in moving]
    of_all_rows = [kinds[i] == "shared" for i in moved]
    traced, _ = trace(
        both,
        [*shapes, *cotangents],
        [*kinds, *of_cotangents],
        lambda result: result in summed if result < len(found) else of_all_rows[result - len(found)],
    )
    gradients = zip(traced.results[len(found) :], (str(shapes[i].dtype) for i in moved), strict=True)
    sums = [  # sums over rows are float32
        dataclasses.replace(r, values=tuple(before_rounding(traced, x, dtype) for x in r.values))
        if r.kind == "row sum"
        else r
        for r, dtype in gradients
    ]
    traced = dataclasses.replace(traced, results=(*traced.results[: len(found)], *sums))
    halves = [
        _halved(traced, len(shapes), len(found), outputs, scalars, bounded)
        for outputs in (False, True)
        for scalars in (False, True)
    ]
    forward, saved, backward = min(halves, key=lambda half: _cost(half[1], half[2]))
    distinct = tuple(dict.fromkeys(backward.results))
    places = [distinct.index(result) for result in backward.results]
    backward = dataclasses.replace(backward, results=distinct)
    return Derivative(forward, saved, backward, moving, tuple(zip(moved, places, strict=True)))


def as_function(program: Program) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], list[str], list[int]]:
    """Returns a program as the arguments of `differentiate`: function, shapes, kinds, and indices of sums over rows."""
    shapes = [x.of_one_row(program.columns) for x in program.operands]
    kinds = [x.kind for x in program.operands]

    def function(*arrays: jax.Array) -> list[jax.Array]:
        by_row = [x[None] if kind in ("row", "scalar") else x for x, kind in zip(arrays, kinds, strict=True)]
        # A sum over one row is its part of the sum.
        return [
            x if r.kind == "row sum" else x[0] for x, r in zip(evaluate(program, *by_row), program.results, strict=True)
        ]

    return function, shapes, list(kinds), [i for i, r in enumerate(program.results) if r.kind == "row sum"]


def _cost(saved: Sequence[Saved], backward: Program) -> tuple[float, ...]:
    """Returns what to compare: bytes of rows, stages and instructions of the backward pass, and saved scalars."""
    row_bytes = sum(
        operand.parts * jnp.dtype(operand.dtype).itemsize for operand in backward.operands if operand.kind == "row"
    )
    scalars = sum(operand.kind == "scalar" for operand in backward.operands)
    return row_bytes, len(backward.stages), scalars, *backward.costs(again=False)


def _halved(
    whole: Program, operands: int, results: int, outputs: bool, scalars: bool, bounded: bool
) -> tuple[Program, tuple[Saved, ...], Program]:
    """Splits the program of both passes into the forward pass, what it saves, and the backward pass.

    Args:
      operands, results: number of operands and of results of the function.
      outputs, scalars: whether results, and scalars per row, stand in for what computes them.
      bounded: as for `differentiate`.
    """
    first = len(whole.inputs)
    moving = {i for i, read in enumerate(whole.inputs) if read.operand >= operands}
    for value, each in enumerate(whole.equations, first):
        if moving.intersection(x for x in each.inputs if isinstance(x, int)):
            moving.add(value)
    gradients = whole.results[results:]
    of_results = _of_results(whole, whole.results[:results], bounded) if outputs else {}
    # Values of the backward program: inputs are (what is saved, part), in the order in which they are needed.
    stops: dict[int, tuple[Saved | int, int]] = {}
    kept: set[int] = set()
    extra: set[int] = set()
    waiting = [x for r in gradients for x in r.values if isinstance(x, int)]
    while waiting:
        if (value := waiting.pop()) in kept or value in stops or value in extra:
            continue
        equation = whole.equation(value)
        if equation is None:
            read = whole.inputs[value]
            source = Saved("operand", read.operand) if read.operand < operands else read.operand - operands
            stops[value] = (source, read.part)
        elif value not in moving and value in of_results:
            stops[value] = of_results[value]
        elif scalars and value not in moving and not equation.vector and whole.levels[value]:
            extra.add(value)
        else:
            kept.add(value)
            waiting += [x for x in equation.inputs if isinstance(x, int)]
    for value in sorted(extra, reverse=True):  # scalars that follow from other saved scalars are computed from these
        equation = whole.equation(value)
        of = [x for x in (equation.inputs if equation else ()) if isinstance(x, int)]
        if equation is not None and equation.name not in REDUCTIONS and of and extra.issuperset(of):
            extra.remove(value)
            kept.add(value)
    for number, value in enumerate(sorted(extra)):
        stops[value] = (Saved("result", results + number), 0)
    scalar_results = tuple(Result("scalar", "float32", (value,)) for value in sorted(extra))
    forward = pruned(dataclasses.replace(whole, results=(*whole.results[:results], *scalar_results)))
    forward = rebuilt(dataclasses.replace(forward, operands=whole.operands[:operands]))
    saved = sorted({x for x, _ in stops.values() if isinstance(x, Saved)}, key=lambda x: (x.kind, x.index))
    declared = [whole.operands[x.index] if x.kind == "operand" else _declared(forward.results[x.index]) for x in saved]
    inputs = {
        value: Input(saved.index(source) if isinstance(source, Saved) else len(saved) + source, part)
        for value, (source, part) in stops.items()
    }
    backward = renumbered(whole, inputs, kept, [*declared, *whole.operands[operands:]], gradients)
    return forward, tuple(saved), rebuilt(backward, distributes=bounded)


def _of_results(program: Program, results: Sequence[Result], bounded: bool) -> dict[int, tuple[Saved, int]]:
    """Returns the values that results hold: themselves or, of a bounded program, rounded to 16 bits."""
    found: dict[int, tuple[Saved, int]] = {}
    for number, result in enumerate(results):
        narrow = not jnp.issubdtype(result.dtype, jnp.floating) or jnp.dtype(result.dtype).itemsize < 2
        if narrow or result.kind == "row sum":
            continue
        for part, atom in enumerate(result.values):
            for value in (atom, before_rounding(program, atom, result.dtype)) if bounded else (atom,):
                if isinstance(value, int) and program.equation(value) is not None:
                    found.setdefault(value, (Saved("result", number), part))
    return found


def _declared(result: Result) -> Operand:
    assert result.kind != "row sum", "a sum over rows stands in for no value of a row"
    return Operand(result.kind, result.dtype, len(result.values))
