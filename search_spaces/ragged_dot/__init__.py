"""Grouped products: rows times the matrix of their group."""
