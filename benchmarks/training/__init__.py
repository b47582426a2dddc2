"""Studies of what training with λ-GELU does."""
