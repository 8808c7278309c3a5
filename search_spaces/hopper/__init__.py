"""What Mosaic GPU kernels for Hopper share, whatever they compute."""
