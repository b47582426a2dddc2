"""Studies: many trainings of many arms, whose networks are asked the same questions; described in one file."""
