"""Studies of what single parts of the project cost."""
