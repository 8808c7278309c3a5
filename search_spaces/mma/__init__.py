"""Building blocks of kernels by warp-level MMA: copies by cp.async, fragments by ldmatrix, result tiles as rows."""
