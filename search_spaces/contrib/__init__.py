"""Kernels that have not run on the chips they are for; each is imported by name."""
