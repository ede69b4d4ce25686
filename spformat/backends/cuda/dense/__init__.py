"""Products by way of a dense matrix."""
