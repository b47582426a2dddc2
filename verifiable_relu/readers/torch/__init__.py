"""Networks from torch modules."""
