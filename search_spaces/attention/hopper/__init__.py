"""Building blocks shared by the attention kernels for Hopper."""
