"""The attention gradients on Hopper: a warp-specialized Mosaic GPU kernel and its schedule."""

from search_spaces.flash_attention_backward.hopper.launch import MosaicGpuFlashAttentionBackward
from search_spaces.flash_attention_backward.hopper.plan import FlashAttentionBackwardSchedule

__all__ = ["FlashAttentionBackwardSchedule", "MosaicGpuFlashAttentionBackward"]
