"""Flash attention forward: ``FLASH_ATTENTION``, its problem and its kernels."""

from search_spaces import jax_compat
from search_spaces.flash_attention import front_end, kernels, recognise
from search_spaces.flash_attention.hopper import MosaicGpuFlashAttention, MosaicGpuFlashDecoding
from search_spaces.flash_attention.kernels import CudnnFlashAttention, InterpretedFlashAttention, XlaFlashAttention
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.flash_attention.tpu import MosaicTpuFlashAttention
from search_spaces.operation import Operation

FLASH_ATTENTION = Operation[FlashAttentionProblem](
    name="flash_attention",
    problem=FlashAttentionProblem,
    kernels=(
        MosaicGpuFlashAttention(),
        MosaicGpuFlashDecoding(),
        CudnnFlashAttention(),
        MosaicTpuFlashAttention(),
        InterpretedFlashAttention(),
        XlaFlashAttention(),
    ),
    params=("scale", "softcap"),
    vjp_params=("deterministic",),
    batch=front_end.batch,
    vjp_fwd=front_end.vjp_fwd,
    vjp_bwd=front_end.vjp_bwd,
    front_end=front_end.bind,
    equations={jax_compat.CUDNN_ATTENTION: kernels.problem_of_equation},
    recognise=recognise.recognise,
    shard=front_end.shard,
)

__all__ = ["FLASH_ATTENTION", "FlashAttentionProblem"]
