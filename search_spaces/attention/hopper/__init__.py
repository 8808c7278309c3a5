"""What the attention kernels for Hopper share."""
