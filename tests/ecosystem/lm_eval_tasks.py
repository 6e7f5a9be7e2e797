"""Two small tasks for lm-eval, and what it must find on a device whose scores are known."""

from __future__ import annotations

import json
from pathlib import Path

from tests import tiny_text
from tests.ecosystem import told
from tests.replay import Script, Submission

QUESTIONS = [
    ("the quick brown", [" fox", " dog", " the"]),
    ("Hello world, hello", [" there", " Alice", " Bob: User"]),
    ("the lazy", [" dog", " fox jumps"]),
    ("Alice: Bob:", [" User", " over the", " 😀"]),
]
WORDS = ["lazy dog", "Hello 😀", "two words"]


def score(token: int) -> float:
    """The log-probability of a token of a prompt, wherever it stands."""
    return -(token % 11 + 1) / 8


def script(asked: Submission) -> Script:
    """Scores the prompt, and says what it is told. The best token at each place is always token 7."""
    said = told.script(asked)
    table = [[(token, score(token)), *((7 + k, -k / 64) for k in range(21))] for token in asked.prompt[1:]]
    return Script(said.tokens, said.finish, prompt_logprobs=table)


def expected() -> list[list[float]]:
    """The log-likelihood of every choice of every question: the tokens that stand behind the question's own."""
    sums = []
    for question, choices in QUESTIONS:
        begun = len(tiny_text.ids(question))
        sums.append([sum(map(score, tiny_text.ids(question + choice)[begun:])) for choice in choices])
    return sums


def write(folder: Path) -> None:
    """The tasks `choose` and `say`, the tokenizer, and their data."""
    choose = [{"q": q, "choices": choices, "gold": 0} for q, choices in QUESTIONS]
    say = [{"q": told.order(word), "answer": word} for word in WORDS]
    _task(folder, "choose", choose, "multiple_choice", {"doc_to_choice": "choices", "doc_to_target": "gold"}, "acc")
    until = {"until": ["\n"], "max_gen_toks": 64}
    _task(folder, "say", say, "generate_until", {"doc_to_target": "answer", "generation_kwargs": until}, "exact_match")
    (folder / "tokenizer.json").write_bytes(tiny_text.files()["tokenizer.json"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tiny_text.BOS, "eos_token": tiny_text.EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _task(folder: Path, name: str, rows: list[dict[str, object]], kind: str, more: dict[str, object], by: str) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "q",
        "target_delimiter": "",
        "metric_list": [{"metric": by}],
        **more,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
