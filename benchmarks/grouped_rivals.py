"""Rivals of grouped products: JAX's and tokamax's kernels, verified and timed by one bench with ours.

JAX's are those of `jax.experimental.pallas.ops.gpu`, by some configurations of their own loops. tokamax's are
`tokamax.ragged_dot_general`, where tokamax is installed, by its own choice of a configuration and by some that its
autotuning tries. Boundaries start at row 0 here. JAX's gradient of the matrices is right for finite operands only.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.extend.backend
import jax.numpy as jnp

from search_spaces import Columns, Kernel, Operation, Space, Target, jax_compat
from search_spaces.ragged_dot import GATED_RAGGED_DOT, RAGGED_DOT, RAGGED_DOT_WEIGHTS
from search_spaces.ragged_dot.jax_kernels import JaxRaggedDot, JaxSchedule
from search_spaces.ragged_dot.problem import RaggedDotProblem, RaggedDotWeightsProblem

# Of JAX's loop: block_m, block_n, block_k, max_concurrent_steps, grid_block_n.
FORWARD = (
    (128, 128, 64, 4, 1),
    (128, 128, 64, 4, 4),
    (128, 192, 64, 4, 1),
    (64, 192, 64, 5, 1),
    (64, 128, 64, 6, 1),
    (128, 64, 64, 6, 1),
)
WEIGHTS = (
    (128, 128, 64, 4, 1),
    (128, 128, 64, 4, 4),
    (128, 128, 128, 2, 4),
    (128, 64, 64, 5, 4),
    (64, 128, 64, 5, 4),
    (64, 64, 64, 6, 4),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration of JAX's kernel, as text: block_m, block_n, block_k, max_concurrent_steps, grid_block_n."""

    config: str

    @property
    def schedule(self) -> JaxSchedule:
        return JaxSchedule(*map(int, self.config.split()))


def _configs(fitting: Iterable[tuple[int, ...]]) -> Space[Config]:
    return Space(Config, {"config": tuple(" ".join(map(str, each)) for each in fitting)})


class JaxForward(Kernel[RaggedDotProblem, Config]):
    backend = "jax"

    def __init__(self) -> None:
        self._kernel = JaxRaggedDot()

    def supports(self, problem: RaggedDotProblem, target: Target) -> str | None:
        return self._kernel.supports(problem, target) or _none_left(self.space(problem, target))

    def space(self, problem: RaggedDotProblem, target: Target) -> Space[Config]:
        whole = self._kernel.space(problem, target)
        return _configs(each for each in FORWARD if not whole.broken(JaxSchedule(*each)))

    def footprint(self, problem: RaggedDotProblem, schedules: Columns, target: Target) -> None:
        return None

    def run(
        self, problem: RaggedDotProblem, schedule: Config, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        found: jax.Array = jax_compat.jax_gpu_kernel("ragged_dot_mgpu").ragged_dot(
            lhs, rhs, group_sizes=jnp.diff(boundaries), transpose_rhs=problem.transpose_rhs, **vars(schedule.schedule)
        )
        return found


class JaxWeights(Kernel[RaggedDotWeightsProblem, Config]):
    backend = "jax"

    def supports(self, problem: RaggedDotWeightsProblem, target: Target) -> str | None:
        one = RaggedDotProblem(problem.rows, problem.groups, problem.k, problem.n, problem.dtype, problem.out_dtype)
        return JaxRaggedDot().supports(one, target) or _none_left(self.space(problem, target))

    def space(self, problem: RaggedDotWeightsProblem, target: Target) -> Space[Config]:
        p = problem
        return _configs(each for each in WEIGHTS if p.k % each[0] == 0 and p.n % each[1] == 0)

    def footprint(self, problem: RaggedDotWeightsProblem, schedules: Columns, target: Target) -> None:
        return None

    def run(
        self, problem: RaggedDotWeightsProblem, schedule: Config, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        lhs, rhs, boundaries = args
        theirs = jax_compat.jax_gpu_kernel("transposed_ragged_dot_mgpu")
        # It asks the default device how many cores there are, which need not be the chip it is lowered for.
        with mock.patch.object(theirs, "jax", _JaxOfCores(target.cores)):
            found: jax.Array = theirs.transposed_ragged_dot(
                lhs, rhs, group_sizes=jnp.diff(boundaries), **vars(schedule.schedule)
            )
        return found


class _JaxOfCores(types.ModuleType):
    """The module `jax` whose default device has this many cores."""

    def __init__(self, cores: int) -> None:
        super().__init__("jax")
        self.devices = lambda: [types.SimpleNamespace(core_count=cores)]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def _none_left(space: Space[Any]) -> str | None:
    return None if space.size else "has no configuration whose blocks divide this problem"


# ------------------------------------------------------------------------------
# tokamax.


MODULE = "tokamax._src.ops.ragged_dot"  # the public function takes its classes, and does not name them
DEFAULT = "default"
# Some of those that its autotuning tries on Hopper: block_m, block_k, num_stages, persistent, grid_minor_dim,
# grid_tile_width. block_n is 64 in all. Its blocks of 16 and 32 rows do not lower without quantization.
TOKAMAX = (
    (128, 128, 4, False, "M", 1),
    (128, 128, 4, True, "M", 1),
    (128, 128, 4, True, "N", 8),
    (64, 128, 4, True, "M", 1),
    (64, 128, 4, False, "N", 8),
    (64, 256, 2, True, "M", 1),
)
TOKAMAX_BLOCK_N = 64


@dataclasses.dataclass(frozen=True)
class TokamaxConfig:
    """A configuration as text, or "default": what its heuristics choose."""

    config: str


class Tokamax(Kernel[Any, TokamaxConfig]):
    """tokamax's Mosaic GPU kernel, forward or of either gradient, by name, so that no other takes its place."""

    backend = "tokamax"

    def supports(self, problem: Any, target: Target) -> str | None:
        if target.platform != "cuda" or target.architecture != "sm_90":
            return f"is timed on NVIDIA Hopper (sm_90), not on {target.kind} ({target.architecture})"
        if problem.dtype == "float32" or problem.out_dtype:
            return "is timed with 16-bit operands, and a result of their dtype"
        try:
            _tokamax()
        except ImportError as error:
            return f"needs tokamax (pip install tokamax): {error}"
        return None

    def space(self, problem: Any, target: Target) -> Space[TokamaxConfig]:
        return Space(TokamaxConfig, {"config": (DEFAULT, *(" ".join(map(str, each)) for each in TOKAMAX))})

    def footprint(self, problem: Any, schedules: Columns, target: Target) -> None:
        return None

    def run(self, problem: Any, schedule: TokamaxConfig, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        lhs, rhs, boundaries = args
        tokamax = _tokamax()
        base, theirs = (importlib.import_module(f"{MODULE}.{name}") for name in ("base", "pallas_mosaic_gpu"))
        if isinstance(problem, RaggedDotWeightsProblem):
            numbers = base.RAGGED_CONTRACTING_DOT_DIM_NUMS
        elif problem.transpose_rhs:
            numbers = base.TRANS_RHS_RAGGED_DOT_DIM_NUMS
        else:
            numbers = base.DEFAULT_RAGGED_DOT_DIM_NUMS
        kernel = theirs.PallasMosaicGpuRaggedDot(config=_config(theirs, schedule.config))
        # It asks the default device what it is, which need not be the chip it is lowered for.
        device = types.SimpleNamespace(
            platform="gpu", compute_capability="9.0", device_kind=target.kind, core_count=target.cores
        )
        with mock.patch.object(jax.extend.backend, "get_default_device", return_value=device):
            found: jax.Array = tokamax.ragged_dot_general(
                lhs,
                rhs,
                jnp.diff(boundaries),
                ragged_dot_dimension_numbers=numbers,
                preferred_element_type=lhs.dtype,
                implementation=(kernel,),
            )
        return found


def _config(theirs: Any, text: str) -> Any:
    if text == DEFAULT:
        return None
    block_m, block_k, num_stages, persistent, minor, width = text.split()
    return theirs.Config(
        block_m=int(block_m),
        block_n=TOKAMAX_BLOCK_N,
        block_k=int(block_k),
        num_stages=int(num_stages),
        split_k=1,
        persistent=persistent == "True",
        grid_minor_dim=theirs.common.MatmulDimension[minor],
        grid_tile_width=int(width),
    )


class _Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the profiler `xprof`, which tokamax imports and these calls do not use, as empty modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "xprof" else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def _tokamax() -> Any:
    missing = "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None
    if missing and not any(isinstance(each, _Stub) for each in sys.meta_path):
        sys.meta_path.append(_Stub())
    return importlib.import_module("tokamax")


# ------------------------------------------------------------------------------
# Ours and the rivals as one operation: workers find each by its name in this module.


def _with(operation: Operation[Any], rivals: Sequence[Kernel[Any, Any]]) -> Operation[Any]:
    return Operation(f"{operation.name}_and_rivals", operation.problem, (*operation.kernels, *rivals))


FORWARD_AND_RIVALS = _with(RAGGED_DOT, (JaxForward(), Tokamax()))
WEIGHTS_AND_RIVALS = _with(RAGGED_DOT_WEIGHTS, (JaxWeights(), Tokamax()))
GATED_AND_RIVALS = _with(GATED_RAGGED_DOT, ())
RIVALS = ("jax", "tokamax")
