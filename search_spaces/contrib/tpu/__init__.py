"""Kernels for TPUs, backend `mosaic_tpu`."""
