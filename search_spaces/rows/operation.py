"""Operations on rows: the kernels of XLA and of the interpreter, derivatives, and the operations made of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from search_spaces import derivative_rules
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.front_end import grouped
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.operation import KernelName, Kernels, Operation
from search_spaces.problem import as_tuple, nbytes
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.calls import ProgramOrigin, bind_program
from search_spaces.rows.derivative import Derivative, differentiate
from search_spaces.rows.named import Formula, FormulaProblem, problem_type
from search_spaces.rows.pattern import find
from search_spaces.rows.problem import (
    ProgramAlongProblem,
    ProgramAlongTangentProblem,
    ProgramProblem,
    ProgramTangentProblem,
    RowProblem,
    batch,
    rounded_at_each_step,
    shard,
)
from search_spaces.rows.program import evaluate
from search_spaces.space import Columns, Space
from search_spaces.target import Target, not_interpreted

P = TypeVar("P", bound=RowProblem)

# ------------------------------------------------------------------------------
# A program as XLA fuses it, in float32 and as users write it: the baseline, and a legal fallback.


class XlaRows(LibraryKernel[P], Generic[P]):
    """The program in float32, and the program that users write.

    Attributes:
      plain: the program that users write, on operands of their dtype; None if that is the program in float32, too.
      loses_ties: as in `Kernel`.
    """

    version = 1

    def __init__(self, plain: Callable[..., Any] | None = None, *, loses_ties: bool = False) -> None:
        self.plain, self.loses_ties = plain, loses_ties  # type: ignore[misc]

    def programs(self, problem: P) -> tuple[str, ...]:
        narrow = problem.operands()[0].dtype != jnp.float32
        return (Library.program, "plain") if narrow and self.plain is not None else (Library.program,)

    def tolerance(self, problem: P, schedule: Library) -> Any:
        """Returns the problem's tolerance; for "plain", one that allows rounding at each step, as users' code does."""
        return rounded_at_each_step(problem) if schedule.program == "plain" else problem.tolerance()

    def run(self, problem: P, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Any:
        if schedule.program == "plain" and self.plain is not None:
            return self.plain(*args, **params)
        results = as_tuple(problem.by_xla(*args, **params))
        return problem.pack([x.astype(s.dtype) for x, s in zip(results, problem.results(), strict=True)])


# ------------------------------------------------------------------------------
# A program as a plain ``pallas_call`` on blocks of rows, run by Pallas's interpreter on a CPU.


@dataclasses.dataclass(frozen=True)
class InterpretedSchedule:
    """Rows per block; a block has whole rows."""

    rows: int


class InterpretedRows(Kernel[P, InterpretedSchedule], Generic[P]):
    """Arrays with a row or an element per row are divided into blocks; others are whole in each block."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: P, target: Target) -> str | None:
        return not_interpreted(target)

    def space(self, problem: P, target: Target) -> Space[InterpretedSchedule]:
        p = problem
        # An interpreted grid step takes about a millisecond, regardless of its work.
        few = [rows for rows in (1, 4, 16, 64, 256, 1024) if rows < p.rows <= 1024 * rows]
        return Space(InterpretedSchedule, choices={"rows": (p.rows, *reversed(few))})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        blocks = -(-p.rows // s.rows)
        operands, results = p.arrays
        by_row = sum(nbytes(x) for x, o in zip(p.operands(), operands, strict=True) if o.kind in ("row", "scalar"))
        whole = sum(nbytes(x) for x in p.operands()) - by_row
        written = sum(nbytes(x) for x, o in zip(p.results(), results, strict=True) if o.kind != "row sum")
        sums = sum(map(nbytes, p.results())) - written
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(blocks,),
            step=Phase(
                loads=(
                    Operand(bytes=by_row / blocks, axes=(0,)),
                    Operand(bytes=np.full(len(s), float(whole)), axes=()),
                ),
                flops=p.flops / p.rows * s.rows,
            ),
            tile=Phase(bytes_written=written / blocks + sums),
            axes=("rows",),
            onchip_bytes=np.asarray(s.rows * ((by_row + written) // p.rows) + whole + sums, dtype=np.int64),
        )

    def run(self, problem: P, schedule: InterpretedSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        p, s = problem, schedule
        program = p.program_of(**params)

        def body(*refs: Any) -> None:
            operands, outs = refs[: len(args)], refs[len(args) :]
            step = pl.program_id(0)
            counted = step * s.rows + jnp.arange(s.rows) < p.rows
            results = evaluate(program, *(ref[...] for ref in operands), counted=counted)
            for out, result, declared in zip(outs, results, program.results, strict=True):
                if declared.kind != "row sum":
                    out[...] = result
                    continue
                out[...] = jnp.where(step == 0, result, out[...] + result)

        def block(x: jax.ShapeDtypeStruct, kind: str) -> pl.BlockSpec:
            if kind in ("row", "scalar"):
                return pl.BlockSpec((s.rows, *x.shape[1:]), lambda i: (i, *(0 for _ in x.shape[1:])))
            return pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))

        operands, results = p.arrays
        made = pl.pallas_call(
            body,
            grid=(-(-p.rows // s.rows),),
            in_specs=[block(x, o.kind) for x, o in zip(p.operands(), operands, strict=True)],
            out_specs=[block(x, o.kind) for x, o in zip(p.results(), results, strict=True)],
            out_shape=list(p.results()),
            interpret=True,
        )(*args)
        return p.pack(made)


# ------------------------------------------------------------------------------
# Derivatives: the tangent is an operation that is linear in the tangents; its transpose is the backward pass.


def _derivative(p: RowProblem, params: Mapping[str, Any]) -> Derivative | None:
    """Returns the derivative of a problem's program; None if XLA differentiates it."""
    if (origin := params.get("origin")) is not None:
        own = _of_function(origin)
        return own if own is not None and own.backward.columns == p.program.columns else None
    try:
        return p.derivative(**params)
    except NoProgram:
        return None


@functools.lru_cache(maxsize=1024)
def _of_function(origin: ProgramOrigin) -> Derivative | None:
    try:
        with jax.enable_x64(origin.x64):
            return differentiate(*origin.traceable)
    except NoProgram:
        return None


@functools.lru_cache(maxsize=1024)
def _has_own_rules(origin: ProgramOrigin) -> bool:
    """Returns whether the gradient of a function may not be that of its program, as of a straight-through estimator."""
    function, arrays, _ = origin.traceable
    with jax.enable_x64(origin.x64):
        return derivative_rules.has_own_rules(function, arrays)


def _require_equations(call: Any, p: RowProblem) -> None:
    """Raises if the derivative of a gradient's kernel is not the second derivative of the user's function."""
    if call.params.get("own_rules"):
        raise NotImplementedError(
            f"{_name(p)}: its function has derivative rules of its own (a stop_gradient, a custom_jvp), so its second "
            "derivative does not follow from the gradient's kernel; differentiate the plain function twice instead"
        )


# Returns the operation and the problem of a part of a derivative, "saving", "jvp" or "backward", of a problem.
Part = Callable[[str, Any, Derivative | None], tuple[Operation[Any], Any]]


def jvp_rule(part: Part) -> Callable[..., Any]:
    """Returns the rule for the derivative of an operation on rows (`Operation.jvp`)."""

    def jvp(call: Any, p: RowProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
        _require_equations(call, p)
        found = _derivative(p, call.params)
        if found is None or all(tangents[i] is None for i, _ in found.moved):
            return _by_xla(call, p, primals, tangents)
        count = len(p.results())
        origin = call.params.get("origin")
        own_rules = {"own_rules": True} if origin is not None and _has_own_rules(origin) else {}
        if len(found.forward.results) > count:
            operation, posed = part("saving", p, found)
            results = as_tuple(call(operation, posed, *primals, **_own(call, operation), **own_rules))
        else:
            results = as_tuple(call(p, *primals))
        saved = [(primals if x.kind == "operand" else results)[x.index] for x in found.saved]
        operation, posed = part("jvp", p, found)
        wanted = posed.operands()[len(saved) :]
        given: list[Any] = [None] * len(wanted)
        for i, place in found.moved:
            if tangents[i] is not None:
                one = tangents[i].astype(wanted[place].dtype)
                given[place] = one if given[place] is None else given[place] + one
        shapes = {place: primals[i].shape for i, place in found.moved}
        given = [
            jnp.zeros(shapes[place], s.dtype) if x is None else x
            for place, (x, s) in enumerate(zip(given, wanted, strict=True))
        ]
        moved = as_tuple(call(operation, posed, *saved, *given, **_own(call, operation), **own_rules))
        by_result: list[Any] = [None] * count
        for place, x in zip(found.moving, moved, strict=True):
            by_result[place] = x
        return p.pack(results[:count]), p.pack(by_result)

    return jvp


def _own(call: Any, operation: Operation[Any]) -> dict[str, Any]:
    """Returns the parameters of a call that another operation takes."""
    return {name: value for name, value in call.params.items() if name in operation.params}


def _by_xla(call: Any, p: RowProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns results, and tangents that XLA computes from the function or from the program."""
    results = call(p, *primals)
    moving = [i for i, x in enumerate(tangents) if x is not None]
    if not moving:
        return results, None
    origin = call.params.get("origin")
    compute = (
        functools.partial(p.reference, **call.params) if origin is None else functools.partial(origin.over_rows, p)
    )

    def run(*some: Any) -> tuple[Any, ...]:
        args = list(primals)
        for i, x in zip(moving, some, strict=True):
            args[i] = x
        found = as_tuple(compute(*(x.reshape(s.shape) for x, s in zip(args, p.operands(), strict=True))))
        arrays = zip(found, p.results(), as_tuple(results), strict=True)
        return tuple(x.astype(s.dtype).reshape(r.shape) for x, s, r in arrays)

    found = jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return results, p.pack([x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in found])


def _tangent_of_tangent(call: Any, p: RowProblem, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns the tangent of the tangent of a program, by XLA."""
    _require_equations(call, p)
    return _by_xla(call, p, primals, tangents)


def transpose_rule(part: Part) -> Callable[..., Any]:
    """Returns the transpose of the tangent of an operation on rows (`Operation.transpose`)."""

    def transpose(call: Any, p: RowProblem, cotangent: Any, args: Any) -> tuple[Any, ...]:
        operation, posed = part("backward", p, None)
        count = len(args) - len(p.program.results)
        cotangents = [
            jnp.zeros(_like(args[:count], p, s, of.kind), s.dtype) if x is None else x
            for x, s, of in zip(as_tuple(cotangent), p.results(), p.arrays[1], strict=True)
        ]
        gradients = as_tuple(call(operation, posed, *args[:count], *cotangents, **_own(call, operation)))
        moving = [None if known is not None else x for x, known in zip(gradients, args[count:], strict=True)]
        return (*(None for _ in range(count)), *moving)

    return transpose


def _like(saved: Sequence[Any], p: RowProblem, wanted: jax.ShapeDtypeStruct, kind: str) -> tuple[int, ...]:
    """Returns the shape of a cotangent: its rows have the other axes of the saved rows."""
    for x, declared, folded in zip(saved, p.arrays[0], p.operands(), strict=False):
        if kind in ("row", "scalar") and declared.kind in ("row", "scalar"):
            before, *after = grouped(folded.shape, x.shape)
            columns = wanted.shape[1:2] if kind == "row" else ()
            return (*before, *columns, *itertools.chain(*after[declared.kind == "row" :]))
    return wanted.shape


# ------------------------------------------------------------------------------
# The operations of a formula, and the operation of any program.


def kernels(library: XlaRows[Any]) -> Kernels[Any]:
    """Returns the kernels that compute any row program."""
    return Kernels(
        KernelName("mosaic_gpu", "cuda", "search_spaces.rows.hopper:HopperRows"),
        KernelName("mosaic_tpu", "tpu", "search_spaces.contrib.tpu.rows:TpuRows"),
        InterpretedRows(),
        library,
    )


# Group normalization and programs along an axis that is not the last.
CHANNELS = KernelName("mosaic_gpu", "cuda", "search_spaces.rows.hopper.channels:HopperChannels")


# The operations of formulas by name.
NAMED: dict[str, Operation[Any]] = {}


def row_operation(
    formula: Formula,
    *,
    plain: Callable[..., Any] | None = None,
    backward_loses_ties: bool = False,
    front_end: Callable[..., Any],
) -> Operation[Any]:
    """Returns the operation of a formula, and adds it and those of its derivative to `NAMED`.

    The others compute what the backward pass saves, too ("_saving"), the tangent ("_jvp") and the backward pass.

    Args:
      plain: the program that users write, for `XlaRows`.
      backward_loses_ties: whether XLA's kernel of the backward pass loses ties (`Kernel.loses_ties`).
      front_end: as in `Operation`.
    """

    params = tuple(x for x in formula.parameters if x != "result_dtype")

    def add(part: str, kernels: Kernels[Any], **rules: Any) -> Operation[Any]:
        name = f"{formula.name}_{part}" if part else formula.name
        return NAMED.setdefault(
            name,
            Operation(name, problem_type(formula, part), kernels, params=params, batch=batch, shard=shard, **rules),
        )

    def of(part: str, p: Any, _: Any) -> tuple[Operation[Any], Any]:
        operation = NAMED[f"{formula.name}_{part}"]
        return operation, operation.problem(**vars(p))

    add("saving", kernels(XlaRows()))
    add("jvp", Kernels(XlaRows()), transpose=transpose_rule(of))
    add("backward", kernels(XlaRows(loses_ties=backward_loses_ties)), jvp=jvp_rule(_of_program))
    return add("", kernels(XlaRows(plain)), jvp=jvp_rule(of), front_end=front_end)


def _of_program(part: str, p: Any, found: Derivative | None) -> tuple[Operation[Any], Any]:
    """Returns a part of the derivative of any program (`Part`)."""
    along = isinstance(p, ProgramAlongProblem)
    fields = {"rows": p.rows} | ({"inner": p.inner} if along else {})
    operation: Operation[Any] = ROWS_ALONG if along else ROWS
    if part == "jvp" and found is not None:
        operation = ROWS_ALONG_JVP if along else ROWS_JVP
        fields["last"] = len(found.moving)
    name = _name(p) if found is not None else p.name.removesuffix("_jvp")
    text = p.text if found is None else (found.forward if part == "saving" else found.backward).text()
    return operation, operation.problem(text=text, name=f"{name}_{part}", **fields)


def _name(p: RowProblem) -> str:
    return p.name if isinstance(p, ProgramProblem) else p.formula.name if isinstance(p, FormulaProblem) else "rows"


ROWS: Operation[ProgramProblem] = Operation(
    "rows",
    ProgramProblem,
    kernels(XlaRows()),
    params=("own_rules",),
    jvp=jvp_rule(_of_program),
    front_end=functools.partial(bind_program, ProgramProblem),
    regions=find,
    regions_last=True,
    batch=batch,
    shard=shard,
)
ROWS_JVP: Operation[ProgramTangentProblem] = Operation(
    "rows_jvp",
    ProgramTangentProblem,
    Kernels(XlaRows()),
    params=("own_rules",),
    jvp=_tangent_of_tangent,
    transpose=transpose_rule(_of_program),
    batch=batch,
    shard=shard,
)
ROWS_ALONG: Operation[ProgramAlongProblem] = Operation(
    "rows_along",
    ProgramAlongProblem,
    Kernels(CHANNELS, XlaRows()),
    params=("own_rules",),
    jvp=jvp_rule(_of_program),
    front_end=functools.partial(bind_program, ProgramAlongProblem),
    batch=batch,
    shard=shard,
)
ROWS_ALONG_JVP: Operation[ProgramAlongTangentProblem] = Operation(
    "rows_along_jvp",
    ProgramAlongTangentProblem,
    Kernels(XlaRows()),
    params=("own_rules",),
    jvp=_tangent_of_tangent,
    transpose=transpose_rule(_of_program),
    batch=batch,
    shard=shard,
)
