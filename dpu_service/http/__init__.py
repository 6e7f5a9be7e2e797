"""HTTP/1.1 and HTTP/2 on asyncio transports, both driving one ASGI application."""
