"""Branch and bound on a fixed root: one relaxation for a whole tree, and multipliers as the proof of every leaf."""
