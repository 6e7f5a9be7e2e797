"""What the device must not write: the outbound region is as little trusted as the inbound one is by the device."""

from __future__ import annotations

from collections.abc import Sequence as Items

from blink_proto import arena
from dpu_service.channel.log import Record


def fault_of(record: Record, vocab_size: int, tokens_left: int) -> str:
    """What about a record cannot be, or an empty string."""
    if record.finish not in arena.Finish._value2member_map_:
        return "unknown finish"
    if record.kind == arena.RecordKind.TOKEN:
        if record.token >= vocab_size:
            return "token outside the vocabulary"
        return "more tokens than asked for" if tokens_left < 1 else ""
    if record.kind == arena.RecordKind.PROMPT_TOKEN:
        return "a token of the prompt that is the last one" if record.finish != arena.Finish.NONE else ""
    if record.kind not in (arena.RecordKind.END, arena.RecordKind.REJECT):
        return "unknown record kind"
    if record.kind == arena.RecordKind.REJECT and record.finish != arena.Finish.ERROR:
        return "a refusal that is no error"
    return "an end without a reason" if record.finish in (arena.Finish.NONE, arena.Finish.STOP) else ""


def fault_of_cached(record: Record, prompt_tokens: int, block_tokens: int) -> str:
    """What about the cached tokens of a prompt cannot be: its last one is always computed."""
    impossible = record.kind == arena.RecordKind.TOKEN and record.detail * block_tokens >= prompt_tokens
    return "more cached tokens than the prompt has" if impossible and record.detail else ""


def fault_of_prompt(record: Record, prompt: Items[int], prompt_left: int) -> str:
    """What about a record cannot be while the log-probabilities of so many of the prompt's last tokens are due."""
    if record.kind == arena.RecordKind.PROMPT_TOKEN:
        if prompt_left < 1:
            return "log-probabilities of a prompt that nobody asked for"
        return "" if record.token == prompt[-prompt_left] else "a token that is not the prompt's next one"
    due = prompt_left > 0 and (record.kind == arena.RecordKind.TOKEN or record.finish == arena.Finish.LENGTH)
    return "log-probabilities of the prompt are missing" if due else ""
