"""The control plane: gRPC for set-up and administration; nothing here runs for a request."""
