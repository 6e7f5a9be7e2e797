"""The OpenAI-compatible API: requests, their checks, and answers; no sockets."""
