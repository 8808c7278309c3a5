"""Candidates compiled, verified and timed, in this process or in workers; nothing here chooses a candidate."""
