"""From files and modules to flat networks."""
