"""Training with λ-GELU and annealing; the command is ``python -m verifiable_relu.train``."""
