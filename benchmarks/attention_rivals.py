"""Attention of ours and of the rivals as one operation each way: timed by one bench, on the same buffers."""

from __future__ import annotations

from typing import Any

from jax_attention import JAX_ATTENTION
from tokamax_attention import TOKAMAX_ATTENTION, TOKAMAX_ATTENTION_BACKWARD

from search_spaces import Kernel, Operation
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem

# By the name that figures have: kernels whose schedules are all timed, the fastest counts. cuDNN is one of ours.
FORWARD_RIVALS: dict[str, Kernel[Any, Any]] = {"jax": JAX_ATTENTION, "tokamax": TOKAMAX_ATTENTION}
BACKWARD_RIVALS: dict[str, Kernel[Any, Any]] = {"tokamax": TOKAMAX_ATTENTION_BACKWARD}
RIVALS = tuple(FORWARD_RIVALS)  # those of either way
FORWARD = Operation("attention_and_rivals", FlashAttentionProblem, (*FLASH_ATTENTION.kernels, *FORWARD_RIVALS.values()))
BACKWARD = Operation(
    "attention_backward_and_rivals",
    FlashAttentionBackwardProblem,
    (*FLASH_ATTENTION_BACKWARD.kernels, *BACKWARD_RIVALS.values()),
)
