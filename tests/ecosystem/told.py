"""A replay device that is told in the prompt what to say, so that a client program alone decides what a test plays.

Between `@@` and `@@` in the last prompt text stands a JSON object: `say` (text), `every` and `delay` (seconds),
`finish` (`stop`, `length`, or `error` after the text).
"""

from __future__ import annotations

import json
import re
from typing import Any

from blink_proto import arena
from blink_proto.arena import ErrorCode, Finish
from tests import tiny_text
from tests.replay import ReplayDevice, Script, Submission

WINDOW = 4096
SIZES = arena.Sizes(channels=4, submit_slots=256, cancel_slots=256, log_slots=4096, heap_tokens=65536)
_TOLD = re.compile(r"@@(.*?)@@", re.DOTALL)


def make_told_device(vocab_size: int = 0) -> ReplayDevice:
    """A running device that does as it is told, and says `hello` otherwise. Tokens over those of `tiny_text` say
    nothing to it."""
    device = ReplayDevice(SIZES, vocab_size or tiny_text.vocab_size(), WINDOW)
    device.script = script
    device.start()
    return device


def order(say: str) -> str:
    """A prompt that has the device say something."""
    return f"@@{json.dumps({'say': say})}@@"


def script(submission: Submission) -> Script:
    """What the prompt asks for; the last order counts."""
    text = tiny_text.tokenizer().decode(list(submission.prompt), skip_special_tokens=True)
    orders = _TOLD.findall(text)
    asked: dict[str, Any] = json.loads(orders[-1]) if orders else {}
    tokens = tiny_text.ids(asked.get("say", "hello"))
    how = {"every": asked.get("every", 0.0), "delay": asked.get("delay", 0.0)}
    finish = asked.get("finish", "stop")
    if finish == "error":
        return Script(tokens, Finish.ERROR, end_apart=True, error=ErrorCode.BAD_MAX_TOKENS, **how)
    if finish == "length":
        return Script(tokens, Finish.LENGTH, **how)
    return Script([*tokens, tiny_text.special(tiny_text.END)], **how)
