"""The command line. Commands parse, call and print; what takes long to import (JAX, SQLAlchemy, Optuna) they import
where they need it.
"""

import os

# Before NumPy is loaded, here and in workers, which get it with the environment. After each solution of equations
# OpenBLAS's threads, one a core, spin for some 0.1 s: in a job on four GPUs they took 12 of 64 cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
