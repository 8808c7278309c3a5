"""What a schedule costs on a chip: lower bounds, predicted seconds, and which schedules are left to try."""
