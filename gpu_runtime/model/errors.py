"""What can be wrong with a model."""

from __future__ import annotations


class ModelError(ValueError):
    """The model is missing, broken or of a kind that is not supported; the message says which and what to do."""
