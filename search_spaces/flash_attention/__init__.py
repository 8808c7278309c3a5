"""Flash attention forward."""
