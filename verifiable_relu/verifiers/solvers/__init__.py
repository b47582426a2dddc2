"""The solvers z3 and HiGHS, each imported in a process of its own; what they are asked is plain data."""
