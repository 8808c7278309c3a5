"""Persistent records and trials, and leases that let one process at a time tune a problem."""
