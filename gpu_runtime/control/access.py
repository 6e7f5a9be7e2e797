"""Who may call what: one table, and the interceptor that asks it before every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc

from blink_proto.roles import Role
from gpu_runtime.control.audit import Audit, Entry
from gpu_runtime.control.caller import Caller, caller_of

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Context, Interceptor, Handler = Any, grpc.aio.ServerInterceptor, Any

_EVERYBODY = frozenset(Role)
_LOOKERS = frozenset({Role.ADMINISTRATOR, Role.READER})
_CONTROL = "/blink.control.v1.Control/"
ALLOWED: dict[str, frozenset[Role]] = {
    _CONTROL + "GetServerInfo": _EVERYBODY,
    _CONTROL + "ListModels": _EVERYBODY,
    _CONTROL + "WatchState": _EVERYBODY,
    _CONTROL + "ListSessions": _LOOKERS,
    _CONTROL + "LoadModel": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "UnloadModel": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "Drain": frozenset({Role.ADMINISTRATOR}),
    _CONTROL + "OpenSession": frozenset({Role.FRONT_END}),
    _CONTROL + "FetchTokenizer": frozenset({Role.FRONT_END}),
    "/grpc.health.v1.Health/Check": _EVERYBODY,
    "/grpc.health.v1.Health/Watch": _EVERYBODY,
    "/grpc.health.v1.Health/List": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _LOOKERS,
}
"""What is not here may be called by nobody."""

AUDITED = frozenset(_CONTROL + name for name in ("LoadModel", "UnloadModel", "Drain", "OpenSession"))
"""Calls that change something. Those that are refused to the caller's role are told too, whatever they are."""

_FACTORIES: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def refusal(method: str, caller: Caller) -> tuple[grpc.StatusCode, str] | None:
    """Why a caller may not call a method; None when it may. In plain text, on one machine, everybody may do everything
    that the table knows.
    """
    allowed = ALLOWED.get(method, frozenset())
    if caller.secure and caller.role is None:
        known = ", ".join(role.uri for role in Role)
        return grpc.StatusCode.UNAUTHENTICATED, f"the certificate names no role (a URI, one of: {known})"
    if caller.role in allowed or (allowed and not caller.secure):
        return None
    role = caller.shown_role
    return grpc.StatusCode.PERMISSION_DENIED, f"{method.rpartition('/')[2]} is not for the role {role}"


class Guard(Interceptor):
    """Asks the table, and tells the audit log."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends every stream with UNAVAILABLE, in order. A stopping gRPC server would cancel their handlers instead, and
        print a traceback for each.
        """
        self._stopping.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the method's handler; one that does not exist is refused like one that is not allowed."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method not in ALLOWED:
            return grpc.unary_unary_rpc_method_handler(self._guarded(method, _nothing, streams=False))
        streams = bool(handler.response_streaming)
        kind = (bool(handler.request_streaming), streams)
        names = {False: "unary", True: "stream"}
        call = getattr(handler, f"{names[kind[0]]}_{names[kind[1]]}")
        made: Handler = _FACTORIES[kind](
            self._guarded(method, call, streams=streams),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made

    def _guarded(self, method: str, call: Callable[[Any, Context], Any], *, streams: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            caller = caller_of(context.auth_context(), context.peer())
            refused = refusal(method, caller)
            if refused is None and method not in AUDITED:
                return await self._run(call(request, context), context, streams=streams)
            entry, outcome = Entry(method.rpartition("/")[2], caller, None if refused else request), "OK"
            try:
                if refused is not None:
                    await context.abort(*refused)
                return await self._run(call(request, context), context, streams=streams)
            except BaseException as error:
                outcome = _outcome(context, error)
                raise
            finally:
                self._audit.write(entry, outcome)

        return guarded

    async def _run(self, answer: Any, context: Context, *, streams: bool) -> Any:
        if not streams:
            return await answer
        writing = asyncio.create_task(_write(answer, context))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({writing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                return await writing
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the runtime is ending")
        finally:
            stopping.cancel()
            writing.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await writing


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
