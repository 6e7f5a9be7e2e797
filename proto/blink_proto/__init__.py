"""The contract between `dpu_service` and `gpu_runtime`: the gRPC control plane and the arena's layout."""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of both programs; the same as the distribution's."""
