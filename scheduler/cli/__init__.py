"""The command line. Commands parse, call and print; what takes long to import (JAX, SQLAlchemy, Optuna) they import
where they need it.
"""
