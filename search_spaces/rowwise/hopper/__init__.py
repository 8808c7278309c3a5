"""Row-wise kernels for NVIDIA Hopper (sm_90): register-resident, SMEM-resident, and persistent pipelines.

See docs/results.md for expected performance.
"""
