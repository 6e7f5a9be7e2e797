"""What transformers says: greedy tokens, and how near to the best token each token of a given answer was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the CPU."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, stop tokens included."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return made[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Rounded:
    """A model whose weights were rounded to bfloat16, computed in float32, and how far bfloat16 arithmetic is from it.

    The yardstick is transformers' own bfloat16 run of the same weights: `error` is the largest difference of a logit
    that it makes on the given texts. An answer of another bfloat16 implementation may differ from the exact one where
    two logits are nearer than what rounding can make of them, and nowhere else.
    """

    exact: Any
    bfloat16: Any

    @classmethod
    def load(cls, folder: Path) -> Rounded:
        """Both from one folder."""
        return cls(load(folder, torch.bfloat16).float(), load(folder, torch.bfloat16))

    def error(self, texts: Sequence[Sequence[int]]) -> float:
        """Largest difference of a logit between both, over all positions of the texts."""
        return max(float((self._logits(self.exact, t) - self._logits(self.bfloat16, t)).abs().max()) for t in texts)

    def shortfalls(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """For each token of an answer: how far its exact logit lies below the best, given what came before [tokens]."""
        logits = self._logits(self.exact, [*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(answer))[:, None])[:, 0]
        return logits.max(1).values - chosen

    @staticmethod
    def _logits(model: Any, text: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(text)])).logits[0].float()
