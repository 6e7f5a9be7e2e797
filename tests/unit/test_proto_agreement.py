"""C++ and Python agree on every size, offset and value, and both with numbers worked out by hand."""

from __future__ import annotations

import re
import subprocess
from enum import IntEnum
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from blink_proto import arena
from blink_proto.generate import PACKAGE, REPOSITORY
from gpu_runtime.scheduler import layout

SIZES = [
    arena.Sizes(channels=2, submit_slots=4, cancel_slots=8, log_slots=16, heap_tokens=100),
    arena.Sizes(channels=3, submit_slots=64, cancel_slots=32, log_slots=1024, heap_tokens=5000),
    arena.Sizes(channels=1, submit_slots=1, cancel_slots=1, log_slots=1, heap_tokens=1),
    arena.Sizes(channels=64, submit_slots=1, cancel_slots=1, log_slots=1 << 31, heap_tokens=1 << 30),
]
INBOUND = ["channels", "channel_control", "channel_submit", "channel_cancel", "channel_heap"]
OUTBOUND = ["header", "telemetry", "channels", "channel_control", "channel_log"]

BY_HAND = [
    # The bell takes the first page. 256 of control; 4 x 128; 8 x 16; 100 x 4 ends at 1296: one page.
    ([4096, 0, 256, 768, 896], 4096, 4096 + 8192),
    # 64 x 128 ends at 8448; 32 x 16 at 8960; 5000 x 4 at 28960: eight pages.
    ([4096, 0, 256, 8448, 8960], 32768, 4096 + 98304),
    # One cancel record of 16 bytes ends at 400; the heap starts on the next cache line.
    ([4096, 0, 256, 384, 448], 4096, 4096 + 4096),
    # Heaps of 4 GiB: beyond 32 bits.
    ([4096, 0, 256, 384, 448], (1 << 32) + 4096, 4096 + 64 * ((1 << 32) + 4096)),
]
OUT_BY_HAND = [
    ([0, 256, 4096, 0, 256], 4096, 12288),
    ([0, 256, 4096, 0, 256], 20480, 4096 + 3 * 20480),
    ([0, 256, 4096, 0, 256], 4096, 8192),
    ([0, 256, 4096, 0, 256], (1 << 35) + 4096, 4096 + 64 * ((1 << 35) + 4096)),
]


def dtypes(module: ModuleType) -> dict[str, np.dtype[np.void]]:
    """The records of a generated module."""
    return {name: value for name, value in vars(module).items() if isinstance(value, np.dtype)}


def enums(module: ModuleType) -> dict[str, type[IntEnum]]:
    """The enumerations of a generated module."""
    found = {
        name: value for name, value in vars(module).items() if isinstance(value, type) and hasattr(value, "__members__")
    }
    return {name: value for name, value in found.items() if value.__members__}


def constants(module: ModuleType) -> list[str]:
    """Names of its constants."""
    return [
        name
        for name in vars(module)
        if re.fullmatch(r"[A-Z][A-Z_]+", name)
        and isinstance(vars(module)[name], int)
        and name not in ("VERSION", "LAYOUT_HASH")
    ]


def module_lines(module: ModuleType, namespace: str) -> dict[str, int]:
    """C++ expressions and the values that Python gives them."""
    lines = {f"{namespace}::kVersion": module.VERSION, f"{namespace}::kLayoutHash": module.LAYOUT_HASH}
    for name in constants(module):
        lines[f"{namespace}::{name}"] = vars(module)[name]
    for name, dtype in dtypes(module).items():
        lines[f"sizeof({namespace}::{name})"] = dtype.itemsize
        assert dtype.fields is not None
        for field, (kind, offset, *_) in dtype.fields.items():
            lines[f"offsetof({namespace}::{name}, {field})"] = offset
            lines[f"sizeof({namespace}::{name}::{field})"] = kind.itemsize
    for name, enum in enums(module).items():
        for member, value in enum.__members__.items():
            lines[f"uint64_t({namespace}::{name}::{member})"] = int(value)
    return lines


def region_lines(sizes: arena.Sizes) -> dict[str, int]:
    """Offsets of both regions for some sizes."""
    values = (
        f"{sizes.channels}u, {sizes.submit_slots}u, {sizes.cancel_slots}u, {sizes.log_slots}u, {sizes.heap_tokens}u"
    )
    lines = {}
    pairs = (("InboundLayout", INBOUND, arena.InboundLayout), ("OutboundLayout", OUTBOUND, arena.OutboundLayout))
    for name, parts, kind in pairs:
        made, known = f"blink::arena::{name}(blink::arena::Sizes{{{values}}})", kind(sizes)
        for attribute in [f"{part}_offset" for part in parts] + ["channel_bytes", "total_bytes"]:
            lines[f"{made}.{attribute}"] = getattr(known, attribute)
        lines[f"{made}.channel_offset({sizes.channels - 1}u)"] = known.channel_offset(sizes.channels - 1)
    return lines


def word_lines() -> dict[str, int]:
    """Words packed on both sides."""
    return {
        "blink::arena::CommitWord{0x1FFFFFFFEull, 0x1AAAAAAABull}.pack()": arena.pack_commit_word(
            0x1FFFFFFFE, 0x1AAAAAAAB
        ),
        "blink::arena::TokenHead{0x1FFFE, 0x101, 0x104, 0x300000005ull}.pack()": arena.pack_token_head(
            0x1FFFE, 0x101, 0x104, 0x300000005
        ),
        "blink::arena::TokenBody{1, 9, 0xFFFFFFFFull}.pack()": arena.pack_token_body(1, 9, 0xFFFFFFFF),
        "blink::arena::TokenHead::unpack(0x0123456789ABCDEFull).kind": arena.unpack_token_head(0x0123456789ABCDEF)[1],
        "blink::arena::CommitWord::unpack(0x0123456789ABCDEFull).lease": 0x01234567,
        "blink::arena::TokenBody::unpack(0x0123456789ABCDEFull).detail": 0x89AB,
    }


def run_cpp(expressions: list[str], folder: Path) -> list[int]:
    """Values of C++ expressions."""
    prints = "\n".join(f'  std::printf("%llu\\n", (unsigned long long)({each}));' for each in expressions)
    source = folder / "sizes.cpp"
    includes = '#include <cstdio>\n#include "blink_proto/arena.h"\n#include "scheduler/layout.h"\n'
    source.write_text(f"{includes}int main() {{\n{prints}\n}}\n", encoding="utf-8")
    folders = ["-I", str(PACKAGE.parent), "-I", str(REPOSITORY / "gpu_runtime")]
    program = folder / "sizes"
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-invalid-offsetof"]
    subprocess.run(["g++", *flags, *folders, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return [int(line) for line in ran.stdout.split()]


def test_cpp_and_python_agree(tmp_path: Path) -> None:
    lines = module_lines(arena, "blink::arena") | module_lines(layout, "blink::layout") | word_lines()
    for sizes in SIZES:
        lines |= region_lines(sizes)
    assert len(lines) > 300
    values = dict(zip(lines, run_cpp(list(lines), tmp_path), strict=True))
    assert {each: values[each] for each in lines if values[each] != lines[each]} == {}


@pytest.mark.parametrize(("sizes", "expected"), list(zip(SIZES, BY_HAND, strict=True)))
def test_inbound_offsets_by_hand(sizes: arena.Sizes, expected: tuple[list[int], int, int]) -> None:
    known = arena.InboundLayout(sizes)
    assert ([getattr(known, f"{part}_offset") for part in INBOUND], known.channel_bytes, known.total_bytes) == expected
    assert known.channel_offset(sizes.channels - 1) == 4096 + expected[1] * (sizes.channels - 1)


@pytest.mark.parametrize(("sizes", "expected"), list(zip(SIZES, OUT_BY_HAND, strict=True)))
def test_outbound_offsets_by_hand(sizes: arena.Sizes, expected: tuple[list[int], int, int]) -> None:
    known = arena.OutboundLayout(sizes)
    assert ([getattr(known, f"{part}_offset") for part in OUTBOUND], known.channel_bytes, known.total_bytes) == expected
    assert known.channel_offset(sizes.channels - 1) == 4096 + expected[1] * (sizes.channels - 1)


def test_record_offsets_by_hand() -> None:
    """The words that everything hangs on."""
    assert arena.SUBMIT_RECORD_OFFSETS["commit"] == 128 - 8
    assert arena.CANCEL_RECORD_OFFSETS == {"target": 0, "commit": 8}
    assert arena.SUBMIT_RECORD_OFFSETS["stop_tokens"] == 4 * 4 + 2 * 4 + 8 + 2 * 4
    assert arena.SUBMIT_RECORD_OFFSETS["min_p"] == 40 + 8 * 4
    assert arena.SUBMIT_RECORD_OFFSETS["ban_words"] == 72 + 4 * 4 + 5 * 4
    assert [arena.CHANNEL_IN_OFFSETS[name] % 64 for name in ("lease", "heartbeat", "log_read")] == [0, 0, 0]
    assert arena.MAGIC.to_bytes(8, "little") == b"BNKARENA"
