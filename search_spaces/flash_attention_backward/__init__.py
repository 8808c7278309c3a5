"""Flash attention backward."""
