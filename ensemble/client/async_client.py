# SPDX-License-Identifier: Apache-2.0
"""The asyncio client; `ensemble.client.client` says what it promises. Knows nothing of threads."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tritonclient import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from ensemble.client.base import CLOSE_SECONDS, BaseClient, ReadyWait, closed_meanwhile
from ensemble.client.call import Call, Chunk, Texts
from ensemble.client.options import DEFAULT_URL, ClientOptions
from ensemble.client.wire import Classification
from ensemble.errors import InvalidRequest, PipelineError


class AsyncClient(BaseClient):
    """The client for asyncio: of the event loop it is first used in. A cancelled call's requests go on to their end."""

    def __init__(self, url: str = DEFAULT_URL, *, options: ClientOptions | None = None, **fields: Any) -> None:
        """As for Client; needs no running event loop."""
        super().__init__(url, options=options, **fields)
        self._slots = asyncio.Semaphore(self.options.in_flight)
        self._in_flight: set[asyncio.Future[grpc.InferResult]] = set()
        self._rpc: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def classify(self, texts: Texts, *, timeout_seconds: float | None = None) -> list[Classification]:
        """See Client.classify."""
        call = Call(texts, self.url, self.options, timeout_seconds, strict=True)
        return cast("list[Classification]", await self._run(call))

    async def classify_each(
        self, texts: Texts, *, timeout_seconds: float | None = None
    ) -> list[Classification | PipelineError]:
        """See Client.classify_each."""
        return await self._run(Call(texts, self.url, self.options, timeout_seconds, strict=False))

    async def wait_ready(self, timeout_seconds: float = 60.0) -> None:
        """See Client.wait_ready."""
        rpc = self._connected()
        wait = ReadyWait(self.url, self.options, timeout_seconds)
        while True:
            self._check_open()
            try:
                if await rpc.is_model_ready(**wait.arguments()):
                    return
                await asyncio.sleep(wait.pause(None))
            except InferenceServerException as error:
                await asyncio.sleep(wait.pause(error))

    async def close(self) -> None:
        """See Client.close."""
        self._closed = True
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=CLOSE_SECONDS)
        if self._rpc is not None:
            await self._rpc.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _connected(self) -> Any:
        """tritonclient's client; made late, because a channel of grpc.aio belongs to the event loop it is made in."""
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._rpc is None:
            self._rpc, self._loop = aio.InferenceServerClient(**self._connection), loop
        if self._loop is not loop:
            raise InvalidRequest("this client is in use in another event loop: make one in each")
        return self._rpc

    async def _run(self, call: Call) -> list[Classification | PipelineError]:
        rpc = self._connected()
        try:
            call.plan(await self._rows_per_request(rpc, call))
        except PipelineError as error:
            call.give_up(error)
        flying: dict[asyncio.Task[grpc.InferResult], Chunk] = {}
        try:
            while not call.finished:
                while (chunk := call.take()) is not None:
                    flying[asyncio.create_task(self._send(rpc, call, chunk))] = chunk
                if not flying:
                    await asyncio.sleep(call.pause())
                    continue
                done, _ = await asyncio.wait(flying, timeout=call.pause(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failure = _failure(task)
                    call.settle(flying.pop(task), task.result() if failure is None else None, failure)
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)
        return call.answers()

    async def _send(self, rpc: Any, call: Call, chunk: Chunk) -> grpc.InferResult:
        async with self._slots:
            if self._closed:
                raise closed_meanwhile()
            request = asyncio.ensure_future(rpc.infer(**call.arguments(chunk)))
            self._in_flight.add(request)
            request.add_done_callback(self._ended)
            # Whoever no longer waits for it gives its slot back, and does not hang up on the server.
            return await asyncio.shield(request)

    def _ended(self, request: asyncio.Future[grpc.InferResult]) -> None:
        self._in_flight.discard(request)
        if not request.cancelled():
            request.exception()  # which asyncio would report if nobody had asked

    async def _rows_per_request(self, rpc: Any, call: Call) -> int:
        """See Client._rows_per_request."""
        tries = 0
        while self._batch_limit is None and call.valid_texts > 1:
            self._check_open()
            try:
                config = (await rpc.get_model_config(**self._config_arguments(call))).config
                self._batch_limit = max(1, config.max_batch_size)
            except InferenceServerException as error:
                tries += 1
                await asyncio.sleep(self._pause_or_raise(error, tries, call))
        return self._batch_limit or 1


def _failure(task: asyncio.Task[Any]) -> Exception | None:
    """What a finished task ended in; None for an answer."""
    if task.cancelled():  # by close(): nobody else cancels a request behind its call's back
        return closed_meanwhile()
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
