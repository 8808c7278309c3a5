"""The command line. Commands parse, call and print.

Slow imports (JAX, SQLAlchemy, Optuna) are inside the functions that need them.
"""

import os

# Must be set before NumPy is imported. Workers inherit it with the environment. OpenBLAS has one thread per core, and
# these threads spin for about 0.1 s after each linear solve. In a job on four GPUs, they took 12 of 64 cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
