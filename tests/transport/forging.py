"""Answers of a runtime with other keys in them than it gave: what a front end might try that wants more than its own.

Keys of other sessions can be put into any answer. Keys that nobody was ever given, and addresses beside those that
were, take knowledge of how a key is written; DOCA's own libraries keep that to themselves.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Protocol

from blink_proto.doca.blobs import Answer as DocaAnswer
from blink_proto.doca.blobs import ChannelKeys
from blink_proto.rdma.wire import Answer, Window


class Forge(Protocol):
    """By transport. Answers are those of sessions with one channel, all of whose parts are equally long."""

    opaque: str
    """Why keys and addresses cannot be changed; empty where they can."""

    def keys(self, answer: bytes) -> list[object]:
        """All of them."""

    def with_inbound_of(self, answer: bytes, other: bytes) -> bytes:
        """It writes by the keys of another session."""

    def writing_outbound(self, answer: bytes) -> bytes:
        """It writes by the key that is for reading."""

    def reading_inbound(self, answer: bytes) -> bytes:
        """It reads by the key that is for writing."""

    def with_a_wrong_key(self, answer: bytes) -> bytes:
        """It writes by a key that is nobody's."""

    def moved(self, answer: bytes, by: int) -> bytes:
        """It writes so many bytes behind what it was given."""


class VerbsForge:
    """Windows are in the answer as they are."""

    opaque = ""

    def keys(self, answer: bytes) -> list[object]:
        found = Answer.from_bytes(answer)
        return [one.key for one in (*found.inbound, *found.outbound)]

    def with_inbound_of(self, answer: bytes, other: bytes) -> bytes:
        (theirs,) = Answer.from_bytes(other).inbound
        return self._writing(answer, theirs)

    def writing_outbound(self, answer: bytes) -> bytes:
        return self._writing(answer, Answer.from_bytes(answer).outbound[-1])

    def reading_inbound(self, answer: bytes) -> bytes:
        found = Answer.from_bytes(answer)
        (into,), (head, log) = found.inbound, found.outbound
        assert into.size == log.size
        return Answer(found.endpoint, found.inbound, (head, replace(into, offset=log.offset))).to_bytes()

    def with_a_wrong_key(self, answer: bytes) -> bytes:
        (own,) = Answer.from_bytes(answer).inbound
        return self._writing(answer, replace(own, key=own.key ^ 0x5A))

    def moved(self, answer: bytes, by: int) -> bytes:
        (own,) = Answer.from_bytes(answer).inbound
        return self._writing(answer, replace(own, address=own.address + by))

    def _writing(self, answer: bytes, what: Window) -> bytes:
        found = Answer.from_bytes(answer)
        (own,) = found.inbound
        assert own.size == what.size
        return Answer(found.endpoint, (replace(what, offset=own.offset),), found.outbound).to_bytes()


class DocaForge:
    """Exports of memory are opaque; each may be put in another one's place."""

    opaque = "how DOCA's own libraries write a key is not known"

    def keys(self, answer: bytes) -> list[object]:
        found, keys = DocaAnswer.decode(answer), self._keys(answer)
        return [found.head, keys.inbound, keys.outbound]

    def with_inbound_of(self, answer: bytes, other: bytes) -> bytes:
        return self._with(answer, replace(self._keys(answer), inbound=self._keys(other).inbound))

    def writing_outbound(self, answer: bytes) -> bytes:
        keys = self._keys(answer)
        return self._with(answer, replace(keys, inbound=keys.outbound))

    def reading_inbound(self, answer: bytes) -> bytes:
        keys = self._keys(answer)
        return self._with(answer, replace(keys, outbound=keys.inbound))

    def with_a_wrong_key(self, answer: bytes) -> bytes:
        raise NotImplementedError(self.opaque)

    def moved(self, answer: bytes, by: int) -> bytes:
        raise NotImplementedError(self.opaque)

    @staticmethod
    def _keys(answer: bytes) -> ChannelKeys:
        (keys,) = DocaAnswer.decode(answer).channels.values()
        return keys

    @staticmethod
    def _with(answer: bytes, keys: ChannelKeys) -> bytes:
        found = DocaAnswer.decode(answer)
        return replace(found, channels=dict.fromkeys(found.channels, keys)).encode()


class StandInForge(DocaForge):
    """The stand-in's exports: a mark, the page's name, key, address, size."""

    opaque = ""
    _EXPORT = struct.Struct("<8s64sQQQ")

    def with_a_wrong_key(self, answer: bytes) -> bytes:
        return self._changed(answer, key=0x5A)

    def moved(self, answer: bytes, by: int) -> bytes:
        return self._changed(answer, by=by)

    def _changed(self, answer: bytes, key: int = 0, by: int = 0) -> bytes:
        keys = self._keys(answer)
        mark, name, own, address, size = self._EXPORT.unpack(keys.inbound)
        return self._with(answer, replace(keys, inbound=self._EXPORT.pack(mark, name, own ^ key, address + by, size)))
