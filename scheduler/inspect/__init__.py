"""Explains search results, and reports missing parts of an installation."""
