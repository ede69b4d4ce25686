"""What one addition costs: a format, edges, an operation and a kernel, added as the pages in docs/ say."""
