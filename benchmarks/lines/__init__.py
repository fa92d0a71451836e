"""The lines of the benchmark, a module for each kind of work."""
