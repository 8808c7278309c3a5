"""A budget of trials spent on the device, the final comparison, and what is done for many problems."""
