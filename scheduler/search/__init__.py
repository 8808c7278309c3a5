"""Searches for the fastest schedules on the device: one problem, and jobs of many problems."""
