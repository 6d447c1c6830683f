"""The `/generate` handler: from a parsed request to reply items, whole or streamed.

Invariants:
- Every way out of a request that is not a complete answer aborts what it still had in the engine: a closed
  connection, an error, a shutdown.
- Nothing here blocks the event loop: tokenising, scoring and building replies run in worker threads.
- Items come in the order of the prompts, and of the samples of each prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from typing import Any

import orjson
from aiohttp import web

from onefill.errors import DataError, InfraError
from onefill.local.engine import Engine
from onefill.local.replies import Wanted, item
from onefill.local.sequence import Sequence
from onefill.local.wire import Contract, Job, Jobs, Malformed, Refusal, Refused, parse_body, parse_generate

__all__ = ["generate", "health_probe", "run_jobs"]


class Running:
    """The sequences of one request, and word of their news on the event loop.

    Args:
        engine: where they run.
        loop: the event loop that waits for them.
    """

    __slots__ = ("_engine", "_loop", "_news", "sequences", "wanted")

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._news = asyncio.Event()
        self.sequences: list[Sequence] = []
        self.wanted: list[Wanted] = []

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def submit(self, prompts: SequenceOf[list[int]], jobs: SequenceOf[Job], *, stream: bool) -> None:
        """Queues all prompts; all of them were checked before.

        Raises:
            InfraError: the engine has stopped.
        """
        for prompt, job in zip(prompts, jobs, strict=True):
            group = [
                Sequence(
                    rid=rid,
                    prompt_tokens=len(prompt),
                    params=job.params,
                    max_new_tokens=self._engine.room(prompt, job.params),
                    eos_ids=self._engine.eos_ids,
                    watch=self._engine.watch(job.params),
                    streams=stream,
                    grouped=len(job.rids) > 1,
                    notify=self._notify,
                )
                for rid in job.rids
            ]
            self.sequences += group
            self._engine.submit(prompt, group)

    async def news(self) -> None:
        """Waits until a sequence has something new."""
        await self._news.wait()
        self._news.clear()

    async def end(self) -> None:
        """Waits until all sequences have ended."""
        while any(s.finish is None for s in self.sequences):
            await self.news()

    def abandon(self) -> None:
        """Takes what has not ended off the engine."""
        self._engine.abort(self.sequences)

    def items(self, indices: SequenceOf[int]) -> list[dict[str, Any]]:
        """Reply items of some sequences, as far as they have got."""
        return [item(self.sequences[i], self.wanted[i]) for i in indices]


async def generate(request: web.Request, engine: Engine) -> web.StreamResponse:
    """Handles `/generate`."""
    body = parse_body(await request.read())
    try:
        jobs = await asyncio.to_thread(parse_generate, body)
        running, prompts = await _prepare(engine, jobs)
        _submit(running, prompts, jobs)
    except (Malformed, Contract):
        raise
    except Refusal as refusal:
        if body.get("stream") is True:
            return await _stream_refusal(request, refusal)
        raise
    try:
        if jobs.stream:
            return await _stream(request, running, numbered=jobs.as_list)
        await running.end()
        everything = await asyncio.to_thread(running.items, range(len(running.sequences)))
        _check_alive(running)
        payload = everything if jobs.as_list else everything[0]
        return web.Response(body=orjson.dumps(payload), content_type="application/json")
    finally:
        running.abandon()


async def run_jobs(engine: Engine, jobs: Jobs) -> list[dict[str, Any]]:
    """Runs a request without HTTP and returns its items."""
    running, prompts = await _prepare(engine, jobs)
    try:
        _submit(running, prompts, jobs)
        await running.end()
        return running.items(range(len(running.sequences)))
    finally:
        running.abandon()


async def _prepare(engine: Engine, jobs: Jobs) -> tuple[Running, list[list[int]]]:
    """Tokenises and checks every prompt before anything is queued, so that a refusal leaves nothing behind."""
    taken = {rid for job in jobs.jobs for rid in job.rids} & engine.live.keys()
    if taken:
        raise Refused(f"Duplicate request ID detected: {sorted(taken)[0]}")
    try:
        prompts = await asyncio.to_thread(_prompts, engine, jobs.jobs)
        scores = [
            await asyncio.to_thread(engine.score, prompt) if job.logprob_start_len >= 0 else None
            for job, prompt in zip(jobs.jobs, prompts, strict=True)
        ]
    except DataError as error:
        raise Refused(str(error)) from error
    except InfraError as error:
        raise Refusal(str(error), 503) from error
    running = Running(engine, asyncio.get_running_loop())
    for job, prompt, score in zip(jobs.jobs, prompts, scores, strict=True):
        running.wanted += [_wanted(engine, job, prompt, score, texts=jobs.text_in_logprobs)] * len(job.rids)
    return running, prompts


def _prompts(engine: Engine, jobs: SequenceOf[Job]) -> list[list[int]]:
    prompts: list[list[int]] = []
    for job in jobs:
        ids = engine.encode(job.text) if job.text is not None else job.input_ids or []
        engine.room(ids, job.params)
        bad = [t for t in (*job.params.logit_bias, *job.params.stop_token_ids) if not 0 <= t < engine.vocab_size]
        if bad:
            raise DataError(f"token id {bad[0]} is outside the vocabulary (0..{engine.vocab_size - 1})")
        prompts.append(ids)
    return prompts


def _wanted(engine: Engine, job: Job, prompt: list[int], score: list[float] | None, *, texts: bool) -> Wanted:
    scored: list[tuple[float | None, int]] = []
    if score is not None and job.logprob_start_len < len(prompt):
        start = job.logprob_start_len
        scored = [(None, prompt[start]), *zip(score[start:], prompt[start + 1 :], strict=True)]
    return Wanted(
        decode=lambda ids, skip: engine.decode(ids, skip_special_tokens=skip),
        version=lambda: engine.weight_version,
        logprobs=job.return_logprob,
        prompt_logprobs=scored,
        texts=texts,
    )


def _submit(running: Running, prompts: list[list[int]], jobs: Jobs) -> None:
    try:
        running.submit(prompts, jobs.jobs, stream=jobs.stream)
    except InfraError as error:
        running.abandon()
        raise Refusal(str(error), 503) from error


def _check_alive(running: Running) -> None:
    broken = next((s.error for s in running.sequences if s.error is not None), None)
    if broken is not None:
        raise Refusal(broken, 500)


async def _stream(request: web.Request, running: Running, *, numbered: bool) -> web.StreamResponse:
    """Sends cumulative chunks as sequences publish them; the last of each carries its finish reason."""
    response = _event_stream()
    await response.prepare(request)
    sent = [0] * len(running.sequences)
    open_ones = set(range(len(running.sequences)))
    while open_ones:
        fresh = sorted(
            i for i in open_ones if running.sequences[i].finish or running.sequences[i].published > sent[i]
        )
        for i, chunk in zip(fresh, await asyncio.to_thread(running.items, fresh), strict=True):
            sent[i] = chunk["meta_info"]["completion_tokens"]
            if chunk["meta_info"]["finish_reason"] is not None:
                open_ones.discard(i)
            if numbered:
                chunk["index"] = i
            try:
                await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
            except ConnectionResetError:  # the client has left; the caller takes the work off the engine
                return response
        if open_ones:
            await running.news()
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _stream_refusal(request: web.Request, refusal: Refusal) -> web.StreamResponse:
    """A refusal of a streamed request travels inside the stream, as SGLang sends it."""
    response = _event_stream()
    await response.prepare(request)
    error = {
        "message": str(refusal),
        "type": "invalid_request_error",
        "code": refusal.status,
        "retryable": False,
    }
    await response.write(b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


def _event_stream() -> web.StreamResponse:
    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})


def health_probe() -> Jobs:
    """A request of one token, to see that the engine generates."""
    return parse_generate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}})
