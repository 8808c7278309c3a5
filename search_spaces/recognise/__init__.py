"""Recognition of operations in the jaxpr of plain JAX code: arrays, the equations that make them, and patterns."""
