"""What other engines reach on an H200: on one and the same machine, through HTTP, 512 tokens in, random weights.

The server had 12 cores and the client 4; "busy": 24 CPU and memory hogs on the server's cores. vLLM 0.26.0 and SGLang
0.5.17, bf16. Milliseconds.
"""

from __future__ import annotations

_TPOT = {
    ("Llama-3.1-8B", "vLLM"): {
        (1, False): 4.80,
        (8, False): 5.00,
        (64, False): 7.35,
        (1, True): 5.42,
        (64, True): 9.85,
    },
    ("Llama-3.1-8B", "SGLang"): {
        (1, False): 4.72,
        (8, False): 5.03,
        (64, False): 7.53,
        (1, True): 4.64,
        (64, True): 8.99,
    },
    ("Llama-3.2-1B", "vLLM"): {
        (1, False): 2.82,
        (8, False): 2.98,
        (64, False): 3.96,
        (1, True): 3.72,
        (64, True): 6.13,
    },
    ("SmolLM2-135M", "vLLM"): {
        (1, False): 1.75,
        (8, False): 2.03,
        (64, False): 3.08,
        (1, True): 4.45,
        (64, True): 4.75,
    },
}
_OPEN_LOOP = {  # Llama-3.1-8B at 16 requests/s, P99: quiet, busy
    ("ttft", "vLLM"): (109.0, 260.0),
    ("ttft", "SGLang"): (47.0, 89.0),
    ("gap", "vLLM"): (35.0, 67.0),
    ("gap", "SGLang"): (26.0, 37.0),
}
_READY_SECONDS = {("Llama-3.1-8B", "vLLM"): 106.0, ("Llama-3.1-8B", "SGLang"): 64.0}


def tpot(model: str, streams: int, busy: bool = False) -> dict[str, float]:
    """Time per output token by engine."""
    rows = {engine: row for (name, engine), row in _TPOT.items() if name == model}
    return {engine: row[streams, busy] for engine, row in rows.items() if (streams, busy) in row}


def open_loop(model: str, rate: float, figure: str, busy: bool) -> dict[str, float]:
    """P99 of the time to the first token (`ttft`) or of the gap between tokens (`gap`) by engine."""
    if (model, rate) != ("Llama-3.1-8B", 16.0):
        return {}
    return {engine: values[busy] for (name, engine), values in _OPEN_LOOP.items() if name == figure}


def ready_seconds(model: str) -> dict[str, float]:
    """From the start until requests are taken."""
    return {engine: seconds for (name, engine), seconds in _READY_SECONDS.items() if name == model}
