"""Row programs: kernels and gradients derived from functions of one row."""
