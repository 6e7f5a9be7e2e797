from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_IDLE: _ClassVar[Phase]
    PHASE_LOADING: _ClassVar[Phase]
    PHASE_SERVING: _ClassVar[Phase]
    PHASE_DRAINING: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_IDLE: Phase
PHASE_LOADING: Phase
PHASE_SERVING: Phase
PHASE_DRAINING: Phase
PHASE_FAILED: Phase

class State(_message.Message):
    __slots__ = ("phase", "epoch", "model", "detail", "life", "telemetry")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    epoch: int
    model: str
    detail: str
    life: int
    telemetry: Telemetry
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., detail: _Optional[str] = ..., life: _Optional[int] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("steps", "running", "waiting", "blocks_total", "blocks_used", "prompt_tokens", "generated_tokens", "finished_stop", "finished_length", "finished_cancelled", "finished_error", "rejected", "step_tokens", "prefix_queries", "prefix_hits", "blocks_cached")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISHED_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ERROR_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    prompt_tokens: int
    generated_tokens: int
    finished_stop: int
    finished_length: int
    finished_cancelled: int
    finished_error: int
    rejected: int
    step_tokens: int
    prefix_queries: int
    prefix_hits: int
    blocks_cached: int
    def __init__(self, steps: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., finished_stop: _Optional[int] = ..., finished_length: _Optional[int] = ..., finished_cancelled: _Optional[int] = ..., finished_error: _Optional[int] = ..., rejected: _Optional[int] = ..., step_tokens: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., blocks_cached: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_model_tokens", "max_sequence_tokens", "eos_token_ids", "parameters", "loaded_unix_seconds", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_model_tokens: int
    max_sequence_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    parameters: int
    loaded_unix_seconds: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_tokens: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., parameters: _Optional[int] = ..., loaded_unix_seconds: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "device", "state", "arena_version", "layout_hash", "channels", "channels_free")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ARENA_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FREE_FIELD_NUMBER: _ClassVar[int]
    version: str
    device: str
    state: State
    arena_version: int
    layout_hash: int
    channels: int
    channels_free: int
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[_Union[State, _Mapping]] = ..., arena_version: _Optional[int] = ..., layout_hash: _Optional[int] = ..., channels: _Optional[int] = ..., channels_free: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("source", "name", "replace", "grace_seconds")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    source: str
    name: str
    replace: bool
    grace_seconds: int
    def __init__(self, source: _Optional[str] = ..., name: _Optional[str] = ..., replace: _Optional[bool] = ..., grace_seconds: _Optional[int] = ...) -> None: ...

class LoadModelProgress(_message.Message):
    __slots__ = ("stage", "done_units", "total_units", "done", "model")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_UNITS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_UNITS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done_units: int
    total_units: int
    done: bool
    model: Model
    def __init__(self, stage: _Optional[str] = ..., done_units: _Optional[int] = ..., total_units: _Optional[int] = ..., done: _Optional[bool] = ..., model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name", "grace_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_seconds: int
    def __init__(self, name: _Optional[str] = ..., grace_seconds: _Optional[int] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ArenaLayout(_message.Message):
    __slots__ = ("version", "layout_hash", "channels", "submit_slots", "cancel_slots", "log_slots", "heap_tokens", "inbound_bytes", "outbound_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOG_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HEAP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INBOUND_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTBOUND_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    layout_hash: int
    channels: int
    submit_slots: int
    cancel_slots: int
    log_slots: int
    heap_tokens: int
    inbound_bytes: int
    outbound_bytes: int
    def __init__(self, version: _Optional[int] = ..., layout_hash: _Optional[int] = ..., channels: _Optional[int] = ..., submit_slots: _Optional[int] = ..., cancel_slots: _Optional[int] = ..., log_slots: _Optional[int] = ..., heap_tokens: _Optional[int] = ..., inbound_bytes: _Optional[int] = ..., outbound_bytes: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("front_end", "channels", "transport", "layout_hash", "offer")
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    channels: int
    transport: str
    layout_hash: int
    offer: bytes
    def __init__(self, front_end: _Optional[str] = ..., channels: _Optional[int] = ..., transport: _Optional[str] = ..., layout_hash: _Optional[int] = ..., offer: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("layout", "nonce", "epoch", "channels", "transport_blob", "model")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_BLOB_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    layout: ArenaLayout
    nonce: int
    epoch: int
    channels: _containers.RepeatedScalarFieldContainer[int]
    transport_blob: bytes
    model: Model
    def __init__(self, layout: _Optional[_Union[ArenaLayout, _Mapping]] = ..., nonce: _Optional[int] = ..., epoch: _Optional[int] = ..., channels: _Optional[_Iterable[int]] = ..., transport_blob: _Optional[bytes] = ..., model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("front_end",)
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    def __init__(self, front_end: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("freed",)
    FREED_FIELD_NUMBER: _ClassVar[int]
    freed: bool
    def __init__(self, freed: _Optional[bool] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionChannel(_message.Message):
    __slots__ = ("index", "live", "lease")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    index: int
    live: bool
    lease: int
    def __init__(self, index: _Optional[int] = ..., live: _Optional[bool] = ..., lease: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("front_end", "transport", "channels", "opened_unix_seconds", "gpu_memory")
    FRONT_END_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    OPENED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FIELD_NUMBER: _ClassVar[int]
    front_end: str
    transport: str
    channels: _containers.RepeatedCompositeFieldContainer[SessionChannel]
    opened_unix_seconds: int
    gpu_memory: str
    def __init__(self, front_end: _Optional[str] = ..., transport: _Optional[str] = ..., channels: _Optional[_Iterable[_Union[SessionChannel, _Mapping]]] = ..., opened_unix_seconds: _Optional[int] = ..., gpu_memory: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class FetchTokenizerRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class FetchTokenizerChunk(_message.Message):
    __slots__ = ("file", "content")
    FILE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    file: str
    content: bytes
    def __init__(self, file: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds", "resume")
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: int
    resume: bool
    def __init__(self, grace_seconds: _Optional[int] = ..., resume: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ("every_milliseconds",)
    EVERY_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    every_milliseconds: int
    def __init__(self, every_milliseconds: _Optional[int] = ...) -> None: ...
