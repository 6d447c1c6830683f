"""What goes on the wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from onefill.engine.codec import encode, headers
from onefill.errors import DataError
from onefill.types import Media, Modality, SamplingParams
from tests.engine.scripted import ScriptedEngine, reply
from tests.engine.support import client_of, make_request


def body(n: int = 1, **fields: Any) -> Any:
    return json.loads(encode(make_request(n, **fields)))


def test_a_request_says_everything_that_the_server_could_otherwise_choose() -> None:
    sent = body()
    assert sent["input_ids"] == [0, 1, 2, 3, 4]
    assert sent["return_logprob"] is True
    assert sent["rid"] == "r-1"
    defaults = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "repetition_penalty", "ignore_eos"}
    assert defaults <= sent["sampling_params"].keys()
    assert "stream" not in sent
    assert not {"image_data", "lora_path", "return_routed_experts"} & sent.keys()


def test_n_and_seed_and_stops_are_sent_only_where_set() -> None:
    assert not {"n", "stop", "stop_token_ids", "sampling_seed", "stream_interval"} & body()["sampling_params"].keys()
    assert body(8)["sampling_params"]["n"] == 8
    sampling = SamplingParams(stop=("a", "b"), stop_token_ids=(7,))
    sent = body(sampling=sampling, seed=3, lora="ad", routed_experts=True)
    assert sent["sampling_params"]["stop"] == ["a", "b"]
    assert sent["sampling_params"]["stop_token_ids"] == [7]
    assert sent["sampling_params"]["sampling_seed"] == 3
    assert sent["lora_path"] == "ad"
    assert sent["return_routed_experts"] is True


@pytest.mark.parametrize("modality", list(Modality))
def test_notes_2_and_10_media_have_the_outer_list_under_n(modality: Modality) -> None:
    key = f"{modality}_data"
    two = (Media(modality, "http://h/a"), Media(modality, "data:x;base64,AA=="))
    assert body(8, media=two)[key] == [["http://h/a", "data:x;base64,AA=="]]
    assert body(8, media=two[:1])[key] == [["http://h/a"]]
    assert body(1, media=two)[key] == ["http://h/a", "data:x;base64,AA=="]


def test_bytes_go_as_base64_and_modalities_apart() -> None:
    sent = body(2, media=(Media(Modality.IMAGE, b"\x00\x01"), Media(Modality.AUDIO, "a.wav")))
    assert sent["image_data"] == [["AAE="]]
    assert sent["audio_data"] == [["a.wav"]]
    assert "video_data" not in sent


def test_a_slice_of_an_array_is_sent_right() -> None:
    assert body(tokens=np.arange(10, dtype=np.int32)[::2])["input_ids"] == [0, 2, 4, 6, 8]


def test_what_has_no_json_form_is_a_data_error() -> None:
    with pytest.raises(DataError, match="cannot be written as JSON"):
        encode(make_request(id="\ud800"))


@pytest.mark.parametrize("group", ["plain-1", "gruppe ü", "a\r\nX-Evil: 1", "x" * 5000, "日本", "a%b", "\ud800"])
async def test_the_routing_key_is_legal_and_tells_groups_apart(group: str) -> None:
    key = headers(make_request(group_id=group))["X-SMG-Routing-Key"]
    assert key.isascii()
    assert key.isprintable()
    assert len(key) <= 256
    assert key != headers(make_request(group_id=group + "!"))["X-SMG-Routing-Key"]
    async with ScriptedEngine([reply()]) as engine, client_of(engine.url) as (client, _):
        await client.generate(make_request(group_id=group))
        assert engine.headers[0]["X-SMG-Routing-Key"] == key
    assert headers(make_request(group_id="plain-1"))["X-SMG-Routing-Key"] == "plain-1"
