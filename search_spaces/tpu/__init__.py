"""What kernels for TPUs share."""
