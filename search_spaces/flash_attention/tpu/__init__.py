"""Flash attention forward on TPUs: one Mosaic kernel for prefill and decode, and its schedule."""

from search_spaces.flash_attention.tpu.kernel import MosaicTpuFlashAttention
from search_spaces.flash_attention.tpu.space import TpuFlashAttentionSchedule

__all__ = ["MosaicTpuFlashAttention", "TpuFlashAttentionSchedule"]
