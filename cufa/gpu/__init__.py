"""The GPU backend. Importing this package, or any module of it but `cards`, needs no CuPy."""
