"""Where schedules went, and what is missing here, for a person to read."""
