"""Questions about the project, and the scripts that answer them by measuring; README.md lists them."""
