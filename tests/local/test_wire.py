"""What clients may send, and how refusals read."""

from __future__ import annotations

import pytest

from onefill.local.wire import Contract, Malformed, Refusal, Refused, parse_body, parse_generate


def one(**body: object):
    return parse_generate({"input_ids": [1, 2], **body})


def test_defaults_are_sglangs():
    (job,) = one().jobs
    p = job.params
    assert (p.max_new_tokens, p.temperature, p.top_p, p.top_k, p.min_p) == (128, 1.0, 1.0, -1, 0.0)
    assert (job.return_logprob, job.logprob_start_len) == (False, -1)
    assert not one().as_list


def test_null_means_the_default():
    p = (
        one(sampling_params={"temperature": None, "top_p": None, "top_k": None, "n": None, "stop": None})
        .jobs[0]
        .params
    )
    assert (p.temperature, p.top_p, p.top_k, p.stop) == (1.0, 1.0, -1, ())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, Refused),
        ({"text": "a", "input_ids": [1]}, Refused),
        ({"input_ids": []}, Refused),
        ({"input_ids": "abc"}, Malformed),
        ({"input_ids": [1.5]}, Malformed),
        ({"input_ids": [True]}, Malformed),
        ({"input_ids": [1], "stream": "yes"}, Malformed),
        ({"input_ids": [1], "sampling_params": {"max_tokens": 4}}, Contract),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, Contract),
        ({"input_ids": [1], "sampling_params": {"temperature": "0.5"}}, Contract),
        ({"input_ids": [1], "sampling_params": {"n": 2.0}}, Contract),
        ({"input_ids": [1], "sampling_params": {"ignore_eos": 1}}, Contract),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, Refused),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, Refused),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, Refused),
        ({"input_ids": [1], "sampling_params": {"min_p": 2}}, Refused),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, Refused),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, Refused),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 0}}, Refused),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "("}}, Refused),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, Refused),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}}, Refused),
        ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, Refused),
        ({"input_ids": [1], "sampling_params": {"beam_width": 4}}, Refused),
        ({"input_ids": [1], "top_logprobs_num": 3}, Refused),
        ({"input_ids": [1], "image_data": ["x"]}, Refused),
        ({"input_ids": [1], "return_routed_experts": True}, Refused),
        ({"input_ids": [1], "lora_path": "a"}, Refused),
        ({"input_ids": [1], "rid": ["a", "b"]}, Refused),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, Refused),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, Refused),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, Refused),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}, Refused),
        ({"input_ids": [[1], [2]], "return_logprob": [True]}, Refused),
    ],
)
def test_bad_requests_are_refused_in_the_right_shape(body: dict[str, object], kind: type[Refusal]):
    with pytest.raises(kind) as caught:
        parse_generate(body)
    assert type(caught.value) is kind
    assert caught.value.status == 400


def test_integers_are_fine_as_numbers_and_null_flags_are_off():
    jobs = one(sampling_params={"temperature": 1, "top_p": 1, "logit_bias": {"3": 2}}, stream=None)
    assert jobs.jobs[0].params.logit_bias == {3: 2.0}
    assert jobs.stream is False


def test_an_unknown_field_is_named():
    with pytest.raises(Contract, match="unknown field `max_tokens`"):
        one(sampling_params={"max_tokens": 3})


def test_the_three_shapes():
    assert Contract("x").body() == {"error": "x"}
    assert Refused("x").body() == {"error": {"message": "x"}}
    assert Malformed("x").body()["object"] == "error"
    assert Malformed("x").body()["code"] == 400


@pytest.mark.parametrize("raw", [b"[1]", b"{", b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_malformed(raw: bytes):
    with pytest.raises(Malformed):
        parse_body(raw)


def test_rids_of_batches_are_numbered_and_children_get_their_own():
    assert one(rid="a").jobs[0].rids == ("a",)
    assert [j.rids for j in parse_generate({"input_ids": [[1], [2]], "rid": "a"}).jobs] == [("a_0",), ("a_1",)]
    rids = one(rid="a", sampling_params={"n": 3}).jobs[0].rids
    assert len(set(rids)) == 3
    assert "a" not in rids


@pytest.mark.parametrize("n", [0, -1, 1])
def test_n_below_two_is_one_object(n: int):
    jobs = one(sampling_params={"n": n})
    assert (len(jobs.jobs[0].rids), jobs.as_list) == (1, False)


def test_a_batch_of_one_answers_a_list():
    assert parse_generate({"text": ["a"]}).as_list


def test_each_prompt_of_a_batch_may_have_its_own_parameters():
    jobs = parse_generate(
        {
            "text": ["a", "b"],
            "sampling_params": [{"temperature": 0}, {"temperature": 0.5}],
            "return_logprob": [True, False],
        }
    ).jobs
    assert [(j.params.temperature, j.return_logprob) for j in jobs] == [(0.0, True), (0.5, False)]
