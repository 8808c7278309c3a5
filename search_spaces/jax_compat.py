"""The only file that depends on JAX versions: names and behaviours that differ between 0.10.2 and the newest."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.lax import lax as private_lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from search_spaces.configuration import formulas

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


class _OnUse(types.ModuleType):
    """A module that is imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


# Untyped: its annotations differ between versions and partly contradict its use; the names used here do not. Importing
# it takes a third as long as importing JAX, and only GPU kernels use it.
plgpu: Any = _OnUse("jax.experimental.pallas.mosaic_gpu")

# Prefix of a reason that a newer JAX resolves.
NEEDS_JAX = "needs jax "
# Minimum Python for each JAX version, from its wheels (Requires-Python), newest first.
PYTHON_OF_JAX = (((0, 11), (3, 12)), ((0, 10), (3, 11)))

# From this version on, JAX can run a whole Mosaic GPU kernel on a CPU, including copies, barriers and races.
HAS_GPU_INTERPRETER = JAX_VERSION >= (0, 11)


def gpu_interpreter(*, detect_races: bool = False, skip_inline: bool = False) -> AbstractContextManager[None]:
    """Context in which Mosaic GPU kernels are interpreted on the CPU.

    With `detect_races`, a race raises from JAX 0.12 on; 0.11 only prints "RACE DETECTED". With `skip_inline`, a
    kernel's `plgpu.inline_mgpu` is skipped; it must be without effect here, such as a fence.

    Raises:
      NotImplementedError: on JAX below 0.11 (see `HAS_GPU_INTERPRETER`).
    """
    if not HAS_GPU_INTERPRETER:
        raise NotImplementedError(f"interpreting GPU kernels needs jax 0.11 or newer, this is {jax.__version__}")
    params = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore" if skip_inline else "error")
    return _interpreting(plgpu.force_gpu_interpret_mode(params))


_interprets: contextvars.ContextVar[bool] = contextvars.ContextVar("interprets", default=False)


@contextlib.contextmanager
def _interpreting(interpreter: AbstractContextManager[None]) -> Iterator[None]:
    before = _interprets.set(True)
    try:
        with interpreter:
            yield
    finally:
        _interprets.reset(before)


def interprets() -> bool:
    """Returns whether GPU kernels that are traced now are for the interpreter."""
    return _interprets.get()


# From this version on, an on-chip array may be swizzled without a tiled layout, and one warp of a warpgroup may wait
# for barriers with computed indices.
HAS_UNTILED_SWIZZLE = HAS_ONE_WARP = JAX_VERSION >= (0, 11)

# From this version on, Mosaic GPU compiles for GPUs before Hopper: copies by cp.async, warp-level MMA.
HAS_MMA = JAX_VERSION >= (0, 11, 2)


def mosaic_gpu_code(meaning: Callable[..., Any], **types: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates code that uses Mosaic GPU's own functions (see `plgpu.inline_mgpu` for the `types`).

    `meaning` is equivalent code in Pallas operations, the only ones that the interpreter supports.
    """
    if interprets():
        return lambda code: meaning
    decorated: Callable[[Callable[..., Any]], Callable[..., Any]] = plgpu.inline_mgpu(**types)
    return decorated


def issue_wgmma_of_registers(acc: Any, a: Any, b: Any, swizzle: int) -> Any:
    """Issues ``acc + a b`` in Mosaic GPU's own terms, uncommitted, with `a` in registers.

    Each instruction covers 16 rows of `b`.

    Args:
      acc: ``float32[64, n]``, the accumulators.
      a: ``[64, k]`` of 16 bits, k a multiple of 16, in the layout of accumulators.
      b: ``[k, n]`` in shared memory, in tiles of 8 rows of `swizzle` bytes.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import mma_utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    private: Any = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")
    step = 16
    (k, n), element = mma_utils.tiled_memref_shape(b)
    (descriptor, _), (_, stride), fastest = mma_utils.create_descriptor(
        b, swizzle=swizzle, group_size=(step, n), logical_k_major=True
    )
    elements = ("element_type",) if JAX_VERSION < (0, 11) else ("a_element_type", "b_element_type")
    fixed: dict[str, Any] = {
        "a_transpose": None,
        "b_transpose": fastest != mma_utils.Dim.K,
        "a_k_stride": None,
        "b_k_stride": step,
        "n": n,
        "swizzle": 2 * step,
        **dict.fromkeys(elements, element),
    }
    accumulators: Any = mgpu.WGMMAAccumulator.from_registers(acc)
    a = private.wgmma_fence(a)
    registers, i64 = accumulators._value.registers.copy(), ir.IntegerType.get_signless(64)
    for first in range(0, k, step):
        offset = mgpu.utils.c(mma_utils.encode_addr(first // step * stride), i64)
        part = a[:, first : first + step]
        registers = private.wgmma_m64(registers, part, arith.addi(descriptor, offset), **fixed)
    whole = mgpu.FragmentedArray(_registers=registers, _layout=accumulators._value.layout, _is_signed=None)
    original = accumulators._original_layout
    return private.WGMMAAccumulator(_value=whole, _original_layout=original, _sync=False).value


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads a whole reference in a Mosaic GPU kernel into registers, with the given layout."""
    indices: tuple[Any, ...] = () if JAX_VERSION >= (0, 11) else ((),)
    loaded: jax.Array = plgpu.load(ref, *indices, layout=layout, optimized=False)
    return loaded


def store(ref: Any, value: jax.Array) -> None:
    """Stores an array from registers to a reference in a Mosaic GPU kernel, however narrow or unaligned its rows are.

    From 0.12 on, ``ref[...] = value`` rejects stores that are not fast.
    """
    if JAX_VERSION >= (0, 12):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def load_run(ref: Any, start: Any, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """Loads an array of this shape into registers from a flat reference in a Mosaic GPU kernel, starting at `start`."""
    run = ref.at[pl.ds(start, math.prod(shape))]
    if interprets():  # The interpreter cannot reshape references.
        return load(run, None).reshape(shape)
    return load(run.reshape(shape), layout)


def store_run(ref: Any, start: Any, value: jax.Array) -> None:
    """Stores an array from registers to a flat reference in a Mosaic GPU kernel, starting at `start`."""
    run = ref.at[pl.ds(start, value.size)]
    if interprets():
        store(run, value.reshape(-1))
    else:
        store(run.reshape(value.shape), value)


_JAX_GPU_KERNELS = "jax.experimental.pallas.ops.gpu"


@functools.cache
def jax_gpu_kernels_missing(name: str) -> str | None:
    """Returns why a module of JAX's own Pallas kernels for GPUs cannot be imported; None if it can."""
    # They import JAX's utilities for tests, which import absl.
    if not importlib.util.find_spec("absl"):
        return "is part of JAX's own kernels, which need absl-py"
    found = importlib.util.find_spec(f"{_JAX_GPU_KERNELS}.{name}")
    return None if found else f"is a kernel of JAX, and jax {jax.__version__} has no {_JAX_GPU_KERNELS}.{name}"


@functools.cache
def jax_gpu_kernel(name: str) -> Any:
    """Returns a module of JAX's own Pallas kernels for GPUs: "ragged_dot_mgpu"."""
    return importlib.import_module(f"{_JAX_GPU_KERNELS}.{name}")


def writing_over(run: Callable[..., Any]) -> Any:
    """Jits `run` with an additional first argument: donated buffers that become the memory of the results.

    There is one buffer for each result: an array or a tuple of them, as the results are. Elements that `run` does not
    write keep the buffer's content, provided that `run` writes its result directly: slices and casts afterwards are
    written elsewhere. Buffers are donated although nothing reads them, which costs no time. JAX donates on CPUs, GPUs
    and TPUs; on another platform it warns, and the results get memory of their own.
    """
    return jax.jit(lambda buffers, *args: run(*args), donate_argnums=0, keep_unused=True)


def device_seconds(call: Callable[[], Any], repetitions: int, *, ahead: Ahead | None = None) -> list[float]:
    """Returns the kernel time in seconds of each of `repetitions` calls, summed over kernels: see `device_kernels`."""
    return [sum(seconds for _, seconds in kernels) for kernels in device_kernels(call, repetitions, ahead=ahead)]


class Ahead(NamedTuple):
    """Work that the device does while calls are launched.

    Attributes:
      launch: launches it, without waiting for it.
      kernels: the number of its kernels.
    """

    launch: Callable[[], Any]
    kernels: int


def kernel_recorder() -> Any:
    """Returns the extension of Mosaic GPU that records kernels by CUPTI."""
    from jax._src.lib import mosaic_gpu

    return getattr(mosaic_gpu, "_mosaic_gpu_ext")  # noqa: B009 (private, and unknown to type checkers)


def device_kernels(
    call: Callable[[], Any], repetitions: int, *, ahead: Ahead | None = None
) -> list[list[tuple[str, float]]]:
    """Returns the name and time in seconds of each kernel that each of `repetitions` calls runs, in order, from CUPTI.

    CUPTI stays attached between calls (attaching takes longer than measuring), so a process that uses this function can
    use no other profiler.

    Args:
      ahead: is launched before the calls. If it runs until all calls are launched, the calls run without gaps.

    Raises:
      RuntimeError: no kernel was recorded, or calls differ in their number of kernels.
    """
    recorder = kernel_recorder()
    jax.block_until_ready(call())
    recorder._cupti_init()
    try:
        result = ahead and ahead.launch()
        for _ in range(repetitions):
            result = call()
        jax.block_until_ready(result)
    finally:
        recorded = recorder._cupti_get_timings(False)
    kernels = (recorded or [])[ahead.kernels if ahead else 0 :]
    if not kernels or len(kernels) % repetitions:
        raise RuntimeError(f"CUPTI recorded {len(kernels)} kernels in {repetitions} calls")
    each = len(kernels) // repetitions
    timed = [(str(name), ms * 1e-3) for name, ms in kernels]
    return [timed[i * each : (i + 1) * each] for i in range(repetitions)]


def alike(args: Sequence[Any]) -> tuple[Any, ...]:
    """Casts arguments so that all vary over the same manual mesh axes, as inside a `shard_map`."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in args]
    union = frozenset[Any]().union(*varying)
    return tuple(
        x if axes == union else lax.pcast(x, tuple(sorted(union - axes)), to="varying")
        for x, axes in zip(args, varying, strict=True)
    )


def result_aval(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.core.ShapedArray:
    """Returns an abstract value that varies over the same manual mesh axes as the abstract value `like`."""
    unsharded = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    aval: jax.core.ShapedArray = like.update(shape=shape, dtype=dtype, weak_type=False, sharding=unsharded)
    return aval


def key_functions(dtype: Any) -> Any:
    """Returns the implementation of random keys of a dtype: its functions `random_bits`, `split` and `fold_in`."""
    return dtype._impl


def has_explicit_axes(args: Sequence[Any]) -> bool:
    """Returns whether an argument's type names a mesh with explicit axes: its operations must declare a sharding."""
    return any(is_explicit(jax.typeof(x).sharding.mesh) for x in args)


def is_explicit(mesh: Any) -> bool:
    """Returns whether an axis of a mesh is explicit."""
    return AxisType.Explicit in mesh.axis_types


def names_sharding(out_sharding: Any) -> bool:
    """Returns whether this parameter of an equation divides its result: on automatic axes XLA decides that."""
    mesh = getattr(out_sharding, "mesh", None)  # a `PartitionSpec` has none
    return out_sharding is not None and (mesh is None or is_explicit(mesh))


def is_partitioned(axis_context: Any) -> bool:
    """Returns whether XLA will partition the computation itself, so that only operations known to XLA may be in it."""
    if (devices := getattr(axis_context, "num_devices", None)) is not None:  # jit
        return bool(devices != 1)
    manual = getattr(axis_context, "manual_axes", None)  # shard_map
    return manual is None or set(axis_context.mesh.axis_names) != set(manual)


def lower(run: Callable[..., Sequence[jax.Array]], ctx: Any, args: Sequence[Any]) -> Any:
    """Lowers `run`, which returns all results, in place of a primitive with several.

    `run` gets operands that vary over no manual axis, with that check disabled: a kernel need not support `shard_map`.
    """
    from jax._src import config

    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    with config._check_vma(False), formulas():
        return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=plain), *args)


# The equation of `jax.lax.ragged_dot_general`.
RAGGED_DOT_GENERAL: Primitive = private_lax.ragged_dot_general_p

# The equations of ``jax.nn.dot_product_attention(implementation="cudnn")`` and of its gradients.
CUDNN_ATTENTION: Primitive = cudnn._dot_product_attention_fwd_p_wrapper
CUDNN_ATTENTION_BACKWARD: Primitive = cudnn._dot_product_attention_bwd_p_wrapper


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *lengths: jax.Array,
    scale: float,
    causal: bool,
    window: int | None,
    with_lse: bool,
) -> tuple[jax.Array, Any]:
    """Computes attention by cuDNN, and its log-sum-exp.

    The results are ``[batch, q_len, heads, head_dim]`` and ``float32[batch, heads, q_len]``. Binds JAX's own primitive
    without the checks before it: these check the default device instead of the device that the code is compiled for. It
    lowers only for an NVIDIA GPU.

    Args:
      lengths: none, or those of queries and of keys, ``int32[batch]`` each.
      window: keys that a query attends to, its own included; None is all.
      with_lse: compute the log-sum-exp; else it is None.
    """
    operands = (q, k, v, *_cudnn_rest(q, lengths))
    out, *lse = cudnn._dot_product_attention_fwd_p.bind(
        *operands, **_cudnn_params(scale, causal, window, bool(lengths)), is_training=with_lse
    )
    return out, lse[0] if with_lse else None


def cudnn_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of q, k and v, from the results of `cudnn_attention`."""
    operands = (q, k, v, *_cudnn_rest(q, ()), lse, out, d_out)
    gradients = cudnn._dot_product_attention_bwd_p.bind(*operands, **_cudnn_params(scale, causal, window, False))
    return tuple(gradients)


def _cudnn_rest(q: jax.Array, lengths: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns bias, lengths, offsets and page tables; all are unused except possibly the lengths."""
    unused = jnp.zeros(0, q.dtype)
    return unused, *(lengths or (unused, unused)), unused, unused, unused, unused


def _cudnn_params(scale: float, causal: bool, window: int | None, padding: bool) -> dict[str, Any]:
    mask = ("PADDING_CAUSAL" if causal else "PADDING") if padding else ("CAUSAL" if causal else "NO_MASK")
    params: dict[str, Any] = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType[mask],
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if JAX_VERSION >= (0, 12):
        params |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return params


def let_policies_see(primitive: Primitive, product: Callable[..., tuple[Any, ...] | None]) -> None:
    """Makes policies of `jax.checkpoint` treat applications of `primitive` as the `dot_general` that they compute.

    JAX's policies recognise dots by their primitive. So the rule by which `jax.checkpoint` partitions an application
    passes that `dot_general` to the policy, and otherwise equals JAX's own. A JAX without a table of such rules passes
    `primitive`, which no policy for dots saves: products are then recomputed, and nothing else changes.

    Args:
      primitive: a JAX primitive with multiple results and no effects.
      product: from an application's parameters to two operands' shapes and dtypes, and dimension numbers; None for no
        dot.
    """
    if (rules := getattr(partial_eval, "partial_eval_jaxpr_custom_rules", None)) is None:
        return

    def divide(policy: Any, unknown: Sequence[bool], there: Sequence[bool], eqn: Any) -> tuple[Any, ...]:
        """Returns the forward and backward equations, which results are unknown or saved, and the residuals."""
        every, none = [True] * len(eqn.outvars), [False] * len(eqn.outvars)
        missing = [x for x, is_there in zip(eqn.invars, there, strict=True) if not is_there]
        if any(unknown):
            return None, eqn, every, every, missing
        seen, operands = eqn, [x.aval for x in eqn.invars]
        if (dot := product(**eqn.params)) is not None:
            *factors, numbers = dot
            (seen,) = jax.make_jaxpr(functools.partial(lax.dot_general, dimension_numbers=numbers))(*factors).eqns
            operands = [x.aval for x in seen.invars]
        answer = policy(seen.primitive, *operands, **seen.params)
        if isinstance(answer, ad_checkpoint.Offloadable):
            away, back, kept = _moved(eqn, answer)
            return away, back, none, every, kept
        if answer is True or isinstance(answer, type(ad_checkpoint.Saveable)):
            return eqn, None, none, none, []
        return eqn, eqn, none, every, missing

    rules[primitive] = divide


def _moved(eqn: Any, to: Any) -> tuple[Any, Any, Any]:
    """Returns `eqn` with its results copied to the given memory; the copy back; and the copies to keep."""
    away, back = (jax.memory.Space.Host if "host" in kind else jax.memory.Space.Device for kind in (to.dst, to.src))

    def both(*args: Any) -> Any:
        results = eqn.primitive.bind(*args, **eqn.params)
        return *results, *jax.device_put(results, away)

    (computed,) = jax.make_jaxpr(jax.jit(both))(*(x.aval for x in eqn.invars)).eqns
    kept = computed.outvars[len(eqn.outvars) :]
    (fetched,) = jax.make_jaxpr(jax.jit(lambda *xs: jax.device_put(xs, back)))(*(x.aval for x in kept)).eqns
    computed = computed.replace(invars=eqn.invars, outvars=[*eqn.outvars, *kept])
    return computed, fetched.replace(invars=kept, outvars=eqn.outvars), kept


def value_of_first_process(name: str, own: str, *, timeout_s: float = 60.0) -> str:
    """Returns the value of `own` in process 0 of this JAX job; every process of the job must call this.

    Raises:
      RuntimeError: process 0 did not call within `timeout_s` (seconds).
    """
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return own
    if jax.process_index() == 0:
        client.key_value_set(f"tile-scheduler/{name}", own)
        return own
    return str(client.blocking_key_value_get(f"tile-scheduler/{name}", int(timeout_s * 1000)))
