"""Attention on TPUs: one Mosaic kernel for many queries and for few, with its schedules."""

from search_spaces.flash_attention.tpu.launch import MosaicTpuFlashAttention
from search_spaces.flash_attention.tpu.schedule import TpuFlashAttentionSchedule

__all__ = ["MosaicTpuFlashAttention", "TpuFlashAttentionSchedule"]
