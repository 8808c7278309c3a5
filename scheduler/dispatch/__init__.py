"""From a call to the schedule that answers it."""
