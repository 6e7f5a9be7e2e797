"""Parts of `python -m tests.bench.front_end`: a paced device whose tokens tell when they were written, a client that
takes note of when each arrives, and the scenarios."""
