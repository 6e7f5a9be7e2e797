"""The GPU runtime: loads models, runs the chain, and idles."""
