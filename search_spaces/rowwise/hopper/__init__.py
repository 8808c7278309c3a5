"""Row-wise kernels for NVIDIA Hopper (sm_90): register-resident, SMEM-resident, and persistent pipelines.

What to expect of them on a device is in docs/rows.md.
"""
