"""Selects a schedule without measuring, from the cost model and from records of similar problems."""
