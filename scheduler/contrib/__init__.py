"""Parts of the scheduler that few need; each is imported by name."""
