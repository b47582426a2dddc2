"""Studies of the time and memory that single parts of the project take."""
