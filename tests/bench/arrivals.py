"""When requests are due, and what they ask."""

from __future__ import annotations

import random
from collections.abc import Iterator

# Everyday words that common tokenizers keep whole, so that a prompt of n words is about n tokens. The server's own
# count (`usage.prompt_tokens`) is what the report shows.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also well many must before back through years where much your way down should "
    "because long each just state people those how too little world good very make year still see own work men day"
)
WORDS = tuple(_TEXT.split())


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless seconds since the start at which requests are due, `rate` a second on average.

    Gaps between arrivals of a Poisson process are independent and exponentially distributed with mean 1/rate.
    """
    if not rate > 0:
        raise ValueError("the rate must be above 0 requests a second")
    source = random.Random(seed)
    due = 0.0
    while True:
        due += source.expovariate(rate)
        yield due


def prompts(words: int, seed: int) -> Iterator[str]:
    """Endless prompts of `words` words, each different, so that no prefix cache shortens the work."""
    source = random.Random(seed)
    while True:
        yield " ".join(source.choices(WORDS, k=words))
