"""Answers as the document describes them. They are only described with these: what writes them is beside each
endpoint, and the tests hold real answers against both."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Annotated[
    Literal["stop", "length"],
    Meta(description="stop: an end token or a stop string; length: `max_tokens` or the context window."),
]
ChatFinishReason = Annotated[
    Literal["stop", "length", "tool_calls"],
    Meta(description="As in completions; tool_calls: instead of stop where the answer has calls."),
]
Index = Annotated[int, Meta(ge=0, description="Prompt · `n` + choice.")]
Count = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(Struct):
    """Of the tokens of the prompts."""

    cached_tokens: Annotated[int, Meta(ge=1, description="Not computed, since the device had them in its cache.")]


class Usage(Struct):
    """Tokens that were read and made. A token that ended the answer counts."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: Annotated[
        PromptTokensDetails | UnsetType, Meta(description="Where the device had some of the prompts in its cache.")
    ] = UNSET


class CompletionLogprobs(Struct):
    """One item of each list for each token."""

    text_offset: Annotated[list[Count], Meta(description="Where the token begins in the choice's text, in characters.")]
    token_logprobs: list[float | None]
    tokens: Annotated[list[str], Meta(description="`bytes:` and `\\xNN` where a token is no whole text.")]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """A token of the prompt, or one that could have stood there; its id is the key. Null for the first token."""

    logprob: Annotated[float, Meta(le=0)]
    rank: Annotated[int, Meta(ge=1, description="1 for the most likely token.")]
    decoded_token: str


class CompletionChoice(Struct):
    """One answer, or in a stream the next part of one."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[FinishReason | None, Meta(description="Null in a stream until the answer ends.")]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionAnswer(Struct):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Meta(description="Unix seconds.")]
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct):
    """Event of a stream of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChoice], Meta(max_length=1)]
    usage: Annotated[
        Usage | UnsetType | None, Meta(description="With `include_usage`: null, and the sums in the last chunk.")
    ] = UNSET


class Likely(Struct):
    """A token that could have stood here."""

    token: str
    logprob: Annotated[float, Meta(le=0)]
    bytes: Annotated[list[Annotated[int, Meta(ge=0, le=255)]] | None, Meta(description="The token's own UTF-8.")]


class ChatLogprob(Likely):
    """A generated token."""

    top_logprobs: list[Likely]


class ChatLogprobs(Struct):
    """One entry for each token."""

    content: list[ChatLogprob] | None
    refusal: None = None


class AnsweredFunction(Struct):
    """What is called. The model may have written arguments that are no JSON or do not fit the function."""

    name: str
    arguments: str


class AnsweredCall(Struct):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="Null where there are calls and no text.")]
    refusal: None = None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: Index
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatAnswer(Struct):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Meta(description="Unix seconds.")]
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class FunctionDelta(Struct):
    """`name` comes with the first part of a call; the arguments of all parts make the whole."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """The next part of a tool call; `id` and `type` come with the first one."""

    index: Annotated[int, Meta(ge=0, description="Of the call in its message.")]
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """The next part of a message; `role` comes first and once."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """The next part of one answer."""

    index: Index
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[ChatFinishReason | None, Meta(description="Null until the answer ends.")]


class ChatChunk(Struct):
    """Event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Meta(max_length=1)]
    usage: Annotated[
        Usage | UnsetType | None, Meta(description="With `include_usage`: null, and the sums in the last chunk.")
    ] = UNSET


class TokenizeAnswer(Struct):
    """The tokens of a prompt."""

    count: Count
    max_model_len: Annotated[int, Meta(description="The context window.")]
    tokens: list[Count]
    token_strs: Annotated[list[str | None] | None, Meta(description="Their names in the vocabulary, where wanted.")]


class DetokenizeAnswer(Struct):
    """The text of tokens."""

    prompt: str


class ModelCard(Struct):
    """A served model."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="Unix seconds of its loading.")]
    owned_by: str
    max_model_len: Annotated[int, Meta(description="The context window, prompt and answer together.")]
    architecture: str
    parameters: Count


class ModelList(Struct):
    """Answer of /v1/models; empty while no model is loaded."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Struct):
    """The process lives."""

    status: Literal["ok"]


class Ready(Struct):
    """Completions are taken."""

    status: Literal["ready"]


class NotReady(Struct):
    """Completions are not taken now."""

    status: Literal["not ready"]
    reason: str


class Version(Struct):
    """The server's version."""

    version: str


class Error(Struct):
    """What is wrong."""

    message: Annotated[str, Meta(description="For people; never holds prompt text.")]
    type: str
    param: Annotated[str | None, Meta(description="The field that is at fault.")]
    code: Annotated[str | None, Meta(description="For programs.")]


class ErrorAnswer(Struct):
    """Every answer that is no success, and the event in a stream that fails after its first token."""

    error: Error
