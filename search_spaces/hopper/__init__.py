"""Building blocks shared by the Mosaic GPU kernels for Hopper."""
