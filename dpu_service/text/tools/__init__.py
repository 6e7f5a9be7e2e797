"""Tool calls in what a model writes: one file for each format, and which model writes which."""
