"""The training of networks with λ-GELU, whose λ is annealed; the command is ``python -m verifiable_relu.train``."""
