"""Load generator for any OpenAI-compatible endpoint: `python -m tests.bench --help`."""
