"""Flash attention forward on Hopper: warp-specialized Mosaic GPU kernels for prefill and decode."""

from search_spaces.flash_attention.hopper.decode import FlashDecodingSchedule, MosaicGpuFlashDecoding
from search_spaces.flash_attention.hopper.kernel import MosaicGpuFlashAttention
from search_spaces.flash_attention.hopper.schedule import FlashAttentionSchedule

__all__ = ["FlashAttentionSchedule", "FlashDecodingSchedule", "MosaicGpuFlashAttention", "MosaicGpuFlashDecoding"]
