"""What kernels by warp-level MMA share: copies by cp.async, fragments by ldmatrix, tiles of results as rows."""
