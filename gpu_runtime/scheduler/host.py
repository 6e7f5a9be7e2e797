"""The scheduler on the host: ctypes over the library that the package build makes from `host.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blink_proto import arena
from gpu_runtime.native import load_library
from gpu_runtime.scheduler import layout


class SchedulerError(RuntimeError):
    """The scheduler refused its configuration, or one of its invariants is broken."""


PLAN_FIELDS = (
    "header",
    "works",
    "rows",
    "token_ids",
    "positions",
    "kv_slots",
    "block_table",
    "sampled",
    "decode_tiles",
    "chunk_tiles",
    "history",
    "extras",
    "bias",
    "bans",
    "sampled_logprobs",
)
"""Parts of a plan in the order of `blink_plan_view` (host.h)."""


class _PlanView(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in PLAN_FIELDS]


_chosen: Path | None = None


def use_library(path: Path | None) -> None:
    """Takes another library with the same interface (`host.h`) for all schedulers made from now on, or the package's
    own again: tests run the same histories on the GPU's build that way."""
    global _chosen
    _chosen = path
    _library.cache_clear()


@cache
def _library() -> ctypes.CDLL:
    library = load_library("_host_scheduler") if _chosen is None else ctypes.CDLL(str(_chosen))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "check": (ctypes.c_char_p, [pointer]),
        "create": (pointer, [pointer, pointer, size, pointer, size]),
        "destroy": (None, [pointer]),
        "plan": (None, [pointer, pointer]),
        "step": (None, [pointer, ctypes.c_uint64, ctypes.c_uint32]),
        "poll": (ctypes.c_int, [pointer, pointer, ctypes.c_uint64, ctypes.c_uint64]),
        "audit": (ctypes.c_char_p, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"blink_scheduler_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def check_scheduler(config: NDArray[np.void]) -> None:
    """Whether a scheduler, on any device, takes a configuration (0-d `layout.SchedulerConfig`).

    Raises:
        SchedulerError: says what is wrong.
    """
    own = np.array(config, dtype=layout.SchedulerConfig)
    wrong = _library().blink_scheduler_check(own.ctypes.data)
    if wrong:
        raise SchedulerError(f"scheduler configuration: {wrong.decode()}")


@dataclass(frozen=True)
class Plan:
    """Views of the planned step, zero-copy, valid until the next step.

    `token_ids`, `positions` and `kv_slots` are int32 [bucket]; `works` Work [works]; `rows` SampleRow [rows];
    `block_table` int32 [max_sequences, blocks_per_sequence], indexed by a work's slot; `decode_tiles` and `chunk_tiles`
    Tile [..].

    For sampling, indexed by a row's slot: `history` uint32 [max_sequences, max_model_tokens], the known tokens;
    `extras` SampleExtras [max_sequences]; `bias` BiasEntry [max_sequences, MAX_BIAS]; `bans` BanToken
    [max_sequences, MAX_BAN_WORDS]. `logprobs` RowLogprobs [rows] is to be filled before the next step for the rows
    that ask for log-probabilities.
    """

    header: np.void
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int32]
    works: NDArray[np.void]
    rows: NDArray[np.void]
    block_table: NDArray[np.int32]
    decode_tiles: NDArray[np.void]
    chunk_tiles: NDArray[np.void]
    history: NDArray[np.uint32]
    extras: NDArray[np.void]
    bias: NDArray[np.void]
    bans: NDArray[np.void]
    logprobs: NDArray[np.void]

    @property
    def tokens(self) -> int:
        """Tokens of the step; 0 when there is nothing to do."""
        return int(self.header["tokens"])

    @property
    def stopped(self) -> bool:
        """The chain must end."""
        return bool(self.header["stopped"])


def _view(address: int, dtype: Any, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    raw = (ctypes.c_uint8 * (kind.itemsize * count)).from_address(address)
    return np.frombuffer(raw, dtype=kind)


class HostScheduler:
    """One scheduler over the two regions of an arena.

    Args:
        config: 0-d structured array of `layout.SchedulerConfig`.
        inbound: uint8 view of the inbound region, 64-byte aligned.
        outbound: uint8 view of the outbound region, 64-byte aligned, writable.

    Raises:
        SchedulerError: the configuration or the regions are unfit.
    """

    def __init__(self, config: NDArray[np.void], inbound: NDArray[np.uint8], outbound: NDArray[np.uint8]) -> None:
        self._library = _library()
        self._handle: int | None = None
        self._regions = (inbound, outbound)  # keeps the mappings alive
        self._config = np.array(config, dtype=layout.SchedulerConfig)
        check_scheduler(self._config)
        self._handle = self._library.blink_scheduler_create(
            self._config.ctypes.data,
            inbound.ctypes.data,
            inbound.nbytes,
            outbound.ctypes.data,
            outbound.nbytes,
        )
        if not self._handle:
            raise SchedulerError("the arena's regions are too small or misaligned, or memory is short")
        self._map_plan()

    def _map_plan(self) -> None:
        view = _PlanView()
        self._library.blink_scheduler_plan(self._handle, ctypes.byref(view))
        c = self._config
        running, sequences = int(c["max_running"]), int(c["max_sequences"])
        tokens = int(c["buckets"][int(c["bucket_count"]) - 1])
        self._header = _view(view.header, layout.StepHeader, 1)
        self._works = _view(view.works, layout.Work, running)
        self._rows = _view(view.rows, layout.SampleRow, running)
        self._tokens = [_view(address, "<i4", tokens) for address in (view.token_ids, view.positions, view.kv_slots)]
        columns = int(c["blocks_per_sequence"])
        self._block_table = _view(view.block_table, "<i4", sequences * columns).reshape(sequences, columns)
        self._sampled = _view(view.sampled, "<i4", running)
        self._decode_tiles = _view(view.decode_tiles, layout.Tile, running + max(layout.SPARE_TILES, 2 * running))
        self._chunk_tiles = _view(view.chunk_tiles, layout.Tile, tokens // layout.CHUNK_TILE + running)
        window = int(c["max_model_tokens"])
        self._history = _view(view.history, "<u4", sequences * window).reshape(sequences, window)
        self._extras = _view(view.extras, layout.SampleExtras, sequences)
        bias = _view(view.bias, layout.BiasEntry, sequences * arena.MAX_BIAS)
        self._bias = bias.reshape(sequences, arena.MAX_BIAS)
        bans = _view(view.bans, layout.BanToken, sequences * arena.MAX_BAN_WORDS)
        self._bans = bans.reshape(sequences, arena.MAX_BAN_WORDS)
        self._logprobs = _view(view.sampled_logprobs, layout.RowLogprobs, running)

    def step(self, sampled: NDArray[np.int32] | list[int], now_ns: int, command: int = layout.Command.RUN) -> Plan:
        """Takes in the tokens that the last plan's rows sampled, in row order, and plans the next step.

        Raises:
            ValueError: `sampled` has not one token for each row of the last plan.
        """
        rows = int(self._header[0]["rows"])
        if len(sampled) != rows:
            raise ValueError(f"{len(sampled)} tokens for {rows} rows")
        self._sampled[:rows] = sampled
        self._library.blink_scheduler_step(self._handle, now_ns, int(command))
        return self.plan()

    def plan(self) -> Plan:
        """The present plan."""
        header = self._header[0]
        bucket, works, rows = int(header["bucket"]), int(header["works"]), int(header["rows"])
        token_ids, positions, kv_slots = (array[:bucket] for array in self._tokens)
        return Plan(
            header,
            token_ids,
            positions,
            kv_slots,
            self._works[:works],
            self._rows[:rows],
            self._block_table,
            self._decode_tiles[: int(header["decode_tiles"])],
            self._chunk_tiles[: int(header["chunk_tiles"])],
            self._history,
            self._extras,
            self._bias,
            self._bans,
            self._logprobs[:rows],
        )

    def poll(self, timeout_ns: int, command: NDArray[np.uint64] | None = None, expected: int = 0) -> bool:
        """Waits for news at most that long; also returns when the word at `command` is not `expected`."""
        address = None if command is None else command.ctypes.data
        return bool(self._library.blink_scheduler_poll(self._handle, address, expected, timeout_ns))

    @property
    def kernel_microseconds(self) -> Callable[[], float] | None:
        """Reads the time of the last step's kernel; None for a build that runs on the host."""
        try:
            function = self._library.blink_scheduler_last_step_us
        except AttributeError:
            return None
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_void_p]
        return lambda: float(function(self._handle))

    def audit(self) -> None:
        """Checks the internal invariants (tests).

        Raises:
            SchedulerError: says which is broken.
        """
        broken = self._library.blink_scheduler_audit(self._handle)
        if broken:
            raise SchedulerError(broken.decode())

    def close(self) -> None:
        """Frees the scheduler; its views must not be used any more."""
        if self._handle:
            self._library.blink_scheduler_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()
