"""What kernels whose result rows each follow from one operand row have in common."""
