"""Flash attention backward: ``FLASH_ATTENTION_BACKWARD``, its problem and its kernels."""

from search_spaces import jax_compat
from search_spaces.flash_attention_backward import kernels, problem
from search_spaces.flash_attention_backward.kernels import (
    InterpretedFlashAttentionBackward,
    XlaFlashAttentionBackward,
)
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.operation import KernelName, Kernels, Operation

# Second derivatives are those of the library kernel.
FLASH_ATTENTION_BACKWARD = Operation[FlashAttentionBackwardProblem](
    name="flash_attention_backward",
    problem=FlashAttentionBackwardProblem,
    kernels=Kernels(
        KernelName(
            "mosaic_gpu", "cuda", "search_spaces.flash_attention_backward.hopper:MosaicGpuFlashAttentionBackward"
        ),
        KernelName("cudnn", "cuda", "search_spaces.flash_attention_backward.cudnn:CudnnFlashAttentionBackward"),
        InterpretedFlashAttentionBackward(),
        XlaFlashAttentionBackward(),
    ),
    params=("scale", "softcap"),
    batch=problem.batch,
    equations={jax_compat.CUDNN_ATTENTION_BACKWARD: kernels.problem_of_equation},
    shard=problem.shard,
)

__all__ = ["FLASH_ATTENTION_BACKWARD", "FlashAttentionBackwardProblem"]
