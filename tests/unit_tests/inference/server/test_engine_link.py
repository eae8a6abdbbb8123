# SPDX-License-Identifier: Apache-2.0
"""Messages of the engine link, and batches of requests that arrive together."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from typing import Any

import pytest

from megatron.cli.tokenizers import ByteTokenizer
from megatron.core.inference import EngineRequest, SamplingParams
from megatron.inference.server.engine.client import EngineClient
from megatron.inference.server.engine.link import (
    LENGTH,
    MAX_FRAME_BYTES,
    FrameReader,
    frame,
    from_message,
    to_message,
)
from megatron.inference.server.protocol.generation import GenerationBody

MESSAGES = [{"kind": "a", "text": "é\n" * 9}, {"kind": "b"}, {"kind": "c", "ids": list(range(99))}]


@pytest.mark.parametrize("size", [1, 3, 64, 1 << 20])
def test_frames_are_reassembled_from_any_split(size: int) -> None:
    data = b"".join(map(frame, MESSAGES))
    reader, messages = FrameReader(), []
    for start in range(0, len(data), size):
        messages += reader.feed(data[start : start + size])
    assert messages == MESSAGES


def test_every_field_of_a_body_reaches_the_engine() -> None:
    """A new field of the sampling parameters needs a field of the body with its name, and no more:
    the requests of the engine and their messages are derived."""
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 7,
    }
    bias, names = {"5": 1.0}, {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*sampling, "logit_bias", "logprobs"}
    constraints = {"min_tokens": 1, "allowed_token_ids": [3, 5], "bad_words": ["b"]}
    body = GenerationBody(
        **{**sampling, **constraints, "logit_bias": bias, "stop_token_ids": [9, 8]},
        priority=-2,
        n=2,
        cache_salt="s",
    )
    requests = body.generation_request(
        [[1, 2], [3]],
        default_stop_tokens=[4],
        max_new_tokens=6,
        logprobs=2,
        names={},
        prompt_logprobs=True,
        grammar="start: /a/",
        reasoning_limit={"begin": "", "end": "x", "end_tokens": [7], "after": 3},
        **body.token_constraints(ByteTokenizer()),
    ).requests
    params = SamplingParams(**sampling, logit_bias={5: 1.0}, logprobs=2)
    assert requests[0].sampling == params
    sent = dataclasses.replace(requests[3], request_id=11)
    assert (sent.prompt, sent.sequence, sent.stop_tokens) == ((3,), 3, (4, 8, 9))
    unset = {f.name for f in dataclasses.fields(sent) if getattr(sent, f.name) == f.default}
    assert unset == {"n", "mask", "forced"}
    received = from_message(EngineRequest, json.loads(json.dumps(to_message(sent))))
    assert received == sent
    assert to_message(EngineRequest(prompt=(1,))) == {"prompt": (1,)}


def test_oversized_frame_is_refused_by_its_header() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


def request_id(message: dict[str, Any]) -> int:
    return message["request"]["request_id"] if message["kind"] == "add" else message["id"]


async def writes_of_requests(delays: list[int]) -> list[list[int]]:
    """Submit requests after `delays` turns of the event loop; return the ids of each write."""
    client_socket, engine_socket = socket.socketpair()
    with engine_socket:
        reader, writer = await asyncio.open_connection(sock=client_socket)
        client = EngineClient(reader, writer, max_outputs=9, max_unsent=9)
        write, writes = writer.write, []

        def recorded_write(data: bytes) -> None:
            writes.append([request_id(message) for message in FrameReader().feed(data)])
            write(data)

        writer.write = recorded_write  # type: ignore[method-assign]

        async def submit(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            client.add_requests([EngineRequest(prompt=(5,), max_new_tokens=2)])

        await asyncio.gather(*map(submit, delays))
        client.abort([0])
        while sum(map(len, writes)) < len(delays) + 1:
            await asyncio.sleep(0)
        writer.close()
    return writes


@pytest.mark.parametrize(
    ("delays", "expected"),
    [([0, 3, 9], [[0, 1, 2, 0]]), ([0, 40], [[0], [1, 0]])],
    ids=["burst", "two requests"],
)
def test_simultaneous_requests_are_submitted_together(
    delays: list[int], expected: list[list[int]]
) -> None:
    assert asyncio.run(writes_of_requests(delays)) == expected
