"""The built-in default model's own tokenizer and template, compared with `transformers`."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blink_proto.tokenizer.files import BUNDLE_FILES
from dpu_service.text.bundle import TextBundle
from dpu_service.text.chat import ChatEncoder
from dpu_service.text.conversation import Conversation
from dpu_service.text.detokenize import ByteDetokenizer
from gpu_runtime.model.source import ModelFolder


@pytest.fixture(scope="module")
def bundle(default_model: ModelFolder) -> TextBundle:
    folder = default_model.path
    return TextBundle({name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()})


@pytest.fixture(scope="module")
def reference(default_model: ModelFolder) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(default_model.path))
    return loaded


@pytest.mark.parametrize("content", ["Hello!", "Wie geht's? 😀 漢字", "  two\n\nlines  ", "def f(x):\n\treturn x", ""])
def test_conversations(bundle: TextBundle, reference: PreTrainedTokenizerBase, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    encoder = ChatEncoder(bundle)
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encoder.encode(*encoder.render(Conversation(messages))) == wanted


def test_any_tokens_decode_alike(bundle: TextBundle, reference: PreTrainedTokenizerBase) -> None:
    chance = random.Random(5)
    for _ in range(200):
        ids = [chance.randrange(len(reference)) for _ in range(30)]
        detokenizer = bundle.detokenizer(True)
        assert isinstance(detokenizer, ByteDetokenizer)
        text = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush()
        assert text == bundle.tokenizer.decode(ids, skip_special_tokens=True)
