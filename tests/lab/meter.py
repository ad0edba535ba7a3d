"""A relay that counts the bytes on real connections."""

import asyncio
import contextlib
import threading
from typing import NamedTuple

_CHUNK_BYTES = 1 << 16


class Traffic(NamedTuple):
    """Bytes between a node and the SuperLink, with the headers of HTTP and TLS, without TCP's."""

    up_bytes: int = 0
    down_bytes: int = 0

    def __sub__(self, earlier):
        return Traffic(self.up_bytes - earlier.up_bytes, self.down_bytes - earlier.down_bytes)


class Meter:
    """Listens on ports of its own and passes everything on to another address.

    One port per name, so that traffic can be told apart. Runs in a thread, until it is closed.
    ``watch`` is told the name, a number for the connection, and what a node sends.
    """

    def __init__(self, host, target):
        self.host = host
        self.target = target
        self.watch = None
        self._counts = {}
        self._servers = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, name):
        """Open a port for ``name`` and return its number."""
        self._counts[name] = [0, 0]
        return asyncio.run_coroutine_threadsafe(self._serve(name), self._loop).result(10)

    def traffic(self, name):
        return Traffic(*self._counts[name])

    async def _stop(self):
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, name):
        async def accept(reader, writer):
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._pass_on(name, reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(accept, self.host, 0)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def _pass_on(self, name, reader, writer):
        there_reader, there_writer = await asyncio.open_connection(self.host, self.target)
        try:
            await asyncio.gather(
                self._pump(name, 0, reader, there_writer), self._pump(name, 1, there_reader, writer)
            )
        finally:
            there_writer.transport.abort()

    async def _pump(self, name, direction, reader, writer):
        while data := await reader.read(_CHUNK_BYTES):
            self._counts[name][direction] += len(data)
            if direction == 0 and self.watch is not None:
                self.watch(name, id(reader), data)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
