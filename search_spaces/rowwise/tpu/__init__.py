"""Kernels for TPUs of operations whose result rows each follow from one row of each operand."""
