"""Fetches the front end's metrics."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from blink_deploy.watching.histograms import Scrape, parse

MOST_BYTES = 8 << 20


class ScrapeError(Exception):
    """They cannot be fetched; says why, and nothing of the key."""


@dataclass(frozen=True)
class Metrics:
    """Where they are: a URL, the authorities of its certificate (PEM; empty: the system's), a file with an API key."""

    url: str
    ca: str = ""
    key_file: str = ""
    timeout: float = 2.0

    def fetch(self) -> Scrape:
        """One scrape.

        Raises:
            ScrapeError: no answer, or not such a one.
        """
        request = urllib.request.Request(self.url)
        try:
            if self.key_file:
                request.add_unredirected_header("Authorization", f"Bearer {Path(self.key_file).read_text().strip()}")
            context = ssl.create_default_context(cafile=self.ca or None) if self.url.startswith("https:") else None
            with urllib.request.urlopen(request, timeout=self.timeout, context=context) as answer:
                return parse(answer.read(MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            raise ScrapeError(f"metrics: status {error.code}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
            raise ScrapeError(f"metrics: {reason}") from error
