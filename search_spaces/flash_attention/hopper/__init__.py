"""Flash attention on Hopper."""
