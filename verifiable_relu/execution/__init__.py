"""Networks as runtimes compute them: the errors of their rounding, and their replay."""
