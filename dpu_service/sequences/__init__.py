"""Sequences for whoever wants text: a bounded queue before the channel, and the way of tokens back to requests."""
