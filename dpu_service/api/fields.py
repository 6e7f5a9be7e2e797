"""Fields of requests: their ranges, which msgspec checks while it reads a body, and what they mean.

The document at /openapi.json is made from these. `extra_json_schema` holds what is checked elsewhere, because the
error should name the whole field or because it depends on the model.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

from blink_proto import arena
from dpu_service.api.bad_words import LONGEST_WORD
from dpu_service.api.bias import MAX_BIAS_VALUE

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_TEMPERATURE = 2.0

_TOKEN: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEXT: dict[str, Any] = {"type": "string"}

Model = Annotated[str, Meta(description="The served name, as /v1/models lists it.")]
MaxTokens = Annotated[
    int,
    Meta(
        description="Tokens to generate at most. Prompt and answer must fit the context window together; what does not "
        "is refused, not cut.",
        extra_json_schema={"minimum": 0},
    ),
]
Temperature = Annotated[
    float, Meta(ge=0, le=MAX_TEMPERATURE, description="Default 1. Below 0.001 the most likely token is taken.")
]
TopP = Annotated[float, Meta(gt=0, le=1, description="Sample from the most likely tokens of this mass. Default 1.")]
TopK = Annotated[int, Meta(ge=-1, description="Sample from this many most likely tokens. 0 and -1 switch it off.")]
MinP = Annotated[
    float, Meta(ge=0, le=1, description="Drop tokens below this share of the most likely one's probability.")
]
Seed = Annotated[
    int,
    Meta(
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        description="The same seed gives the same answer. Without one each choice draws its own.",
    ),
]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Choices for each prompt. Default 1.")]
BestOf = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_CHOICES,
        description="Make so many choices of each prompt and answer with the `n` of them that have the highest mean "
        "log-probability per token, best first. At least `n`; above `n` not with `stream`. `usage` counts all.",
    ),
]
_STOP = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_CHARACTERS})]
Stop = Annotated[
    _STOP | Annotated[list[_STOP], Meta(max_length=MAX_STOPS)],
    Meta(description="Texts that end the answer, which ends before them."),
]
StopTokens = Annotated[
    list[Annotated[int, Meta(extra_json_schema=_TOKEN)]],
    Meta(max_length=arena.MAX_STOP_TOKENS, description="Tokens that end the answer beside the model's own."),
]
KeepStop = Annotated[
    bool, Meta(description="The stop string, or the text of the stop token, is part of the answer. Default false.")
]
BadWords = Annotated[
    list[Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_WORD})]],
    Meta(
        max_length=arena.MAX_BIAS // 2,
        description="Words that are not generated, bare and behind a space. Of a word of several tokens the last one "
        "is not generated where the answer so far ends in the others.",
    ),
]
AllowedTokens = Annotated[
    list[Annotated[int, Meta(extra_json_schema=_TOKEN)]],
    Meta(
        description="No other token is generated.",
        extra_json_schema={"minItems": 1},
    ),
]
Penalty = Annotated[float, Meta(ge=-arena.MAX_PENALTY, le=arena.MAX_PENALTY, description="Default 0.")]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=arena.MAX_REPETITION_PENALTY, description="Default 1.")]
MinTokens = Annotated[
    int, Meta(ge=0, description="Neither stop tokens nor stop strings end the answer before so many tokens.")
]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(extra_json_schema={"minimum": -MAX_BIAS_VALUE, "maximum": MAX_BIAS_VALUE})]],
    Meta(
        description="Token id to what is added to its logit.",
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,11}$"}, "maxProperties": arena.MAX_BIAS},
    ),
]
TopLogprobs = Annotated[
    int,
    Meta(
        description="How many of the most likely tokens come with their log-probabilities.",
        extra_json_schema={"minimum": 0, "maximum": arena.MAX_TOP_LOGPROBS},
    ),
]
PromptLogprobs = Annotated[
    int,
    Meta(
        description="As `logprobs`, for the tokens of the prompt, in a field `prompt_logprobs` (see the answers).",
        extra_json_schema={"minimum": 0, "maximum": arena.MAX_TOP_LOGPROBS},
    ),
]
TokensAsIds = Annotated[bool, Meta(description="Write tokens of log-probabilities as `token_id:` and their id.")]
TruncatePrompt = Annotated[
    int,
    Meta(
        ge=-1,
        description="Keep only so many last tokens of the prompt; -1: as many as the context window leaves.",
        extra_json_schema={"not": {"const": 0}},
    ),
]
AddSpecial = Annotated[bool, Meta(description="Put BOS in front where the model's tokenizer does so. Default true.")]
Echo = Annotated[bool, Meta(description="The answer begins with the prompt's text, and `logprobs` with its tokens.")]
OneText = Annotated[str, Meta(description="A text.")]
Tokens = Annotated[
    list[Annotated[int, Meta(extra_json_schema=_TOKEN)]],
    Meta(description="Token ids, as many as the context window at most."),
]
TokenStrings = Annotated[bool, Meta(description="Give the tokens' names in the vocabulary too, as `token_strs`.")]
Prompt = Annotated[
    Raw,
    Meta(
        description="A text, token ids, or a list of either; each has answers of its own.",
        extra_json_schema={
            "anyOf": [
                _TEXT,
                {"type": "array", "minItems": 1, "items": _TEXT},
                {"type": "array", "minItems": 1, "items": _TOKEN},
                {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _TOKEN}},
            ]
        },
    ),
]
IgnoreEos = Annotated[bool, Meta(description="The model's own end tokens do not end the answer.")]
SkipSpecial = Annotated[bool, Meta(description="Leave control tokens out of the text. Default true.")]
Stream = Annotated[bool, Meta(description="Answer with server-sent events.")]
IncludeUsage = Annotated[bool, Meta(description="One more chunk, before [DONE], with `usage` and no choices.")]
Priority = Annotated[
    int,
    Meta(
        ge=0,
        le=(1 << 31) - 1,
        description="Of the requests that wait for the device those with the lowest number go first, and among equals "
        "the first that came. 0, the default, is the lowest: a request can give way, not jump the queue.",
    ),
]
CacheSalt = Annotated[
    str,
    Meta(
        description="Requests share what is cached of their prompts only with those of the same tenant that have the "
        "same text here. An empty one is none."
    ),
]
User = Annotated[str, Meta(description="Ignored.")]
Logprobs = Annotated[bool, Meta(description="Give the log-probability of each generated token.")]
ROLES = ("system", "developer", "user", "assistant", "tool")
Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
Name = Annotated[str, Meta(description="Of who speaks, for templates that show it.")]
ToolCallId = Annotated[str, Meta(description="Of the call that this is the result of.")]
Reasoning = Annotated[str, Meta(description="What the assistant thought, for templates that show it.")]
Arguments = Annotated[str, Meta(description="A JSON object, written out.")]
_FUNCTION_NAME: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
Tools = Annotated[
    list[dict[str, Any]],
    Meta(
        description="Functions that the model may call, for models whose template has a place for them.",
        extra_json_schema={
            "maxItems": 128,
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": _FUNCTION_NAME,
                            "description": {"type": ["string", "null"]},
                            "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                            "strict": {"enum": [None, False]},
                        },
                    },
                },
            },
        },
    ),
]
ToolChoice = Annotated[
    str | dict[str, Any],
    Meta(
        description="`auto` is the default. `none`: the model hears of no tools. A function, or `required` with one "
        "tool: the answer is a call of it.",
        extra_json_schema={
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": _FUNCTION_NAME},
                        },
                    },
                },
            ]
        },
    ),
]
ParallelCalls = Annotated[bool, Meta(description="Default true. False: the answer ends with its first call.")]
TemplateVariables = Annotated[dict[str, Any], Meta(description="Further names for the chat template.")]
GenerationPrompt = Annotated[
    bool,
    Meta(description="The prompt ends with the beginning of an answer. Default: true unless a message is continued."),
]
ContinueFinal = Annotated[bool, Meta(description="The answer continues the last message, which is the assistant's.")]
ChatEcho = Annotated[bool, Meta(description="With `continue_final_message`: the answer begins with what it continues.")]
MESSAGES = Meta(description="The conversation so far.", extra_json_schema={"minItems": 1})
Unbuilt = Annotated[
    Any,
    Meta(description="Not built: refused (`unsupported_parameter`) unless it means the same as leaving it out."),
]
