"""Data sets: the small one that comes with the package, and readers of those that do not."""
