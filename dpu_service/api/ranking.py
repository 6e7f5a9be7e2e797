"""`best_of`: which of the choices that were made are answered."""

from __future__ import annotations

from msgspec.structs import replace

from dpu_service.api.answers import Piece


def best(made: list[Piece], scores: list[float], each: int, kept: int) -> list[Piece]:
    """The best choices of each prompt, best first, with the indices that they have in the answer.

    Args:
        made: the choices in order: index = prompt · each + choice.
        scores: of each of them; of equal ones the earlier counts as better.
        kept: choices of each prompt to keep.
    """
    if kept == each:
        return made
    answered: list[Piece] = []
    for first in range(0, len(made), each):
        order = sorted(range(first, first + each), key=lambda i: -scores[i])
        answered += [replace(made[i], index=len(answered) + place) for place, i in enumerate(order[:kept])]
    return answered
