"""Studies of what the verifiers decide, and in what time."""
