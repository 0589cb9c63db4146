"""A load generator for OpenAI-compatible servers; ``benchmarks/http_load.py`` is its command."""
