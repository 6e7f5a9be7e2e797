"""The language of layout specifications: what it refuses, and what its hash covers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from blink_proto import arena
from blink_proto.generate import PACKAGE
from blink_proto.spec import Spec, SpecError, load_spec
from gpu_runtime.scheduler import layout

TEXT = """
title = "Example"
namespace = "blink::example"
version = 1

[constants]
LIMIT = { value = 3, type = "u32", doc = "a limit" }

[enums.Colour]
doc = "a colour"
RED = { value = 1, doc = "like a rose" }
BLUE = { value = 2, doc = "like the sky" }

[[words]]
name = "Name"
doc = "a word"
fields = [
  { name = "low", bits = 24, doc = "the low bits" },
  { name = "high", bits = 40, doc = "the high bits" },
]

[[structs]]
name = "Pair"
doc = "two numbers"
size = 16
fields = [
  { name = "first", type = "u32", doc = "one" },
  { name = "second", type = "f32", doc = "two" },
  { name = "third", type = "u64", doc = "three" },
]

[params]
slots = "how many"

[[regions]]
name = "inbound"
doc = "a region"
head = []
channel = [{ name = "ring", record = "Pair", count = "slots" }]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def load(folder: Path, *changes: tuple[str, str]) -> Spec:
    """The example with some text replaced."""
    text = TEXT
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "example.toml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path)


def test_the_example_is_sound(folder: Path) -> None:
    spec = load(folder)
    assert [(field.name, field.offset, field.size) for field in spec.structs[0].fields] == [
        ("first", 0, 4),
        ("second", 4, 4),
        ("third", 8, 8),
    ]
    assert [(field.name, field.shift, field.bits) for field in spec.words[0].fields] == [
        ("low", 0, 24),
        ("high", 24, 40),
    ]
    assert spec.constant("LIMIT") == 3
    assert spec.record_bytes("Pair") == 16


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"first", type = "u32"', '"first", type = "u8"', "hole before offset 1"),
        ('"second", type = "f32"', '"second", type = "f32[2]"', "hole before offset 12"),
        ('"third", type = "u64"', '"third", type = "u64[2]"', "takes 24 bytes, not 16"),
        ("size = 16", "size = 24", "takes 16 bytes, not 24"),
        ('"second", type = "f32"', '"second", type = "f16"', "unknown type f16"),
        ('"second", type = "f32"', '"second", type = "u32[x]"', "unknown type"),
        ("bits = 40", "bits = 39", "63 bits, not 64"),
        ("bits = 24", "bits = 25", "65 bits, not 64"),
        ('record = "Pair"', 'record = "Trio"', "unknown record"),
        ('count = "slots"', 'count = "places"', "unknown record or count"),
    ],
)
def test_a_contradiction_is_refused(folder: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        load(folder, (old, new))


def test_a_struct_that_is_no_multiple_of_a_word_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="multiple of 8"):
        load(folder, ('"third", type = "u64"', '"third", type = "u32"'), ("size = 16", "size = 12"))


@pytest.mark.parametrize(
    "change",
    [
        ('title = "Example"', 'title = "Other"'),
        ('doc = "a limit"', 'doc = "the limit"'),
        ('doc = "a colour"', 'doc = "the colour"'),
        ('doc = "like a rose"', 'doc = "rosy"'),
        ('doc = "the low bits"', 'doc = "few bits"'),
        ('doc = "two numbers"', 'doc = "numbers"'),
        ('slots = "how many"', 'slots = "so many"'),
        ('doc = "a region"', 'doc = "a region of memory"'),
        ("[params]", "# a comment\n[params]"),
    ],
)
def test_prose_does_not_change_the_hash(folder: Path, change: tuple[str, str]) -> None:
    assert load(folder, change).layout_hash == load(folder).layout_hash


@pytest.mark.parametrize(
    "change",
    [
        ("version = 1", "version = 2"),
        ("value = 3", "value = 4"),
        ("RED = { value = 1", "PINK = { value = 1"),
        ("BLUE = { value = 2", "BLUE = { value = 3"),
        ("bits = 24", "bits = 23"),
        ('name = "first"', 'name = "number"'),
        ('"second", type = "f32"', '"second", type = "u32"'),
        ('name = "ring"', 'name = "log"'),
    ],
)
def test_a_change_of_meaning_changes_the_hash(folder: Path, change: tuple[str, str]) -> None:
    extra = [("bits = 40", "bits = 41")] if change[0] == "bits = 24" else []
    assert load(folder, change, *extra).layout_hash != load(folder).layout_hash


def test_moving_a_field_changes_the_hash(folder: Path) -> None:
    lines = TEXT.splitlines()
    first = next(index for index, line in enumerate(lines) if '"first"' in line)
    lines[first], lines[first + 1] = lines[first + 1], lines[first]
    moved = folder / "moved.toml"
    moved.write_text("\n".join(lines), encoding="utf-8")
    assert load_spec(moved).layout_hash != load(folder).layout_hash


def test_the_hash_is_part_of_a_sha256(folder: Path) -> None:
    """The smallest specification, hashed by hand."""
    path = folder / "least.toml"
    path.write_text('title = "t"\nnamespace = "n"\nversion = 1\n', encoding="utf-8")
    digest = hashlib.sha256(b'{"namespace":"n","version":1,"params":[]}').digest()
    assert load_spec(path).layout_hash == int.from_bytes(digest[:8], "little")


def test_the_generated_modules_carry_the_hash_of_their_specification() -> None:
    scheduler = Path(layout.__file__).with_name("layout.toml")
    assert load_spec(PACKAGE / "arena.toml").layout_hash == arena.LAYOUT_HASH
    assert load_spec(scheduler).layout_hash == layout.LAYOUT_HASH
