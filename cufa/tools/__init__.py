"""Command-line tools: ``python -m cufa TOOL``."""
