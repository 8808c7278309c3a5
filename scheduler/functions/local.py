"""Finds the problems that each device runs when XLA partitions a function over several devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from scheduler.core.errors import SchedulerError
from scheduler.core.frames import Call
from scheduler.dispatch.listening import Listener, Listening
from scheduler.dispatch.primitive import tuned_call_p
from scheduler.functions.equations import Body, Traced, bodies, held, is_manual, replaced, with_inside
from search_spaces.operation import Operation
from search_spaces.problem import Problem

# Only the partitioning is needed: no optimization, no autotuning, and no constant folding of arrays that a function
# without arguments creates.
_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_gpu_autotune_level": "0",
    "xla_disable_hlo_passes": "constant_folding",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TunedCall:
    """A tuned call of a function.

    Attributes:
      count: How often one call of the function runs it.
      line: The line of the user's code; None if unknown.
      listener: Records the queries of each device where XLA partitions the call; None if the call already runs on one
        device.
    """

    equation: Any
    count: int
    line: Call | None
    listener: Listener | None = None

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
    def asks(self) -> Sequence[tuple[Operation[Any], Problem]]:
        """The problems that the call queries from a store; empty if XLA computes it."""
        return [(self.operation, self.problem)] if self.listener is None else self.listener.asked

    @property
    def why_not(self) -> str:
        """Why the call makes no query."""
        return "; ".join(dict.fromkeys(self.listener.left if self.listener else ())) or "XLA drops it"


def calls(function: Traced) -> list[TunedCall]:
    """Returns the tuned calls of a function on one device. Calls with a `schedule=` make no query and are left out."""
    return [
        TunedCall(equation, body.count, body.line_of(equation))
        for body in bodies(function.jaxpr)
        if isinstance(body, Body)
        for equation in body.jaxpr.eqns
        if _asks(equation)
    ]


def _asks(equation: Any) -> bool:
    return equation.primitive is tuned_call_p and equation.params["options"].schedule is None


def mesh_of(function: Traced) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which XLA partitions tuned calls of a function; None if it partitions none.

    There is such a mesh if two conditions hold. First, shardings of arguments, constants, jitted functions or
    constraints name several devices, or a mesh is set (`jax.set_mesh`). Second, a tuned call is outside manual regions.
    """
    automatic = [body for body in bodies(function.jaxpr) if isinstance(body, Body) and not body.manual]
    if not any(_asks(equation) for body in automatic for equation in body.jaxpr.eqns):
        return None
    named = [mesh for mesh in _meshes(function, automatic) if mesh.size > 1]
    with_devices = (mesh for mesh in named if isinstance(mesh, Mesh))
    return next(with_devices, named[0] if named else None)


def mesh_text(mesh: Mesh | AbstractMesh) -> str:
    """Formats the axes of a mesh: ``data=2, model=4``."""
    return ", ".join(f"{name}={extent}" for name, extent in mesh.shape.items())


def calls_divided(function: Traced, over: Mesh | AbstractMesh) -> list[TunedCall]:
    """Returns the tuned calls of a function, each with its queries while the function is compiled for a mesh.

    Only XLA knows how it partitions intermediate arrays. The function is therefore compiled, with XLA in place of all
    kernels.

    Raises:
      SchedulerError: There are too few devices, or XLA cannot compile the function for the mesh.
    """
    found: list[TunedCall] = []
    mesh = over if isinstance(over, Mesh) else _with_devices(over)
    jaxpr = _listening(Body(function.jaxpr, 1), found)
    variables, given = (*jaxpr.constvars, *jaxpr.invars), (*function.constants, *function.arguments)
    inputs = [_described(each.aval, x, mesh) for each, x in zip(variables, given, strict=True)]
    if mesh is not over:  # JAX compiles nothing for an abstract mesh: an unused scalar supplies the devices
        inputs.append(jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())))

    def run(*arrays: Any) -> Any:
        constants, arguments = arrays[: len(jaxpr.constvars)], arrays[len(jaxpr.constvars) : len(variables)]
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*arguments)

    try:
        jax.jit(run, keep_unused=True).lower(*inputs).compile(compiler_options=_COMPILER)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise SchedulerError(f"the function cannot be compiled for the mesh {mesh_text(over)}: {said}") from error
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
        f"the function is divided over {mesh.size} devices ({text}), and {len(jax.devices())} are here: what each of "
        f"them asks is known once it is compiled for as many. tile-scheduler extract --mesh {text.replace(' ', '')} "
        f"makes them up, and so does Python that is started with JAX_PLATFORMS=cpu "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
    )


def _described(aval: Any, given: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns an input's shape, dtype and sharding, without its values."""
    sharding = None if getattr(given, "committed", True) is False else getattr(given, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _listening(body: Body, found: list[TunedCall]) -> Any:
    """Returns the jaxpr with a listener for each tuned call. No tuned call uses a store."""

    def listened(equation: Any) -> Any:
        line = body.line_of(equation)
        if equation.primitive is tuned_call_p:
            asked, library = equation.params["options"].backends, equation.params["operation"].library.backend
            # XLA partitions calls that allow only the library by itself.
            options = Listening(backends=asked if asked == {library} else None)
            if body.count and _asks(equation):
                found.append(TunedCall(equation, body.count, line, None if body.manual else options.listener))
            return equation.replace(params=equation.params | {"options": options})
        times, manual = {id(jaxpr): each for jaxpr, each in held(equation)}, body.manual or is_manual(equation)

        def other(jaxpr: Any) -> Any:
            return _listening(Body(jaxpr, body.count * times.get(id(jaxpr), 0), manual, line), found)

        return with_inside(equation, other)

    return replaced(body.jaxpr, listened)
