"""Who shares cached prompts with whom: an answer comes sooner when its prompt is in the device's prefix cache, and so
tells what others have asked."""

from __future__ import annotations

from hashlib import sha256


def cache_salt(tenant: str, given: str | None) -> int:
    """Only requests with the same one share: those of one tenant that name the same `cache_salt`.

    64 bits of a hash in which one's end cannot pass for the other's beginning; 0 for nobody's requests without one.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, given or "")]
    if not any(parts):
        return 0
    digest = sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
    return int.from_bytes(digest[:8], "little")
