"""Parts shared by attention forward and backward: the problem, the visible keys, and the formula in float32."""
