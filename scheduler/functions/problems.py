"""Lists the tuned problems of a function, their counts and their source lines: `problems()`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from scheduler.core import codec
from scheduler.core import hardware as chips
from scheduler.core.errors import NoCandidate, SchedulerError
from scheduler.core.files import replace_text
from scheduler.core.frames import Call
from scheduler.core.hardware import Hardware
from scheduler.dispatch import calls
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.dispatch.query_recorder import QueryRecorder, RecordingOptions
from scheduler.functions import equations, problem_report
from scheduler.functions.equations import (
    Body,
    ProblemCount,
    ProblemCounter,
    Traced,
    bodies,
    held,
    is_manual,
    replaced,
    with_inside,
)
from scheduler.functions.pure import pure_call
from scheduler.functions.rewrite import listed_calls
from scheduler.functions.selection import PARTITIONING_ONLY, Partitioned
from scheduler.functions.suggestions import Suggestion, suggestions
from search_spaces.configuration import comparisons
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# ------------------------------------------------------------------------------
# Finds the problems that each device runs when XLA partitions a function over several devices.


@dataclasses.dataclass(frozen=True, eq=False)
class TunedCall:
    """A tuned call of a function.

    Attributes:
      count: How often one call of the function runs it.
      line: The line of the user's code; None if unknown.
      recorder: Records the queries of each device where XLA partitions the call; None if the call already runs on one
        device.
    """

    equation: Any
    count: int
    line: Call | None
    recorder: QueryRecorder | None = None

    @property
    def operation(self) -> Operation[Any]:
        found: Operation[Any] = self.equation.params["operation"]
        return found

    @property
    def problem(self) -> Problem:
        """The problem in the function, before partitioning."""
        found: Problem = self.equation.params["problem"]
        return found

    @property
    def queries(self) -> Sequence[tuple[Operation[Any], Problem]]:
        """The problems that the call queries from a store; empty if XLA computes it."""
        return [(self.operation, self.problem)] if self.recorder is None else self.recorder.queries

    @property
    def reason(self) -> str:
        """Why the call makes no query."""
        return "; ".join(dict.fromkeys(self.recorder.not_recorded if self.recorder else ())) or "XLA removes the call"


def local_calls(function: Traced) -> list[TunedCall]:
    """Returns the tuned calls of a function on one device. Calls with a `schedule=` make no query and are left out."""
    return [
        TunedCall(equation, body.count, body.line_of(equation))
        for body in bodies(function.jaxpr)
        if isinstance(body, Body)
        for equation in body.jaxpr.eqns
        if _makes_query(equation)
    ]


def _makes_query(equation: Any) -> bool:
    return equation.primitive is tuned_call_p and equation.params["options"].schedule is None


def mesh_of(function: Traced) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which XLA partitions tuned calls of a function; None if it partitions none.

    There is such a mesh if two conditions hold. First, shardings of arguments, constants, jitted functions or
    constraints name several devices, or a mesh is set (`jax.set_mesh`). Second, a tuned call is outside manual regions.
    """
    automatic = _automatic(function)
    if not any(_makes_query(equation) for body in automatic for equation in body.jaxpr.eqns):
        return None
    return _named_mesh(function)


def _named_mesh(function: Traced) -> Mesh | AbstractMesh | None:
    named = [mesh for mesh in _meshes(function, _automatic(function)) if mesh.size > 1]
    with_devices = (mesh for mesh in named if isinstance(mesh, Mesh))
    return next(with_devices, named[0] if named else None)


def _automatic(function: Traced) -> list[Body]:
    return [body for body in bodies(function.jaxpr) if isinstance(body, Body) and not body.manual]


def mesh_text(mesh: Mesh | AbstractMesh) -> str:
    """Formats the axes of a mesh: ``data=2, model=4``."""
    return ", ".join(f"{name}={extent}" for name, extent in mesh.shape.items())


def partitioned_calls(function: Traced, over: Mesh | AbstractMesh) -> list[TunedCall]:
    """Returns the tuned calls of a function, each with its queries while the function is compiled for a mesh.

    Only XLA knows how it partitions intermediate arrays. The function is therefore compiled, with XLA in place of all
    kernels.

    Raises:
      SchedulerError: There are too few devices, or XLA cannot compile the function for the mesh.
    """
    found: list[TunedCall] = []
    mesh = over if isinstance(over, Mesh) else _with_devices(over)
    jaxpr = _with_recorders(Body(function.jaxpr, 1), found)
    variables, given = (*jaxpr.constvars, *jaxpr.invars), (*function.constants, *function.arguments)
    inputs = [_input_type(each.aval, x, mesh) for each, x in zip(variables, given, strict=True)]
    if mesh is not over:  # JAX compiles nothing for an abstract mesh: an unused scalar supplies the devices
        inputs.append(jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())))

    def run(*arrays: Any) -> Any:
        constants, arguments = arrays[: len(jaxpr.constvars)], arrays[len(jaxpr.constvars) : len(variables)]
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*arguments)

    try:
        jax.jit(run, keep_unused=True).lower(*inputs).compile(compiler_options=PARTITIONING_ONLY)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]
        raise SchedulerError(f"the function cannot be compiled for the mesh {mesh_text(over)}: {message}") from error
    return found


def _meshes(function: Traced, automatic: Iterable[Body]) -> Iterator[Mesh | AbstractMesh]:
    """Yields the meshes named in the function, those with devices first."""
    for x in (*function.arguments, *function.constants):
        yield from _of(getattr(x, "sharding", None))
    for body in automatic:
        for equation in body.jaxpr.eqns:
            for value in equation.params.values():
                for each in value if isinstance(value, tuple) else (value,):
                    yield from _of(each)
    yield from _of(jax.sharding.get_abstract_mesh())


def _of(value: Any) -> Iterator[Mesh | AbstractMesh]:
    if isinstance(value, Mesh | AbstractMesh):
        yield value
    elif isinstance(value, NamedSharding):
        yield value.mesh
    elif isinstance(value, Sharding) and len(value.device_set) > 1:
        yield Mesh(np.array(list(value.device_set)), ("devices",))


def _with_devices(mesh: AbstractMesh) -> Mesh:
    for platform in ("cpu", None):  # CPU devices may be simulated
        devices = jax.devices(platform)
        if len(devices) >= mesh.size:
            found = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
            return Mesh(found, mesh.axis_names, axis_types=mesh.axis_types)
    text = mesh_text(mesh)
    raise SchedulerError(
        f"the function is sharded over {mesh.size} devices ({text}), and this host has {len(jax.devices())}. To find "
        f"the problems of one device, simulate the devices: tile-scheduler extract --mesh {text.replace(' ', '')}, or "
        f"start Python with JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
    )


def _input_type(aval: Any, given: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns an input's shape, dtype and sharding, without its values."""
    sharding = None if getattr(given, "committed", True) is False else getattr(given, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _with_recorders(body: Body, found: list[TunedCall]) -> Any:
    """Returns the jaxpr with a listener for each tuned call. No tuned call uses a store."""

    def with_recorder(equation: Any) -> Any:
        line = body.line_of(equation)
        if equation.primitive is tuned_call_p:
            allowed, library = equation.params["options"].backends, equation.params["operation"].library.backend
            # XLA partitions calls that allow only the library by itself.
            options = RecordingOptions(backends=allowed if allowed == {library} else None)
            if body.count and _makes_query(equation):
                found.append(TunedCall(equation, body.count, line, None if body.manual else options.recorder))
            return equation.replace(params=equation.params | {"options": options})
        times, manual = {id(jaxpr): each for jaxpr, each in held(equation)}, body.manual or is_manual(equation)

        def other(jaxpr: Any) -> Any:
            return _with_recorders(Body(jaxpr, body.count * times.get(id(jaxpr), 0), manual, line), found)

        return with_inside(equation, other)

    return replaced(body.jaxpr, with_recorder)


# ------------------------------------------------------------------------------
# Simulates a mesh of devices on the CPU, to see how a function is partitioned without the real devices.


def fake_mesh(extents: Mapping[str, int]) -> Mesh:
    """Returns a mesh with these axes, all automatic. JAX runs on the CPU in this process from then on.

    Raises:
      SchedulerError: JAX has already started with fewer devices.
    """
    devices = math.prod(extents.values())
    with contextlib.suppress(RuntimeError):  # JAX has already started: use the devices that it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    if (found := len(jax.devices("cpu"))) < devices:
        raise SchedulerError(
            f"a mesh of {devices} devices is requested, but JAX has started with {found}; start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    automatic = (AxisType.Auto,) * len(extents)
    return jax.make_mesh(
        tuple(extents.values()), tuple(extents), axis_types=automatic, devices=jax.devices("cpu")[:devices]
    )


@dataclasses.dataclass(frozen=True)
class Left:
    """A tuned call left to XLA because no kernel can be used where XLA partitions the function over devices.

    Attributes:
      row: The problem before partitioning.
      reason: Why no kernel can be used.
    """

    row: ProblemCount
    reason: str


@dataclasses.dataclass(frozen=True, repr=False)
class Problems:
    """The problems of a function, the most expensive first.

    Attributes:
      untuned: Calls that could be tuned but are not, the most expensive first.
      hardware: The chip used for the roofline that orders the problems.
      loops: Loops whose counts are unknown: the iterations of a `while`, the branches of a `cond`.
      mesh: The mesh over which XLA partitions the function, as ``data=2, model=4``: tuned problems are those of one
        device. "" if XLA partitions none of its tuned calls.
      left: Tuned calls left to XLA on that mesh.
    """

    tuned: tuple[ProblemCount, ...]
    hardware: Hardware
    untuned: tuple[Suggestion, ...] = ()
    loops: tuple[equations.Loop, ...] = ()
    mesh: str = ""
    left: tuple[Left, ...] = ()

    def __repr__(self) -> str:
        return problem_report.problems_text(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the tuned problems as a job file for ``tile-scheduler tune --job``."""
        replace_text(file, self.job())

    def job(self) -> str:
        """Returns the text of the job that `save` writes."""
        of = f"one device's of {self.mesh}, " if self.mesh else ""
        return problem_report.job_text(self.tuned, f"The tuned problems of a function, {of}the most expensive first")

    def __iter__(self) -> Iterator[ProblemCount]:
        return iter(self.tuned)

    def __len__(self) -> int:
        return len(self.tuned)


@comparisons()
def problems(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problems:
    """Returns the tuned problems of ``fn(*args, **kwargs)``, the most expensive first, without running the function.

    Backward passes are counted if `fn` differentiates. The counts inside a `lax.scan` are multiplied by its length. The
    iterations of a `while_loop` count as one, and all branches of a `cond` are counted. Calls that pass `schedule=` do
    not query a store and are left out. Costs are for the current chip, or for `scheduler.target`.

    If XLA partitions `fn` over the devices of a mesh, the problems are those of one device: `fn` is compiled for that
    mesh, with XLA in place of all kernels. Shardings may use a mesh without devices, if the CPU has enough devices.

    Args:
      fn: A plain function, or one jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. State that it updates in
        place (modules, dicts, lists) counts as a result. For a result of `scheduler.optimize`, the problems are those
        that it poses.
      args, kwargs: Arguments of `fn`. A `jax.ShapeDtypeStruct`, optionally with a sharding, may replace an array. Other
        arguments are constants.

    Raises:
      SchedulerError: XLA partitions `fn` over more devices than are available, or cannot compile it for the mesh; or
        `fn` has effects that cannot be carried out of a trace.

    Warns if all derivatives that `fn` computes are dropped because none of its results needs them.
    """
    if (posed := optimized_call(fn, args, kwargs)) is not None:
        return posed[0].problems(*posed[1], **posed[2])
    chip = _chip()
    pure = pure_call(fn, args, kwargs)
    function = equations.traced(pure.function, *pure.arrays)
    over = mesh_of(function)
    tuned, left = ProblemCounter(chip), dict[str, ProblemCounter]()
    for made in local_calls(function) if over is None else partitioned_calls(function, over):
        for operation, problem in made.queries:
            tuned.add(operation, problem, made.count, [made.line])
        if not made.queries:
            left.setdefault(made.reason, ProblemCounter(chip)).add(
                made.operation, made.problem, made.count, [made.line]
            )
    mesh = "" if over is None else mesh_text(over)
    return Problems(tuned.rows(), chip, suggestions(function.jaxpr, chip), _loops(function.jaxpr), mesh, _left(left))


def _left(left: Mapping[str, ProblemCounter]) -> tuple[Left, ...]:
    return tuple(Left(row, reason) for reason, counter in left.items() for row in counter.rows())


class PosesProblems:
    """A function that poses problems by replacing equations: the base of `scheduler.optimize`'s results."""

    _fn: Callable[..., Any]

    def problems(self, *args: Any, **kwargs: Any) -> Problems:
        """Returns the problems that a call with these arguments poses: attention, matmuls, and the tuned calls in it.

        The call is traced, not run. `Problems.save` writes them as a job for ``tile-scheduler tune --job``.
        A `jax.ShapeDtypeStruct` may replace an array.
        """
        return optimized_problems(self._fn, args, kwargs)


def optimized_call(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[PosesProblems, tuple[Any, ...], Mapping[str, Any]] | None:
    """Returns the result of `scheduler.optimize` that `fn`, also a method or a partial of one, calls; None for another.

    The arguments returned with it include those that `fn` holds.

    Raises:
      TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"expected a function, found {fn!r}")
    while isinstance(fn, functools.partial | types.MethodType):
        if isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        else:
            fn, args = fn.__func__, (fn.__self__, *args)
    return (fn, args, kwargs) if isinstance(fn, PosesProblems) else None


@comparisons()
def optimized_problems(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Problems:
    """Returns the problems that `scheduler.optimize` poses for ``fn(*args, **kwargs)``, the most expensive first.

    These are attention, forward and backward, row programs, matmuls, and the tuned calls of `fn`. What a record or the
    cost model leaves to XLA is listed, too. Arguments and errors are those of `problems`.
    """
    chip = _chip()
    pure = pure_call(fn, tuple(args), dict(kwargs))
    function = equations.traced(pure.function, *pure.arrays)
    jaxpr = listed_calls(function.jaxpr, function.constants, chip.platform)
    stored = equations.layouts_around(jaxpr, equations.operations_by_primitive().keys())
    over = _named_mesh(function)
    partitioned = None if over is None else _partitioned(pure.function, function, over, chip)
    tuned, left = ProblemCounter(chip), dict[str, ProblemCounter]()
    for body in (each for each in equations.bodies(jaxpr) if isinstance(each, Body)):
        for equation in body.jaxpr.eqns:
            if (found := _posed(equation, stored)) is None:
                continue
            times = body.count, [body.line_of(equation)]
            try:
                local = [found] if partitioned is None or body.manual else partitioned.queries(*found)
            except NoCandidate as error:
                left.setdefault(str(error), ProblemCounter(chip)).add(*found, *times)
            else:
                for query in local:
                    tuned.add(*query, *times)
    mesh = "" if over is None else mesh_text(over)
    return Problems(tuned.rows(), chip, loops=_loops(jaxpr), mesh=mesh, left=_left(left))


def _partitioned(fn: Callable[..., Any], function: Traced, over: Mesh | AbstractMesh, chip: Hardware) -> Partitioned:
    mesh = over if isinstance(over, Mesh) else _with_devices(over)
    inputs = [
        _input_type(x.aval, given, mesh) for x, given in zip(function.jaxpr.invars, function.arguments, strict=True)
    ]
    return Partitioned(jax.jit(fn).trace(*inputs), chip.platform)


def _posed(equation: Any, stored: Mapping[Any, equations.StoredLayout]) -> tuple[Operation[Any], Problem] | None:
    if _makes_query(equation):
        return equation.params["operation"], equation.params["problem"]
    return equations.match_equation(equation, stored)


def _loops(jaxpr: Any) -> tuple[equations.Loop, ...]:
    """Returns the loops with unknown counts, one for each kind and line."""
    found = dict[Any, equations.Loop]()
    for body in equations.bodies(jaxpr):
        if isinstance(body, equations.Loop):
            found.setdefault((body.kind, body.line), body)
    return tuple(found.values())


def _chip() -> Hardware:
    if calls.target.value:
        return chips.find(calls.target.value)
    try:
        return chips.detect()
    except SchedulerError:  # on an unknown chip only the order of problems matters
        return next(chips.table())


# ------------------------------------------------------------------------------
# Converts a function's problems to JSON.


def to_json(found: Problems) -> dict[str, Any]:
    return {
        "hardware": found.hardware.id,
        "tuned": [_row(row) for row in found.tuned],
        "untuned": [_row(each.row) | {"call": each.call, "gain": each.gain} for each in found.untuned],
        "mesh": found.mesh,
        "left": [_row(each.row) | {"reason": each.reason} for each in found.left],
        "loops": [{"kind": loop.kind, "line": None if loop.line is None else _line(loop.line)} for loop in found.loops],
    }


def _row(row: ProblemCount) -> dict[str, Any]:
    return {
        "operation": row.operation.name,
        "problem": codec.problem_to_json(row.problem.canonical()),
        "count": row.count,
        "least_s": row.least_s,
        "lines": [_line(line) for line in row.lines],
    }


def _line(line: Call) -> dict[str, Any]:
    return {"file": line.file, "line": line.line, "function": line.function}
