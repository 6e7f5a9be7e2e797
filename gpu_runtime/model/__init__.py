"""Models: where they come from, their configuration, weights and layers."""
