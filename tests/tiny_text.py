"""A small byte-level tokenizer with a chat template, made on the spot."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, START, END = "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CORPUS = ["the quick brown fox jumps over the lazy dog " * 4, "Hello world, hello there! Alice: Bob: User:\n" * 4]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE with all 256 bytes, a few merges, four control tokens and a BOS in front of plain text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in (EOS, BOS, START, END)],
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return made


@cache
def files() -> dict[str, bytes]:
    """As the control plane hands them out."""
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    return {"tokenizer.json": tokenizer().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def vocab_size() -> int:
    """Ids are below this."""
    size: int = tokenizer().get_vocab_size()
    return size


def ids(text: str) -> list[int]:
    """Tokens of a text, without BOS."""
    encoded: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return encoded


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = bytes_to_unicode()
    return [tokenizer().token_to_id(table[byte]) for byte in data]


def special(token: str) -> int:
    """Id of a control token."""
    found: int = tokenizer().token_to_id(token)
    return found
