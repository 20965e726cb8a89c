"""The GPU backend. Importing it, or its modules but `cards` and `exchange`, needs no CuPy."""
