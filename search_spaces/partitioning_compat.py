"""Private JAX APIs of calls that XLA partitions: while it compiles, XLA calls back for each device's computation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import core, sharding_impls, xla_bridge
from jax._src import mesh as mesh_lib
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir, str_to_sdy_sharding_rule
from jax._src.interpreters import mlir, partial_eval
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import hlo  # type: ignore[attr-defined]
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from search_spaces.sharding import Sharding, Spec, as_spec

# XLA's name of this partitioner. JAX's own, CustomSPMDPartitioning, puts the address of a Python object into the
# module, so that no two processes share an entry of JAX's compilation cache.
_TARGET = "TileSchedulerDivided"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The computation of each device, ``run(*operands) -> results``, and the sharding of the arrays."""

    run: Callable[..., Sequence[jax.Array]]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


# (devices along each axis of a mesh, specs of operands, specs of results) -> the computation of each device.
Divide = Callable[[Mapping[str, int], Sequence[Spec], Sequence[Spec]], Parts]


@dataclasses.dataclass
class DividedCall:
    """A call for which XLA requests the computation of each device.

    Attributes:
      meant: calls with an equal value are divided alike.
      divide: returns the computation of each device.
      within: a context for tracing and lowering that computation.
    """

    meant: Hashable
    divide: Divide
    within: Callable[[], AbstractContextManager[Any]]
    platforms: tuple[str, ...] = ()


# XLA may look these up as long as a module that contains them may be compiled.
_calls: weakref.WeakValueDictionary[str, DividedCall] = weakref.WeakValueDictionary()
_guard = threading.Lock()
# Exceptions raised in XLA's callback, on any thread, by the text that XLA reports.
_raised: dict[str, Exception] = {}
_MOST_RAISED = 64
# Raised by JAX if arrays are sharded in a way that an operation does not support.
ShardingTypeError: type[Exception] = core.ShardingTypeError


def partition_spec(spec: Spec) -> PartitionSpec:
    """Converts a spec to JAX's type."""
    return PartitionSpec(*(axes or None for axes in spec))


def shardings(axes: Sequence[tuple[str, int]], specs: Sequence[Spec]) -> list[NamedSharding]:
    """Returns shardings over the first devices of this process, for a mesh of these axes and extents."""
    names, extents = zip(*axes, strict=True)
    devices = np.array(jax.local_devices()[: math.prod(extents)]).reshape(extents)
    mesh = mesh_lib.Mesh(devices, names)
    return [NamedSharding(mesh, partition_spec(spec)) for spec in specs]


def is_mapped_over_a_mesh() -> bool:
    """Returns whether code is traced within a `jax.vmap` with an `spmd_axis_name`.

    The mapped axis then is, or will be, divided: JAX divides the mapped axis of every operand of a `jax.shard_map`,
    including operands that are not divided.
    """
    return bool(core.get_axis_env().spmd_axis_names)


def why_whole(ctx: Any) -> str | None:
    """Returns why XLA cannot call back for a call that is lowered here; None if it can."""
    if ctx.module_context.lowering_parameters.for_export:
        return "`jax.export` keeps no call that XLA asks about while it compiles"
    if "tpu" in (ctx.platforms or ctx.module_context.platforms):
        return "XLA for TPUs asks nobody while it divides a call"  # github.com/jax-ml/jax/issues/38196
    if not isinstance(ctx.module_context.axis_context, sharding_impls.ShardingContext):
        return "some axes of its mesh are manual and some are not"
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        return "Shardy, which knows rules, is turned off (jax_use_shardy_partitioner)"
    return None


def lower_divided(ctx: Any, args: Sequence[Any], sharding: Sharding[Any], call: DividedCall, digest: str) -> Any:
    """Lowers a call in place of an equation with several results; XLA gets each device's computation from `call`.

    Args:
      digest: digest of everything that the result of `call` depends on, the same in every process.
    """
    call.platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    key = _registered(call, f"{digest}-{'-'.join(call.platforms)}", ctx)
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    op = hlo.CustomCallOp(
        types,
        list(args),
        call_target_name=ir.StringAttr.get(_TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(key),
        operand_layouts=None,
        result_layouts=None,
    )
    op.attributes["sdy.sharding_rule"] = _rule(sharding, [x.type for x in args], types)
    return op.results


def _registered(call: DividedCall, digest: str, ctx: Any) -> str:
    """Returns the key for XLA's lookup. Equal calls share a key: their entry must outlive any one of their modules."""
    with _guard:
        for number in itertools.count():
            key = f"{digest}-{number}" if number else digest
            known = _calls.get(key)
            if known is None or known.meant == call.meant:
                known = known or call
                known.within = call.within  # the context of the latest lowering, which is compiled next
                _calls[key] = known
                ctx.module_context.add_keepalive(known)
                return key
    raise AssertionError


def _rule(sharding: Sharding[Any], operands: Sequence[Any], results: Sequence[Any]) -> Any:
    of_operands, of_results = sharding.arrays
    in_results = {letter for array in of_results for axis in array for letter in axis}
    alone = {axis[0] for array in (*of_operands, *of_results) for axis in array if len(axis) == 1}
    shapes = [tuple(ir.ShapedType(x).shape) for x in (*operands, *results)]
    extents = sharding.extents_of(shapes)
    sizes: Any = {x: extents[x] for x in sharding.letters if x not in alone}
    rule = str_to_sdy_sharding_rule(
        sharding.rule,
        reduction_factors=tuple(x for x in sharding.letters if x in sharding.summed and x not in in_results),
        # In the order of the rule, as its verifier requires.
        need_replication_factors=tuple(
            x for x in sharding.letters if x not in sharding.divided and x not in sharding.summed
        ),
        **sizes,
    )
    return sdy_sharding_rule_to_mlir(rule, list(operands), list(results))


def _partition(operands: Any, given: Any, result: Any, wanted: Any, key: bytes) -> Any:
    """XLA's callback: returns the module of one device, and the sharding of its operands and results.

    An exception that leaves it would end the process: jaxlib 0.10 releases it without the GIL. So an exception becomes
    a module that XLA cannot compile; XLA reports its name.
    """
    call = _calls.get(key.decode()) or DividedCall(None, _unknown, contextlib.nullcontext, ("cpu",))
    try:
        return _answer(operands, given, result, wanted, call)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        with _guard:
            if len(_raised) >= _MOST_RAISED:
                _raised.clear()
            _raised[why] = error.with_traceback(None)

    def refuse(mesh: Mapping[str, int], operands: Sequence[Spec], results: Sequence[Spec]) -> Parts:
        def whole(specs: Sequence[Spec]) -> tuple[Spec, ...]:
            return tuple(((),) * len(spec) for spec in specs)

        structs = [jax.ShapeDtypeStruct(x.dimensions(), x.numpy_dtype()) for x in _shapes(result)]
        return Parts(jax.ffi.ffi_call(why, structs), whole(operands), whole(results))

    return _answer(operands, given, result, wanted, dataclasses.replace(call, divide=refuse))


def _unknown(mesh: Mapping[str, int], operands: Sequence[Spec], results: Sequence[Spec]) -> Parts:
    raise RuntimeError("a call that is divided over devices is compiled by the process that lowered it")


def _answer(operands: Any, given: Any, result: Any, wanted: Any, call: DividedCall) -> Any:
    several, results = result.is_tuple(), _shapes(result)
    wanted = wanted.tuple_elements() if several else (wanted,)
    shapes = [x.dimensions() for x in (*operands, *results)]
    mesh, specs = _as_specs([*given, *wanted], [len(shape) for shape in shapes])
    # The user's mesh context does not affect one device.
    with empty_mesh(), call.within():
        parts = call.divide(dict(mesh.shape), specs[: len(operands)], specs[len(operands) :])
        of_operands, of_results = (
            [NamedSharding(mesh, partition_spec(spec))._to_xla_hlo_sharding(len(spec)) for spec in arrays]
            for arrays in (parts.operands, parts.results)
        )
        local = [
            core.ShapedArray(sharding.tile(x).dimensions(), x.numpy_dtype())
            for sharding, x in zip(of_operands, operands, strict=True)
        ]
        jaxpr: Any = jax.make_jaxpr(parts.run, axis_env=list(mesh.shape.items()))(*local)
        if getattr(jaxpr, "is_high", False):
            jaxpr = partial_eval.lower_jaxpr2(jaxpr)
        with core.extend_axis_env_nd(mesh.shape.items()):
            module = mlir.build_mlir_module_helper(
                jaxpr,
                name="divided",
                platforms=call.platforms,
                backend=None,
                axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset(mesh.axis_names)),  # type: ignore[arg-type]
            )
        combined = xla_client.HloSharding.tuple_sharding(result, of_results) if several else of_results[0]
        return mlir.module_to_bytecode(module), of_operands, combined


def _shapes(result: Any) -> Sequence[Any]:
    return result.tuple_shapes() if result.is_tuple() else (result,)


@contextlib.contextmanager
def empty_mesh() -> Iterator[None]:
    """Context without the caller's mesh: equations traced in it run on one device, or on any mesh."""
    with mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh):
        yield


def _as_specs(shardings: Sequence[Any], ranks: Sequence[int]) -> tuple[AbstractMesh, list[Spec]]:
    """Converts XLA's shardings to specs on a mesh of our own, with prime axis sizes.

    This represents meshes of any shape, and several in one program. An array with a sharding that cannot be
    represented is whole on each device.
    """
    devices = next((math.prod(s.tile_assignment_dimensions()) for s in shardings if s is not None and s.is_tiled()), 1)
    best: tuple[int, AbstractMesh, list[Spec]] | None = None
    for sizes in sorted(set(itertools.islice(itertools.permutations(_primes(devices)), 5040))):
        mesh = AbstractMesh(sizes, tuple(f"axis{i}" for i in range(len(sizes))))
        specs = [_spec(s, rank, mesh) for s, rank in zip(shardings, ranks, strict=True)]
        named = sum(spec is not None for spec in specs)
        if best is None or named > best[0]:
            best = named, mesh, [spec or ((),) * rank for spec, rank in zip(specs, ranks, strict=True)]
        if named == len(specs):
            break
    assert best is not None
    return best[1:]


def _spec(sharding: Any, rank: int, mesh: AbstractMesh) -> Spec | None:
    if sharding is None or sharding.is_replicated():
        return ((),) * rank
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding, mesh)
    except (KeyError, ValueError, AssertionError, NotImplementedError, StopIteration):
        return None
    return as_spec(tuple(spec), rank)


def _primes(n: int) -> tuple[int, ...]:
    """Returns the prime factors of n in ascending order; none for 1."""
    for divisor in range(2, math.isqrt(n) + 1):
        if n % divisor == 0:
            return divisor, *_primes(n // divisor)
    return (n,) if n > 1 else ()


def raised_by(error: Exception) -> Exception:
    """Returns the exception raised in XLA's callback that caused `error`; else `error`."""
    text = str(error)
    with _guard:
        return next((_raised.pop(why) for why in list(_raised) if why in text), error)


def _unasked(*args: Any) -> Any:
    raise NotImplementedError("Shardy takes the rule of a call, and asks nobody")


_register = functools.partial(
    xla_client.register_custom_call_partitioner,
    name=_TARGET,
    prop_user_sharding=_unasked,
    partition=_partition,
    infer_sharding_from_operands=_unasked,
    can_side_effecting_have_replicated_sharding=True,
)
_register()
xla_bridge.register_plugin_callbacks(_register)
