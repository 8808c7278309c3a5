"""TPU kernels of operations in which each result row depends on one row of each operand."""
