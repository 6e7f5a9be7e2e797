"""Stands before every call: asks who may make it, counts it, ends it in time, and tells the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from gpu_runtime.control.access import ALLOWED, AUDITED, refusal
from gpu_runtime.control.audit import Audit, Entry
from gpu_runtime.control.caller import Caller, caller_of
from gpu_runtime.control.crowd import Crowd, Limits
from gpu_runtime.control.refused import RefusedCertificates

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Context, Interceptor, Handler = Any, grpc.aio.ServerInterceptor, Any

REQUEST_SECONDS = 10.0
"""For a call's request to come after its beginning."""
CALL_SECONDS = 60.0
"""For a call that is no stream, whatever its caller would wait, beside the grace time that it names."""
BRIEF_STREAMS = frozenset({"/blink.control.v1.Control/FetchTokenizer"})
"""Those that have an end, and get no more time than a call that is none."""
Status = tuple[grpc.StatusCode, str]
_REFUSED: Status = (grpc.StatusCode.UNAUTHENTICATED, "this certificate is refused by this runtime")


@dataclass(frozen=True)
class Method:
    """A method as it is called here: `call` gets one request, or an iterator of them."""

    name: str
    call: Callable[[Any, Context], Any]
    one_request: bool
    streams: bool


@dataclass(eq=False)
class Running:
    """A call that was let in."""

    caller: Caller
    streams: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    why: Status = (grpc.StatusCode.UNAVAILABLE, "the runtime is ending")


class Guard(Interceptor):
    """See the module. Requests are read here: gRPC would wait for them for ever, before anybody is asked anything."""

    def __init__(self, audit: Audit, refused: RefusedCertificates | None = None, limits: Limits | None = None) -> None:
        self._audit = audit
        self._refused = refused or RefusedCertificates()
        self._crowd = Crowd(limits or Limits())
        self._running: set[Running] = set()
        self._stopping = False

    def stop(self) -> None:
        """Ends every stream with UNAVAILABLE, in order. A stopping gRPC server would cancel their handlers instead, and
        print a traceback for each.
        """
        self._stopping = True
        for running in self._running:
            if running.streams:
                running.over.set()

    def end_refused(self) -> None:
        """Ends the calls of certificates that are refused by now."""
        for running in self._running:
            if self._is_refused(running.caller):
                running.why = _REFUSED
                running.over.set()

    def _is_refused(self, caller: Caller) -> bool:
        return caller.secure and self._refused.has(caller.subject, caller.fingerprint)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the method's handler; one that does not exist is refused like one that is not allowed."""
        name = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or name not in ALLOWED:
            handler = grpc.unary_unary_rpc_method_handler(_nothing)
        method = _method(name, handler)
        make: Any = grpc.stream_stream_rpc_method_handler if method.streams else grpc.stream_unary_rpc_method_handler
        made: Handler = make(
            self._guarded(method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made

    def _guarded(self, method: Method) -> Callable[..., Any]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            caller = caller_of(context.auth_context(), context.peer())
            refused = _REFUSED if self._is_refused(caller) else refusal(method.name, caller)
            if refused is None and method.name not in AUDITED:
                return await self._let_in(method, caller, requests, context)
            entry, outcome = Entry(method.name.rpartition("/")[2], caller), "OK"
            try:
                if refused is not None:
                    await context.abort(*refused)
                return await self._let_in(method, caller, requests, context, entry)
            except BaseException as error:
                outcome = _outcome(context, error)
                raise
            finally:
                self._audit.write(entry, outcome)

        return guarded

    async def _let_in(
        self,
        method: Method,
        caller: Caller,
        requests: AsyncIterator[Any],
        context: Context,
        entry: Entry | None = None,
    ) -> Any:
        """Runs the call, if it is not one too many."""
        full = self._crowd.full(caller, streams=method.streams)
        if full is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, full)
        running = Running(caller, method.streams)
        if self._stopping and method.streams:
            running.over.set()
        self._running.add(running)
        try:
            with self._crowd.inside(caller, streams=method.streams):
                request = await _one(requests, context) if method.one_request else requests
                if entry is not None:
                    entry.request = request
                return await _run(running, method, request, context)
        finally:
            self._running.discard(running)


def _method(name: str, handler: Handler) -> Method:
    kinds = {False: "unary", True: "stream"}
    several, streams = bool(handler.request_streaming), bool(handler.response_streaming)
    return Method(name, getattr(handler, f"{kinds[several]}_{kinds[streams]}"), not several, streams)


async def _one(requests: AsyncIterator[Any], context: Context) -> Any:
    """The only request of a call."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await anext(requests)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time")
    except (StopAsyncIteration, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no request of the call")


async def _run(running: Running, method: Method, request: Any, context: Context) -> Any:
    """A call until its end, or until it is over for another reason."""
    answer = method.call(request, context)
    working = asyncio.create_task(_write(answer, context) if method.streams else _awaited(answer))
    over = asyncio.create_task(running.over.wait())
    endless = method.streams and method.name not in BRIEF_STREAMS
    seconds = None if endless else CALL_SECONDS + getattr(request, "grace_seconds", 0)
    try:
        await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        if working.done():
            return await working
        if method.streams:  # abort may wait for a caller that takes nothing: what the stream holds is free before
            await _cancelled(working)
        late = (grpc.StatusCode.DEADLINE_EXCEEDED, f"the call took longer than {seconds} s")
        await _abort(context, running.why if over.done() else late)
    finally:
        over.cancel()
        await _cancelled(working)


async def _abort(context: Context, status: Status) -> None:
    try:
        await context.abort(*status)
    except grpc.aio.InternalError as error:  # the caller went away before it took the status
        raise asyncio.CancelledError from error


async def _cancelled(working: asyncio.Task[Any]) -> None:
    working.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await working


async def _awaited(answer: Coroutine[Any, Any, Any]) -> Any:
    return await answer


async def _write(answer: Any, context: Context) -> None:
    """Handlers of streams yield their messages or write them themselves."""
    if not hasattr(answer, "__aiter__"):
        await answer
        return
    async with aclosing(answer) as messages:
        async for message in messages:
            await context.write(message)


async def _nothing(request: Any, context: Context) -> None:
    """Stands for a method that is not there, towards callers that could call it if it were."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this runtime does not offer it")


def _outcome(context: Context, error: BaseException) -> str:
    """The status of a call that ended by an exception; CANCELLED: its caller went away, or its time was over."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    code: Any = context.code()
    known = {status.value[0]: status.name for status in grpc.StatusCode}
    return known.get(code.value[0] if isinstance(code, grpc.StatusCode) else code or 2, "UNKNOWN")
