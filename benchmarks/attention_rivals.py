"""Attention of ours and of the rivals as one operation each way: timed by one bench, on the same buffers."""

from __future__ import annotations

from jax_attention import JAX_ATTENTION
from tokamax_attention import TOKAMAX_ATTENTION

from search_spaces import Operation
from search_spaces.flash_attention import FLASH_ATTENTION, FlashAttentionProblem
from search_spaces.flash_attention_backward import FLASH_ATTENTION_BACKWARD, FlashAttentionBackwardProblem

# By the name that figures have: kernels whose schedules are all timed, the fastest counts. cuDNN is one of ours.
RIVALS = {"jax": JAX_ATTENTION, "tokamax": TOKAMAX_ATTENTION}
FORWARD = Operation("attention_and_rivals", FlashAttentionProblem, (*FLASH_ATTENTION.kernels, *RIVALS.values()))
BACKWARD = Operation("attention_backward_and_rivals", FlashAttentionBackwardProblem, FLASH_ATTENTION_BACKWARD.kernels)
