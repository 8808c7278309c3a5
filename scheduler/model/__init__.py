"""The cost model: lower bounds, predicted times, and pruning of schedules for a chip."""
