"""Rebuilds a Hugging Face `tokenizer.json` from the metadata of a GGUF file (byte-level BPE vocabularies)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from gpu_runtime.model.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Splitting rules by the value of tokenizer.ggml.pre; the patterns are those of the models' own tokenizer.json.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` fields describe.

    Raises:
        ModelError: another kind of tokenizer, or a splitting rule that is not known here.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(f"GGUF tokenizer {kind!r} is not supported; use the model's Hugging Face folder")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("the GGUF vocabulary names a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre not in _PATTERNS:
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported; use the model's Hugging Face folder")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Content of `tokenizer_config.json`: special tokens and the chat template."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def named(key: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    made: dict[str, Any] = {
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(fields.get("tokenizer.chat_template"), str):
        made["chat_template"] = fields["tokenizer.chat_template"]
    return made
