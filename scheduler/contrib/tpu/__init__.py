"""TPUs: their rows of the hardware table, and times that their compiler estimates on a host without one."""
