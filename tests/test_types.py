"""What a sample and a group may and may not become."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefill.types import (
    Completion,
    FinishReason,
    Group,
    GroupState,
    Media,
    Modality,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    VersionSpan,
    token_array,
)


def completion(
    tokens: int = 3,
    finish: FinishReason = FinishReason.STOP,
    versions: tuple[VersionSpan, ...] = (),
    **kwargs: object,
) -> Completion:
    return Completion(
        tokens=token_array(range(tokens)),
        logprobs=np.full(tokens, -0.25, dtype=np.float32),
        text="ab" * tokens,
        finish_reason=finish,
        prompt_tokens=10,
        versions=versions,
        **kwargs,  # type: ignore[arg-type]
    )


def test_append_fills_tokens_logprobs_and_mask_to_one_length() -> None:
    sample = Sample(index=0)
    sample.append(completion(4))
    assert sample.tokens.tolist() == [0, 1, 2, 3]
    assert sample.tokens.size == sample.logprobs.size == sample.loss_mask.size
    assert sample.status is Status.COMPLETED
    assert (sample.tokens.dtype, sample.logprobs.dtype, sample.loss_mask.dtype) == (np.int32, np.float32, np.uint8)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_finished_sample_takes_no_more_tokens(finish: FinishReason) -> None:
    sample = Sample(index=0)
    sample.append(completion(finish=finish))
    with pytest.raises(ValueError, match="takes no more"):
        sample.append(completion())
    with pytest.raises(ValueError, match="cannot fail"):
        sample.fail("no")


def test_a_failed_sample_takes_no_tokens_and_keeps_the_reason() -> None:
    sample = Sample(index=0)
    sample.fail("engine gone")
    assert sample.error == "engine gone"
    with pytest.raises(ValueError, match="takes no more"):
        sample.append(completion())


@given(parts=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_note_45_a_resumed_sample_keeps_every_part_at_one_length(parts: list[int]) -> None:
    sample = Sample(index=0)
    for i, size in enumerate(parts):
        last = i == len(parts) - 1
        spans = (VersionSpan(f"v{i // 2}", 0, size),)
        sample.append(completion(size, FinishReason.STOP if last else FinishReason.ABORT, spans))
    total = sum(parts)
    assert sample.tokens.size == sample.logprobs.size == sample.loss_mask.size == total
    assert sample.tokens.tolist() == [t for size in parts for t in range(size)]
    at = 0
    for span in sample.versions:
        assert span.start == at
        at = span.end
    assert at == total
    versions = [span.version for span in sample.versions]
    assert len(set(versions)) == len(versions)  # neighbours with one version are one span


def test_a_part_with_unknown_version_gets_a_span_without_a_name() -> None:
    sample = Sample(index=0)
    sample.append(completion(2, FinishReason.ABORT))
    sample.append(completion(3, versions=(VersionSpan("v2", 0, 3),)))
    assert sample.versions == (VersionSpan("", 0, 2), VersionSpan("v2", 2, 5))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"logprobs": np.zeros(2, dtype=np.float32)}, "3 tokens but 2 logprobs"),
        ({"logprobs": np.array([0, np.nan, 0], dtype=np.float32)}, "must be numbers"),
        ({"logprobs": np.array([0, 0.5, 0], dtype=np.float32)}, "not above 0"),
        ({"cached_tokens": 11}, "outside 0..10"),
        ({"cached_tokens": -1}, "outside 0..10"),
        ({"versions": (VersionSpan("a", 0, 2),)}, "end at 2"),
        ({"versions": (VersionSpan("a", 1, 3),)}, "do not tile"),
        ({"versions": (VersionSpan("a", 0, 2), VersionSpan("b", 1, 3))}, "do not tile"),
    ],
)
def test_a_completion_that_disagrees_with_itself_cannot_be_built(bad: dict[str, object], says: str) -> None:
    good: dict[str, object] = {
        "tokens": token_array([1, 2, 3]),
        "logprobs": np.full(3, -1, dtype=np.float32),
        "text": "abc",
        "finish_reason": FinishReason.STOP,
        "prompt_tokens": 10,
    }
    with pytest.raises(ValueError, match=says):
        Completion(**(good | bad))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1], [2]], [True], ["1"]])
def test_token_ids_are_checked(ids: list[object]) -> None:
    with pytest.raises(ValueError):
        token_array(ids)  # type: ignore[arg-type]


def test_arrays_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        token_array([1, 2])[0] = 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_new_tokens", 129),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 3.0),
        ("presence_penalty", -3.0),
    ],
)
def test_sampling_params_out_of_range_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"id": ""},
        {"id": "p"},
        {"id": "p", "text": ""},
        {"id": "p", "messages": ()},
        {"id": "p", "tokens": token_array([])},
        {"id": "p", "text": "a", "messages": ({"role": "user", "content": "a"},)},
    ],
)
def test_empty_and_double_prompts_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Prompt(**bad)  # type: ignore[arg-type]


def test_a_group_is_numbered_and_moves_forward_only() -> None:
    prompt = Prompt(id="p", tokens=token_array([1]))
    with pytest.raises(ValueError, match="at least one"):
        Group.of(prompt, 0, SamplingParams())
    with pytest.raises(ValueError, match="no samples"):
        Group(id="g", prompt=prompt, sampling=SamplingParams(), samples=[])
    with pytest.raises(ValueError, match="numbered"):
        Group(id="g", prompt=prompt, sampling=SamplingParams(), samples=[Sample(index=1)])
    group = Group.of(prompt, 2, SamplingParams())
    with pytest.raises(ValueError, match="cannot go"):
        group.move(GroupState.DONE)
    group.move(GroupState.IN_FLIGHT)
    for sample in group.samples:
        assert not group.complete
        sample.append(completion())
    assert group.complete
    group.move(GroupState.DONE)
    with pytest.raises(ValueError, match="cannot go"):
        group.move(GroupState.PENDING)


def test_an_aborted_sample_whose_budget_is_spent_can_be_truncated() -> None:
    sample = Sample(index=0)
    sample.append(completion(finish=FinishReason.ABORT, message="Aborted"))
    sample.truncate()
    assert (sample.status, sample.finish_reason, sample.error) == (Status.TRUNCATED, FinishReason.LENGTH, "")
    with pytest.raises(ValueError, match="only an aborted"):
        sample.truncate()


def test_a_sample_aborted_before_its_first_token_can_be_as_it_was_before() -> None:
    sample = Sample(index=0)
    sample.append(completion(0, FinishReason.ABORT, engine="http://e", request_id="r", message="Aborted"))
    sample.revive()
    fresh = Sample(index=0)
    for name in ("status", "finish_reason", "text", "versions", "prompt_tokens", "engine", "request_id", "error"):
        assert getattr(sample, name) == getattr(fresh, name), name
    assert sample.untouched
    sample.append(completion(2, FinishReason.ABORT))
    with pytest.raises(ValueError, match="not pristine"):
        sample.revive()


def test_note_36_a_reference_to_media_never_holds_the_bytes() -> None:
    for source in (b"\x89PNG secret", "data:image/png;base64,c2VjcmV0"):
        media = Media(Modality.IMAGE, source)
        assert "secret" not in str(media.reference()) + repr(media)
        assert "c2VjcmV0" not in str(media.reference()) + repr(media)
        assert len(media.reference()["sha256"]) == 64
    assert Media(Modality.IMAGE, "a.png").reference()["source"] == "a.png"
    with pytest.raises(ValueError, match="empty"):
        Media(Modality.IMAGE, b"")


def test_importing_onefill_is_light() -> None:
    code = (
        "import sys, onefill\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'aiohttp', 'ray', 'plotly', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
