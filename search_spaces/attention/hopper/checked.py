"""What attention on Hopper has been checked for on a device: the rest answers only where it was measured."""

from __future__ import annotations

from search_spaces.attention.problem import AttentionProblem


def checked(p: AttentionProblem) -> bool:
    """Whether problems like `p` have run right on an NVIDIA H200: without lengths, and logits that nothing caps."""
    return not (p.q_lengths or p.kv_lengths or p.softcap)
