"""Compiles, verifies and times candidates, in this process or in workers; candidates are chosen elsewhere."""
