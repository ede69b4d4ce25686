"""What may be done to a matrix before it is converted: lose values (masks), reorder, schedule. Formats never do."""
