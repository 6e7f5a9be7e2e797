"""The language of layout specifications: reads one from TOML and checks that it means what it says."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCALAR_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "f32": 4}
_TYPE = re.compile(r"(?P<scalar>u8|u16|u32|u64|i32|f32)(\[(?P<count>\d+)\])?")


class SpecError(ValueError):
    """A specification contradicts itself."""


@dataclass(frozen=True)
class Constant:
    """A named number."""

    name: str
    value: int
    type: str
    doc: str


@dataclass(frozen=True)
class Enumeration:
    """Named values of one field (`flags`: bits that may be combined)."""

    name: str
    doc: str
    members: tuple[tuple[str, int, str], ...]
    flags: bool


@dataclass(frozen=True)
class BitField:
    """Bits of a word, lowest first."""

    name: str
    bits: int
    shift: int
    doc: str


@dataclass(frozen=True)
class Word:
    """A 64-bit word made of bit fields."""

    name: str
    doc: str
    fields: tuple[BitField, ...]


@dataclass(frozen=True)
class Field:
    """A member of a struct; `count` is None for a scalar, else the array's length."""

    name: str
    scalar: str
    count: int | None
    offset: int
    doc: str

    @property
    def size(self) -> int:
        """Bytes."""
        return SCALAR_BYTES[self.scalar] * (1 if self.count is None else self.count)


@dataclass(frozen=True)
class Struct:
    """A record without implicit padding."""

    name: str
    doc: str
    size: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Part:
    """A run of `count` records (a parameter's name, or None for one) inside a region."""

    name: str
    record: str
    count: str | None


@dataclass(frozen=True)
class Region:
    """Head parts once, then the channel parts for each channel."""

    name: str
    doc: str
    head: tuple[Part, ...]
    channel: tuple[Part, ...]


@dataclass(frozen=True)
class Spec:
    """A whole specification; `layout_hash` covers its meaning, not its prose."""

    title: str
    namespace: str
    version: int
    layout_hash: int
    constants: tuple[Constant, ...]
    enums: tuple[Enumeration, ...]
    words: tuple[Word, ...]
    structs: tuple[Struct, ...]
    params: tuple[tuple[str, str], ...]
    regions: tuple[Region, ...]

    def constant(self, name: str) -> int:
        """Value of a constant."""
        return next(constant.value for constant in self.constants if constant.name == name)

    def record_bytes(self, record: str) -> int:
        """Size in bytes of a struct or scalar."""
        if record in SCALAR_BYTES:
            return SCALAR_BYTES[record]
        return next(struct.size for struct in self.structs if struct.name == record)


def load_spec(path: Path) -> Spec:
    """Reads and checks a specification.

    Raises:
        SpecError: a hole, a wrong size, a word that is not 64 bits wide, an unknown type or record.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    spec = Spec(
        title=raw["title"],
        namespace=raw["namespace"],
        version=raw["version"],
        layout_hash=_meaning_hash(raw),
        constants=tuple(Constant(name, **body) for name, body in raw.get("constants", {}).items()),
        enums=tuple(_enums(raw)),
        words=tuple(_word(word) for word in raw.get("words", [])),
        structs=tuple(_struct(struct) for struct in raw.get("structs", [])),
        params=tuple(raw.get("params", {}).items()),
        regions=tuple(_region(region) for region in raw.get("regions", [])),
    )
    _check_regions(spec)
    return spec


def _enums(raw: dict[str, Any]) -> list[Enumeration]:
    found = []
    for kind in ("enums", "flags"):
        for name, body in raw.get(kind, {}).items():
            members = tuple((key, m["value"], m["doc"]) for key, m in body.items() if key != "doc")
            found.append(Enumeration(name, body["doc"], members, kind == "flags"))
    return found


def _word(raw: dict[str, Any]) -> Word:
    fields, shift = [], 0
    for field in raw["fields"]:
        fields.append(BitField(field["name"], field["bits"], shift, field["doc"]))
        shift += field["bits"]
    if shift != 64:
        raise SpecError(f"{raw['name']} has {shift} bits, not 64")
    return Word(raw["name"], raw["doc"], tuple(fields))


def _struct(raw: dict[str, Any]) -> Struct:
    fields, offset = [], 0
    for field in raw["fields"]:
        match = _TYPE.fullmatch(field["type"])
        if match is None:
            raise SpecError(f"{raw['name']}.{field['name']}: unknown type {field['type']}")
        scalar, count = match["scalar"], match["count"]
        if offset % SCALAR_BYTES[scalar]:
            raise SpecError(f"{raw['name']}.{field['name']}: hole before offset {offset}; name the padding")
        fields.append(Field(field["name"], scalar, int(count) if count else None, offset, field["doc"]))
        offset += fields[-1].size
    if offset != raw["size"] or offset % 8:
        raise SpecError(f"{raw['name']} takes {offset} bytes, not {raw['size']} (a multiple of 8)")
    return Struct(raw["name"], raw["doc"], offset, tuple(fields))


def _region(raw: dict[str, Any]) -> Region:
    def parts(key: str) -> tuple[Part, ...]:
        return tuple(Part(part["name"], part["record"], part.get("count")) for part in raw[key])

    return Region(raw["name"], raw["doc"], parts("head"), parts("channel"))


def _check_regions(spec: Spec) -> None:
    records = set(SCALAR_BYTES) | {struct.name for struct in spec.structs}
    params = {name for name, _ in spec.params}
    for region in spec.regions:
        for part in region.head + region.channel:
            if part.record not in records or (part.count is not None and part.count not in params):
                raise SpecError(f"{region.name}.{part.name}: unknown record or count")


def _meaning_hash(raw: dict[str, Any]) -> int:
    """First 8 bytes, little-endian, of the SHA-256 of the specification without its prose."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip(value) for key, value in node.items() if key not in {"doc", "title"}}
        return [strip(item) for item in node] if isinstance(node, list) else node

    # Parameters are prose but for their names; order counts, so keys are not sorted.
    meaning = strip({**raw, "params": list(raw.get("params", {}))})
    digest = hashlib.sha256(json.dumps(meaning, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:8], "little")
