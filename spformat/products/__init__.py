"""What a product is, before any data: problems, plans, kernels and what they cost."""
