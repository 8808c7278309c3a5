"""Flash attention forward on Hopper: warp-specialized Mosaic GPU kernels and their schedules."""

from search_spaces.flash_attention.hopper.launch import MosaicGpuFlashAttention
from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule

__all__ = ["FlashAttentionSchedule", "MosaicGpuFlashAttention"]
