"""What the scripts of more than one study need."""
