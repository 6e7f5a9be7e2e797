"""The contract between `dpu_service` and `gpu_runtime`: the gRPC control plane and the arena's layout."""
