"""Code shared by kernels in which each result row depends on one operand row."""
