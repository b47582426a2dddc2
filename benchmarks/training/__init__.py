"""Studies of training with λ-GELU."""
