"""Building blocks shared by the TPU kernels."""
