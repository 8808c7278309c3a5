"""Searches for the fastest schedules on the device: one problem, ranges of problems, and jobs of many problems."""
