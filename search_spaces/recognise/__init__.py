"""What plain JAX computes, seen in a jaxpr: arrays and what makes them, and patterns of several operations."""
