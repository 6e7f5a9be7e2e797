"""Log-probabilities as they stand in the token log: records of their own behind their token's."""

from __future__ import annotations

import struct
from typing import NamedTuple

from blink_proto import arena
from dpu_service.channel.log import Record


class Logprob(NamedTuple):
    """A token id, the natural logarithm of its probability, and its rank (1: the most likely one)."""

    token: int
    logprob: float
    rank: int


class Group(NamedTuple):
    """A record and the log-probabilities behind it: the token's own first, then the most likely ones."""

    record: Record
    logprobs: list[Logprob]


def grouped(records: list[Record]) -> tuple[list[Group], int]:
    """The records with theirs, and how many log-probabilities came before any other record."""
    groups: list[Group] = []
    orphans = 0
    for record in records:
        if record.kind != arena.RecordKind.LOGPROB:
            groups.append(Group(record, []))
        elif groups:
            groups[-1].logprobs.append(_decode(record))
        else:
            orphans += 1
    return groups, orphans


def _decode(record: Record) -> Logprob:
    """The fields of a token record, read as those of a LOGPROB record (LogprobHead, LogprobBody)."""
    (logprob,) = struct.unpack("<f", struct.pack("<I", record.sequence))
    return Logprob(record.token, logprob, record.detail << 8 | record.finish)


def fault_of_logprobs(logprobs: list[Logprob], wanted: int, vocab_size: int) -> str:
    """What about a token's log-probabilities cannot be, or an empty string."""
    if len(logprobs) != wanted:
        return f"{len(logprobs)} log-probabilities where {wanted} were asked for"
    if any(entry.token >= vocab_size for entry in logprobs):
        return "log-probability of a token outside the vocabulary"
    return "" if all(entry.logprob <= 0 for entry in logprobs) else "log-probability that is none"
