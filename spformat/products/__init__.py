"""Products without data: problems, operations, plans, kernels and their expected times."""
