"""Selection of the schedule that runs a call."""
