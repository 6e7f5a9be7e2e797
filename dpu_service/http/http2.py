"""HTTP/2 by the `h2` library's state machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from dpu_service.http.calm import RESET_COST, Calm
from dpu_service.http.connection import LINGER_SECONDS, MAX_HEAD_BYTES, MAX_HEADERS, Connection
from dpu_service.http.host import Host, Message
from dpu_service.http.http2_stream import Http2Stream
from dpu_service.http.stream import Headers

STREAM_WINDOW = 256 << 10
CONNECTION_WINDOW = 1 << 20
"""Bytes of bodies that a client may send before the application has taken them."""
FRAME_HEAD_BYTES = 9
SLICE_BYTES = 8 << 10
"""Read so much at a time: no client can hold the loop with thousands of tiny frames."""
FRAMES_OF_A_SLICE = SLICE_BYTES // FRAME_HEAD_BYTES
"""Streams that a client can open at most before we have refused the first of them: h2 itself would end the connection
at the limit that the client was told."""
LAST_STREAM = 2**31 - 1
FAREWELL_SECONDS = 1.0
"""After the last answer of a draining server, for a request that crosses its GOAWAY."""

_Cost = dict[type[events.Event], float]
_COSTS: _Cost = {
    events.PingReceived: 1.0,
    events.PriorityUpdated: 1.0,
    events.RemoteSettingsChanged: 1.0,
    events.UnknownFrameReceived: 1.0,
    events.StreamReset: RESET_COST,
}


def _settings(streams: int) -> Settings:
    return Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        },
    )


class Http2(Connection):
    """A connection with many requests at once."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._streams: dict[int, Http2Stream] = {}
        self._calm = Calm(time.monotonic())
        self._flush_due = False
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._h2.local_settings = _settings(host.config.http2_streams)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the settings."""
        full = self.host.full
        super().connection_made(transport)
        self._h2.initiate_connection()
        self._h2.local_settings = _settings(self.host.config.http2_streams + FRAMES_OF_A_SLICE)
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65535)
        self._send()
        self._clock.start(self.host.config.header_timeout, self._idle)
        if full:
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)
        elif self.host.draining:
            self.drain()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        for start in range(0, len(data), SLICE_BYTES):
            if self._ending:
                return
            self._receive(data[start : start + SLICE_BYTES])

    def drain(self) -> None:
        """Tells the client to open no more streams here (RFC 9113, 6.8); those that are open go on."""
        self._go_away(LAST_STREAM, ErrorCodes.NO_ERROR)

    def close(self) -> None:
        """What the streams wrote goes out first."""
        self._flush()
        super().close()

    # For the streams

    def room(self, stream: Http2Stream) -> int:
        """Bytes that may be sent now."""
        try:
            return max(0, min(self._h2.local_flow_control_window(stream.number), self._h2.max_outbound_frame_size))
        except H2Error:
            stream.lose()
            return 0

    async def wait_for_room(self, stream: Http2Stream) -> None:
        """A client that gives none for too long does not get its answer."""
        stream.window.clear()
        try:
            async with asyncio.timeout(self.host.config.write_timeout):
                await stream.window.wait()
        except TimeoutError:
            self.reset(stream, ErrorCodes.CANCEL)

    def send_head(self, stream: Http2Stream, headers: Headers) -> None:
        """The head of an answer."""
        try:
            self._h2.send_headers(stream.number, headers)
        except H2Error:
            stream.lose()
        self._send()

    def send_part(self, stream: Http2Stream, data: bytes, last: bool) -> None:
        """A part of an answer, for which there is room."""
        try:
            self._h2.send_data(stream.number, data, end_stream=last)
        except H2Error:
            stream.lose()
        self._calm.earn(2)
        self._send()

    def taken(self, stream: Http2Stream, size: int) -> None:
        """The client may send so much more."""
        if size:
            self._h2.acknowledge_received_data(size, stream.number)
            self._send()

    def answered(self, stream: Http2Stream) -> None:
        """The rest of a body is taken for a while, as some clients send all before they read, and then stopped."""
        if stream.body_over:
            self._forget(stream)
            return
        self.taken(stream, stream.drop_body())
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._stop_body, stream)

    def reset(self, stream: Http2Stream, code: ErrorCodes) -> None:
        """Ends one stream."""
        stream.lose()
        with contextlib.suppress(H2Error):  # closed already
            self._h2.reset_stream(stream.number, code)
        self._send()
        self._forget(stream)

    def _stop_body(self, stream: Http2Stream) -> None:
        if self._streams.get(stream.number) is stream and not self._ending:
            self.reset(stream, ErrorCodes.NO_ERROR)  # RFC 9113, 8.1

    # What the client sends

    def _receive(self, data: bytes) -> None:
        try:
            happened = self._h2.receive_data(data)
        except H2Error:  # h2 has written why
            self._send()
            self._lose_streams()
            self.close()
            return
        for event in happened:
            self._take(event)
            if not self._calm.spend(_COSTS.get(type(event), 0.0)):
                self._end(ErrorCodes.ENHANCE_YOUR_CALM)
                return
        self._send()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.RequestReceived):
            self._begin(event)
        elif isinstance(event, events.DataReceived):
            self._data(event)
        elif isinstance(event, events.StreamEnded):
            self._with(event.stream_id, Http2Stream.end_body)
        elif isinstance(event, events.StreamReset):
            self._with(event.stream_id, self._was_reset)
        elif isinstance(event, events.WindowUpdated) and event.stream_id:
            self._with(event.stream_id, lambda stream: stream.window.set())
        elif isinstance(event, events.WindowUpdated | events.RemoteSettingsChanged):
            for stream in self._streams.values():
                stream.window.set()
        elif isinstance(event, events.ConnectionTerminated):
            self._lose_streams()
            self.close()

    def _begin(self, event: events.RequestReceived) -> None:
        number = event.stream_id
        assert number is not None
        assert event.headers is not None
        if len(self._streams) >= self.host.config.http2_streams:
            self._refuse(number)
            return
        try:
            scope = self._scope_of([(bytes(name), bytes(value)) for name, value in event.headers])
        except ValueError:
            self._h2.reset_stream(number, ErrorCodes.PROTOCOL_ERROR)
            return
        stream = self._streams[number] = Http2Stream(self, number, scope)
        self._clock.stop()
        self.host.run(stream)

    def _refuse(self, number: int) -> None:
        """One stream too many: the client may ask again (RFC 9113, 5.1.2), but not without end."""
        self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
        if not self._calm.spend(RESET_COST):
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)

    def _scope_of(self, headers: Headers) -> Message:
        if len(headers) > MAX_HEADERS:
            raise ValueError("too many headers")
        pseudo = {name: value for name, value in headers if name.startswith(b":")}
        plain = [(name, value) for name, value in headers if not name.startswith(b":")]
        if b":authority" in pseudo and all(name != b"host" for name, _ in plain):
            plain.insert(0, (b"host", pseudo[b":authority"]))
        return self._scope("2", pseudo[b":method"].decode("ascii"), pseudo.get(b":path", b""), plain)

    def _data(self, event: events.DataReceived) -> None:
        number, data, size = event.stream_id, event.data or b"", event.flow_controlled_length or 0
        assert number is not None
        if data:
            self._calm.earn(1)
        elif event.stream_ended is None and not self._calm.spend(1):
            self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        stream = self._streams.get(number)
        if stream is None or stream.finished:
            self._h2.acknowledge_received_data(size, number)
            return
        stream.feed(data)
        if size > len(data):  # padding
            self._h2.acknowledge_received_data(size - len(data), number)

    def _with(self, number: int | None, act: Callable[[Http2Stream], None]) -> None:
        stream = self._streams.get(number or 0)
        if stream is not None:
            act(stream)

    def _was_reset(self, stream: Http2Stream) -> None:
        stream.lose()
        self._forget(stream)

    def _forget(self, stream: Http2Stream) -> None:
        self._streams.pop(stream.number, None)
        if not self._streams and not self._ending:
            self._clock.start(FAREWELL_SECONDS if self.host.draining else self.host.config.keep_alive, self._idle)

    def _idle(self) -> None:
        self._end(ErrorCodes.NO_ERROR)

    def _end(self, code: ErrorCodes) -> None:
        self._lose_streams()
        self._go_away(self._h2.highest_inbound_stream_id, code)
        self.close()

    def _go_away(self, last: int, code: ErrorCodes) -> None:
        """Not by h2's own method, which would end the streams that are open."""
        self._flush()
        self.write(GoAwayFrame(0, last_stream_id=last, error_code=code).serialize())

    def _lose_streams(self) -> None:
        for stream in list(self._streams.values()):
            stream.lose()
        self._streams.clear()

    def _send(self) -> None:
        """What all streams write in one turn of the loop goes out together."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        data = self._h2.data_to_send()
        if data:
            self.write(data)
