"""What attention forward and backward share: the problem, which keys a query sees, and the formula in float32."""
