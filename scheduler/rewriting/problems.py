"""Lists the tuned problems of a function, their counts and their source lines: `problems()`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from scheduler.core import codec, hints
from scheduler.core import hardware as chips
from scheduler.core.errors import SchedulerError
from scheduler.core.files import replace_text
from scheduler.core.frames import Call
from scheduler.core.hardware import Hardware
from scheduler.core.text import mesh_text, seconds_text
from scheduler.dispatch import calls
from scheduler.rewriting import equations, selection
from scheduler.rewriting.equations import Body, ProblemCount, ProblemCounter, Traced
from scheduler.rewriting.optimize import Optimized
from scheduler.rewriting.pure import pure_call
from scheduler.rewriting.selection import PosedCall, on_automatic_axes
from search_spaces import OPERATIONS, fingerprint, locate
from search_spaces.configuration import comparisons

# ------------------------------------------------------------------------------
# Finds the problems that each device runs when XLA partitions a function over several devices.


def _mesh_of(function: Traced) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which XLA partitions a function; None if it runs on one device.

    Shardings of arguments, constants, jitted functions or constraints name it, or it is set (`jax.set_mesh`).
    """
    named = [mesh for mesh in _meshes(function) if mesh.size > 1]
    with_devices = (mesh for mesh in named if isinstance(mesh, Mesh))
    return next(with_devices, named[0] if named else None)


def _posed(function: Traced, over: Mesh | AbstractMesh | None, *, own: bool) -> list[PosedCall]:
    """Returns the calls of a function. If XLA partitions one of them, the function is compiled for the mesh.

    Args:
      own: As in `selection.recorded`.
    """
    jaxpr, found = selection.recorded(function.jaxpr, own=own, on_one_device=over is None)
    if over is not None and any(call.recorder for call in found):
        _partition(dataclasses.replace(function, jaxpr=jaxpr), over)
    return found


def _partition(function: Traced, over: Mesh | AbstractMesh) -> None:
    """Compiles a function for a mesh: only XLA knows how it partitions intermediate arrays.

    Raises:
      SchedulerError: There are too few devices, or XLA cannot compile the function for the mesh.
    """
    jaxpr, mesh = function.jaxpr, over if isinstance(over, Mesh) else _with_devices(over)
    variables, given = (*jaxpr.constvars, *jaxpr.invars), (*function.constants, *function.arguments)
    inputs = [_input_type(each.aval, x, mesh) for each, x in zip(variables, given, strict=True)]
    if mesh is not over:  # JAX compiles nothing for an abstract mesh: an unused scalar supplies the devices
        inputs.append(jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())))

    def run(*arrays: Any) -> Any:
        constants, arguments = arrays[: len(jaxpr.constvars)], arrays[len(jaxpr.constvars) : len(variables)]
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*arguments)

    try:
        jax.jit(run, keep_unused=True).lower(*inputs).compile(compiler_options=selection.PARTITIONING_ONLY)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]
        raise SchedulerError(
            f"the function cannot be compiled for the mesh {mesh_text(over.shape)}: {message}"
        ) from error


def _meshes(function: Traced) -> Iterator[Mesh | AbstractMesh]:
    """Yields the meshes named in the function outside of manual regions, those with devices first."""
    for x in (*function.arguments, *function.constants):
        yield from _of(getattr(x, "sharding", None))
    for body in equations.bodies(function.jaxpr):
        for equation in body.jaxpr.eqns if isinstance(body, Body) and not body.manual else ():
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
    text = mesh_text(mesh.shape)
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
class LeftToXla:
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
      tuned: The problems of the tuned calls.
      untuned: The problems that `scheduler.optimize` would add, the most expensive first; empty for its results.
      hardware: The chip used for the roofline that orders the problems.
      loops: Loops with unknown counts: the iterations of a `while`, the branches of a `cond`.
      mesh: The mesh over which XLA partitions the function, as ``data=2, model=4``: tuned problems are those of one
        device. "" if XLA partitions none of its tuned calls.
      left: Tuned calls left to XLA on that mesh.
    """

    tuned: tuple[ProblemCount, ...]
    hardware: Hardware
    untuned: tuple[ProblemCount, ...] = ()
    loops: tuple[equations.Loop, ...] = ()
    mesh: str = ""
    left: tuple[LeftToXla, ...] = ()

    def __repr__(self) -> str:
        return problems_text(self)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the tuned problems as a job file for ``tile-scheduler tune-job``."""
        replace_text(file, self.job())

    def job(self) -> str:
        """Returns the text of the job that `save` writes."""
        of = f"one device's of {self.mesh}, " if self.mesh else ""
        return job_text(self.tuned, f"The tuned problems of a function, {of}the most expensive first")

    def __iter__(self) -> Iterator[ProblemCount]:
        return iter(self.tuned)

    def __len__(self) -> int:
        return len(self.tuned)


@comparisons()
def problems(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problems:
    """Returns the tuned problems of ``fn(*args, **kwargs)``, the most expensive first, without running the function.

    Backward passes are counted if `fn` differentiates. The counts inside a `lax.scan` are multiplied by its length. The
    iterations of a `while_loop` count as one, and all branches of a `cond` are counted. Calls that pass `schedule=` do
    not query a store and are left out. Costs are for the current chip, or for `scheduler.target`. `Problems.untuned`
    has what `scheduler.optimize` would replace besides: attention, row programs and products, found by its own passes.

    If XLA partitions `fn` over the devices of a mesh, the problems are those of one device: `fn` is compiled for that
    mesh, with XLA in place of all kernels. Shardings may use a mesh without devices, if the CPU has enough devices.

    Args:
      fn: A plain function, or one jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. State that it updates in
        place (modules, dicts, lists) counts as a result. For a result of `scheduler.optimize`, what it would replace
        is tuned, too.
      args, kwargs: Arguments of `fn`. A `jax.ShapeDtypeStruct`, optionally with a sharding, may replace an array. Other
        arguments are constants.

    Raises:
      SchedulerError: XLA partitions `fn` over more devices than are available, or cannot compile it for the mesh; or
        `fn` has effects that cannot be carried out of a trace.

    Warns if all derivatives that `fn` computes are dropped because none of its results needs them.
    """
    optimized = _optimized_call(fn, args, kwargs)
    if optimized is not None:
        fn, args, kwargs = optimized
    chip = _chip()
    pure = pure_call(fn, args, kwargs)
    function = equations.traced(pure.function, *pure.arrays)
    over = _mesh_of(function)
    tuned = _posed(function, over, own=True)
    try:
        others = _posed(_with_regions(function, chip), over, own=False)
    except NotImplementedError:  # `optimize` leaves all to XLA then, except products inside of `shard_map`
        others = [call for call in selection.recorded(function.jaxpr)[1] if call.recorder is None]
    partitioned = any(call.recorder for call in tuned + others)
    if optimized is not None:
        tuned, others = tuned + others, []
    return Problems(
        _counted(tuned, chip),
        chip,
        _counted(others, chip),
        _loops(function.jaxpr),
        mesh_text(over.shape) if over and partitioned else "",
        _left(tuned, chip),
    )


def _with_regions(function: Traced, chip: Hardware) -> Traced:
    closed = on_automatic_axes(core.ClosedJaxpr(function.jaxpr, function.constants))
    closed = selection.with_regions(closed, chip.platform)
    return Traced(fingerprint.opened_jaxpr(closed), tuple(closed.consts), function.arguments)


def _counted(posed: Iterable[PosedCall], chip: Hardware) -> tuple[ProblemCount, ...]:
    counter = ProblemCounter(chip)
    for call in posed:
        for operation, problem in call.queries:
            counter.add(operation, problem, call.count, [call.line])
    return counter.rows()


def _left(posed: Iterable[PosedCall], chip: Hardware) -> tuple[LeftToXla, ...]:
    left = dict[str, ProblemCounter]()
    for call in posed:
        if call.recorder is not None and not call.recorder.queries:
            counter = left.setdefault(call.recorder.reason, ProblemCounter(chip))
            counter.add(call.operation, call.problem, call.count, [call.line])
    return tuple(LeftToXla(row, reason) for reason, counter in left.items() for row in counter.rows())


def _optimized_call(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Returns the function that is optimized in `fn`, its result or a method or partial of that; None for another `fn`.

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
    return (fn._fn, args, kwargs) if isinstance(fn, Optimized) else None


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
        "untuned": [_row(row) for row in found.untuned],
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


# ------------------------------------------------------------------------------
# Formats a function's problems as text, 100 columns wide.

WIDTH = 100


def place(line: Call) -> str:
    """Returns ``model.py:41``, with the relative path if the file is below the current directory."""
    file = Path(line.file)
    try:
        name = str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):
        name = file.name
    return f"{name}:{line.line}" if name.isprintable() else f"{name!r}:{line.line}"


def problem_lines(lines: Iterable[Call]) -> str:
    return ", ".join(map(place, lines))


def describe_problems(row: ProblemCount) -> str:
    return f"{row.operation.name} {row.problem.brief()}"


def times(row: ProblemCount) -> str:
    return f"{row.count} times" if row.count > 1 else "once"


def _notes(found: Problems) -> Iterator[str]:
    """Yields notes on the counts and the times."""
    if found.tuned or found.untuned:
        yield f"Times are roofline lower bounds for {found.hardware.kind}."
    if found.mesh:
        yield f"Problems are those of one device; XLA partitions the function over {found.mesh}."
    for each in found.left:
        yield f"XLA is used for {describe_problems(each.row)}, {times(each.row)}: {each.reason}."
    for kind, note in (
        ("while", "all iterations of a while loop count as one"),
        ("cond", "all branches of a cond count"),
    ):
        loops = [loop for loop in found.loops if loop.kind == kind]
        if loops:
            yield ": ".join(filter(None, (problem_lines(loop.line for loop in loops if loop.line), f"{note}.")))


def problems_text(found: Problems) -> str:
    """Returns the full text: for each problem its figures, and below them the lines of the user's code."""
    total = sum(row.least_s for row in (*found.tuned, *found.untuned))
    lines = list(_table_lines(found.tuned, total))
    if not found.tuned and not found.left:
        lines.append("The function makes no tuned call.")
    if found.untuned:
        lines.append("Not tuned; scheduler.optimize replaces these where kernels are faster:")
        lines += _table_lines(found.untuned, total)
    return "\n".join(lines + [line for note in _notes(found) for line in _folded(note)])


def _table_lines(rows: Sequence[ProblemCount], total: float) -> Iterator[str]:
    """Yields a table with the count, the minimum time of all runs, and its share of `total`, for each problem."""
    cells = [("count", "at least", "share")] if rows else []
    cells += [(str(row.count), seconds_text(row.least_s), f"{100 * row.least_s / total:.1f} %") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    heads = ["".join(f"{cell:>{width}}  " for cell, width in zip(row, widths, strict=True)) for row in cells]
    yield from (f"{head}problem" for head in heads[:1])
    for head, row in zip(heads[1:], rows, strict=True):
        below = " " * len(head)
        yield from _folded(describe_problems(row), head, below)
        yield from _folded(problem_lines(row.lines), below, below)


def _folded(text: str, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


# ------------------------------------------------------------------------------
# Writes a function's problems as an offline job, in the format that `jobs.parse` reads.


def job_text(rows: Sequence[ProblemCount], of: str) -> str:
    """Returns the text of the job: a table for each problem, with its count.

    An operation that no other process can load is left out, with a comment.

    Args:
      of: A description of the problems.
    """
    lines = [f"# {of}; on the chip that is to run it:"]
    lines.append(f"#   tile-scheduler tune-job {shlex.join(['job.toml', *_own(rows)])}")
    for row in rows:
        lines += ["", *_table(row)]
    return "\n".join(lines) + "\n"


def _own(rows: Iterable[ProblemCount]) -> Iterator[str]:
    """Yields the command line options that allow a job to load the user's code."""
    names = (
        hints.name(row.operation) for row in rows if row.operation.name not in OPERATIONS and locate(row.operation)
    )
    for name in dict.fromkeys(names):
        yield from ("--own", name)


def _table(row: ProblemCount) -> Iterator[str]:
    if locate(row.operation) is None:
        yield f"# left out: {row.operation.name} {row.problem}; its operation is no global of a module"
        return
    values = row.problem.non_default_fields() | (
        {"dtype": dtype} if (dtype := getattr(row.problem, "dtype", None)) else {}
    )
    fields = [field.name for field in dataclasses.fields(row.problem)]
    yield "[[problem]]" + (f"  # {problem_lines(row.lines)}" if row.lines else "")
    yield f"operation = {json.dumps(hints.name(row.operation))}"
    if "count" not in fields:
        yield f"count = {row.count}"
    yield from (f"{name} = {json.dumps(values[name])}" for name in fields if name in values)
