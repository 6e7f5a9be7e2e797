"""Measurements on a GPU: `python -m tests.bench.gpu`, or `make bench-gpu`."""
