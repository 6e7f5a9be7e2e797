"""Which of several runtimes gets a request: pure functions on one state object, without clocks, sockets or asyncio."""
