"""The GPU backend. Importing this package, or any module of it but `launch`, needs no CuPy."""
