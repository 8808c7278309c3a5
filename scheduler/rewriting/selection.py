"""Finds the calls of a function for which kernels are selected, and selects them, for one device's part on a mesh."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core.primitives import closed_call_p
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from scheduler.core.errors import NoCandidate
from scheduler.core.frames import Call
from scheduler.dispatch import dispatch
from scheduler.dispatch.dispatch import Decision, Options
from scheduler.dispatch.primitive import tuned_call, tuned_call_p
from scheduler.dispatch.query_recorder import QueryRecorder, RecordingOptions, Shardings
from scheduler.rewriting import equations
from scheduler.rewriting.equations import Body
from scheduler.rewriting.passes import Rewriter
from search_spaces import lowering_compat, partitioning_compat
from search_spaces.jax_compat import is_explicit
from search_spaces.operation import MatchedEquation, Operation, Params
from search_spaces.problem import Problem

# ------------------------------------------------------------------------------
# The tuned calls of a function, and those that `scheduler.optimize` makes in it. Each records its queries.

# A program that is compiled for its partitioning alone: no optimization, no autotuning, and no constant folding of
# arrays that a function without arguments creates.
PARTITIONING_ONLY: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_gpu_autotune_level": "0",
    "xla_disable_hlo_passes": "constant_folding",
}


@dataclasses.dataclass(frozen=True, eq=False)
class PosedCall:
    """A call for which a kernel is selected.

    Attributes:
      problem: The problem in the function, before partitioning.
      count: How often one call of the function runs it.
      line: The line of the user's code; None if unknown.
      recorder: Records the queries of each device where XLA partitions the call; None if the call runs on one device.
    """

    operation: Operation[Any]
    problem: Problem
    count: int
    line: Call | None
    recorder: QueryRecorder | None

    @property
    def queries(self) -> Sequence[tuple[Operation[Any], Problem]]:
        """The problems that the call queries from a store; empty if XLA computes it."""
        return [(self.operation, self.problem)] if self.recorder is None else self.recorder.queries


def with_regions(
    closed: Any, platform: str, replaces: Callable[[Operation[Any]], bool] = lambda operation: True
) -> Any:
    """Returns a closed jaxpr with a tuned call in place of each region, whichever kernel is selected for it.

    Args:
      platform: For which other equations are changed, too.
      replaces: Whether the regions of an operation are replaced.
    """

    def unless(operation: Operation[Any], problem: Problem) -> str | None:
        return None if replaces(operation) else "left alone"

    def call(operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        return tuned_call(operation, problem, *operands, params=params, options=RecordingOptions())

    return Rewriter(unless, call, lambda region, calls: None, platform, last=True).rewrite(closed).jaxpr


def recorded(
    jaxpr: Any,
    *,
    own: bool = False,
    on_one_device: bool = False,
    recorder_of: Callable[[Operation[Any], Problem], QueryRecorder] = lambda operation, problem: QueryRecorder(),
) -> tuple[Any, list[PosedCall]]:
    """Returns a jaxpr with tuned calls that record their queries and use no store, and the calls that are listed.

    Args:
      jaxpr: The jaxpr of a function, from `with_regions` unless `own`.
      own: Whether the calls of the function itself are listed, without those with a `schedule=`, which make no query.
        Otherwise those in place of regions and single equations are.
      on_one_device: Whether XLA does not partition the function.
      recorder_of: Returns the recorder of a call.
    """
    primitives = () if own else equations.operations_by_primitive().keys()
    (stored, _), found = equations.layouts_around(jaxpr, primitives), list[PosedCall]()

    def listed(body: Body, equation: Any, operation: Operation[Any], problem: Problem) -> QueryRecorder:
        recorder = None if body.manual else recorder_of(operation, problem)
        found.append(PosedCall(operation, problem, body.count, body.line_of(equation), recorder))
        return recorder or QueryRecorder()

    def recording(body: Body, equation: Any) -> Any:
        params = equation.params
        if equation.primitive is tuned_call_p:
            given, operation = params["options"], params["operation"]
            # XLA partitions calls that allow only the library by itself.
            allowed = given.backends if given.backends == {operation.library.backend} else None
            recorder = QueryRecorder()
            if body.count and given.schedule is None and own != isinstance(given, RecordingOptions):
                recorder = listed(body, equation, operation, params["problem"])
            return equation.replace(params=params | {"options": RecordingOptions(recorder=recorder, backends=allowed)})
        if body.count and equation.primitive in primitives:
            avals = [x.aval for x in equation.invars]
            layout = stored.get(equations.layout_key(equation.primitive, avals, params))
            if isinstance(matched := equations.match(equation.primitive, avals, params, layout), str):
                return equation
            recorder = listed(body, equation, matched[0], matched[1].problem)
            if body.manual:
                return equation
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
            with equation.ctx.manager:  # the mesh of its types
                call = jax.make_jaxpr(by_tuned_call(*matched, RecordingOptions(recorder=recorder)))(*structs)
            return equation.replace(primitive=closed_call_p, params={"call_jaxpr": call})
        times = {id(inner): n for inner, n in equations.held(equation)}
        manual, line = body.manual or equations.is_manual(equation), body.line_of(equation)

        def inside(inner: Any) -> Any:
            return in_body(Body(inner, body.count * times.get(id(inner), 0), manual, line))

        return equations.with_inside(equation, inside)

    def in_body(body: Body) -> Any:
        return equations.replaced(body.jaxpr, functools.partial(recording, body))

    return in_body(Body(jaxpr, 1, manual=on_one_device)), found


def by_tuned_call(
    operation: Operation[Any],
    matched: MatchedEquation[Any],
    options: Options,
    placed: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that computes an equation by a tuned call. `placed` divides its operands over devices."""
    params = Params(matched.params.items())
    how = {"operation": operation, "problem": matched.problem, "params": params, "options": options}
    return lambda *args: matched.restore(*tuned_call_p.bind(*placed(matched.operands(*args)), **how))


# ------------------------------------------------------------------------------
# The kernels of the calls: for their problems, or for one device's part where XLA partitions them.

# The operation and the problem of a call, before XLA partitions it -> the queries of one device.
Recorders = Mapping[tuple[Operation[Any], Problem], QueryRecorder]


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """How kernels are selected.

    Attributes:
      options: Operation name -> options for selecting its kernel.
      partitioned: The problems of one device, if XLA partitions the function over several devices, else None.
    """

    options: Mapping[str, Options]
    partitioned: Partitioned | None = None

    def of(self, operation: Operation[Any], problem: Problem, platform: str) -> list[tuple[Problem, Decision]]:
        """Returns the problems that each device computes for a call, with the decisions.

        Raises:
          NoCandidate: No kernel can be selected, or a library is selected; the message has the reason.
          CacheMiss: There is no record and the policy is "error".
        """
        options = self.options[operation.name]
        queries = [(operation, problem)]
        if self.partitioned is not None:
            queries = self.partitioned.queries(operation, problem)
            options = dataclasses.replace(options, divided=True)
        found = [(local, dispatch.decide(of, local, platform, options)) for of, local in queries]
        if library := next((decision for _, decision in found if decision.kernel.library), None):
            raise NoCandidate(library.reason)
        return found

    def call(self, operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        """Makes a tuned call."""
        return tuned_call(operation, problem, *operands, params=params, options=self.options[operation.name])

    def placed_call(self, operation: Operation[Any], problem: Problem, params: Any, *operands: Any) -> Any:
        """Makes a tuned call on operands that are divided over devices as those of the function are."""
        return self.call(operation, problem, params, *self.placed(operation, problem, operands))

    def placed(self, operation: Operation[Any], problem: Problem, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns operands of a call that are divided over devices as those of the function are."""
        for sizes, specs in self.shardings(operation, problem)[:1]:
            shardings = partitioning_compat.shardings(sizes, specs)
            return [*map(jax.lax.with_sharding_constraint, operands, shardings)]
        return operands

    def shardings(self, operation: Operation[Any], problem: Problem) -> Sequence[Shardings]:
        """Returns how XLA divides the operands of a call over several devices, for each way once."""
        recorder = None if self.partitioned is None else self.partitioned.recorder(operation, problem)
        return [] if recorder is None else list(dict.fromkeys(recorder.shardings))


@dataclasses.dataclass(frozen=True, eq=False)
class Partitioned:
    """The problems of one device in a function that XLA partitions.

    Only XLA knows how it partitions intermediate arrays. The function is therefore compiled, with tuned calls in place
    of all regions and products, which XLA computes.

    Attributes:
      traced: The result of a `jax.jit` trace.
      platform: For which other equations are changed, too.
    """

    traced: Any
    platform: str
    _found: dict[int, Recorders] = dataclasses.field(default_factory=dict)

    def queries(self, operation: Operation[Any], problem: Problem) -> list[tuple[Operation[Any], Problem]]:
        """Returns what one device computes for calls with this problem, without duplicates.

        Raises:
          NoCandidate: Such a call is not divided; the message has the reason.
        """
        recorder = self.recorder(operation, problem)
        if recorder is None:
            raise NoCandidate("how XLA partitions it is not known")
        if not recorder.queries:
            raise NoCandidate(recorder.reason)
        return list(dict.fromkeys(recorder.queries))

    def recorder(self, operation: Operation[Any], problem: Problem) -> QueryRecorder | None:
        """Returns the queries of one device for a call with this problem; None if the function makes no such call."""
        for number, replaces in enumerate(_REPLACED):
            if number not in self._found:
                self._found[number] = _recorded(self.traced, self.platform, replaces)
            if (found := self._found[number].get((operation, problem))) is not None:
                return found
        return None


def where(traced: Any, platform: str) -> Mapping[str, Any]:
    """Returns what is lowered and where it runs, as arguments of `lowering.lower_with_kernels`.

    Args:
      traced: The result of a `jax.jit` trace.
      platform: The platform of the devices.
    """
    if lowering_compat.device_count(traced.lower()) == 1:
        return {"traced": traced, "regions_on": platform}
    try:
        traced = lowering_compat.with_jaxpr(traced, on_automatic_axes(traced.jaxpr))
    except NotImplementedError:
        return {"traced": traced}
    return {"traced": traced, "regions_on": platform, "partitioned": Partitioned(traced, platform)}


# Selects the operations of replaced regions. If attention stays with XLA, the rows and products in it may be replaced;
# if rows stay, the products in them. Each of these programs is compiled only if a call is in none before.
_REPLACED: tuple[Callable[[Operation[Any]], bool], ...] = (
    lambda operation: True,
    lambda operation: operation.regions_last,
    lambda operation: False,
)


def _recorded(traced: Any, platform: str, replaces: Callable[[Operation[Any]], bool]) -> Recorders:
    recorders: dict[tuple[Operation[Any], Problem], QueryRecorder] = collections.defaultdict(QueryRecorder)
    jaxpr, _ = recorded(with_regions(traced.jaxpr, platform, replaces), recorder_of=lambda *call: recorders[call])
    lowering_compat.with_jaxpr(traced, jaxpr).lower().compile(compiler_options=PARTITIONING_ONLY)
    return recorders


# ------------------------------------------------------------------------------
# Moves equations from the explicit axes of a mesh to automatic ones, where XLA divides arrays.

# Equations that move an array to another sharding, and nothing else.
_MOVES = ("reshard", "mesh_cast")
# Parameters that name the sharding of a result on explicit axes.
_OF_RESULTS = ("sharding", "out_sharding")


def on_automatic_axes(closed: Any) -> Any:
    """Returns a closed jaxpr of the same arguments and results, with no equation on explicit axes.

    On explicit axes, types have shardings, which replaced equations would have to keep. Arguments and results keep
    theirs, and `jax.sharding.reshard` becomes a constraint. XLA decides about other arrays.

    Raises:
      NotImplementedError: The function has a `jax.shard_map` on explicit axes.
    """
    made = (x.aval for equation in closed.jaxpr.eqns for x in equation.outvars)
    meshes = (x.sharding.mesh for x in (*closed.in_avals, *map(jax.typeof, closed.consts), *made))
    if (mesh := next(filter(is_explicit, meshes), None)) is None:
        return closed
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = [whole if x.sharding.mesh.empty else x.sharding for x in closed.out_avals]
    structs = [_struct(x, x.sharding) for x in closed.in_avals]

    @functools.partial(jax.sharding.auto_axes, out_sharding=shardings)
    def run(constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        return _evaluated(closed.jaxpr, constants, arrays)

    return jax.make_jaxpr(lambda *arrays: run(closed.consts, arrays))(*structs)


def _evaluated(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    def results(equation: Any, args: Sequence[Any]) -> Sequence[Any]:
        with jax.sharding.use_abstract_mesh(_automatic(jax.sharding.get_abstract_mesh())):
            return _results(equation, args)

    return equations.evaluated(jaxpr, constants, arrays, results)


def _results(equation: Any, args: Sequence[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "shard_map":
        raise NotImplementedError("a shard_map inside of explicit axes")
    if primitive.name in _MOVES:
        to = params["dst_sharding"]
        if not args[0].ndim or not is_explicit(to.mesh):
            return args
        return [jax.lax.with_sharding_constraint(args[0], NamedSharding(_automatic(to.mesh), to.spec))]
    params = {name: None if name in _OF_RESULTS else _automatic(x) for name, x in params.items()}
    if primitive.name == "sharding_constraint":
        params["sharding"] = _constraint(equation.outvars[0].aval, equation.params["sharding"])
    with lowering_compat.source_of(equation):
        results = primitive.bind(*args, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _automatic(x: Any) -> Any:
    """Returns a mesh, or a value of an equation's parameters, for automatic axes."""
    match x:
        case dict():
            return {name: _automatic(value) for name, value in x.items()}
        case tuple() if type(x) is tuple:
            return tuple(map(_automatic, x))
        case Mesh() | AbstractMesh():
            types = tuple(AxisType.Auto if each is AxisType.Explicit else each for each in x.axis_types)
            return x.update(axis_types=types)
        case NamedSharding():
            return NamedSharding(_automatic(x.mesh), x.spec, memory_kind=x.memory_kind)
        case core.ClosedJaxpr():
            return _traced(x.jaxpr, x.consts)
        case core.Jaxpr():
            return _traced(x, ()).jaxpr
    return x


def _constraint(aval: Any, sharding: Any) -> Any:
    """Returns a constraint of automatic axes with the explicit axes of its array."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    given = (*sharding.spec, *(None,) * (aval.ndim - len(sharding.spec)))
    spec = (x if x is not None else y for x, y in zip(aval.sharding.spec, given, strict=True))
    return NamedSharding(_automatic(sharding.mesh), PartitionSpec(*spec))


def _traced(jaxpr: Any, constants: Sequence[Any]) -> Any:
    def run(*arrays: Any) -> list[Any]:
        return _evaluated(jaxpr, constants, arrays)

    avals = [x.aval for x in jaxpr.invars]
    return jax.make_jaxpr(run)(
        *(_struct(x, NamedSharding(_automatic(x.sharding.mesh), PartitionSpec())) for x in avals)
    )


def _struct(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    given = None if sharding.mesh.empty else sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=given, weak_type=aval.weak_type)
