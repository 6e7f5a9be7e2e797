"""`blinkctl watch`: rates, queue, KV use and latencies as they go."""
