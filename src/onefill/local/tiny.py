"""The `tiny` model: a random two-layer Llama with a byte-level tokenizer, the same on every machine of one torch.

Invariants: ids 0..255 are the bytes; 256.. are the special tokens. Weights are scaled up so that greedy decoding
wanders instead of repeating one token, and leans to printable ASCII; all else, the end-of-sequence id included,
comes now and then at temperature 1.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build"]

_SEED = 20240501
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(directory: Path) -> None:
    """Writes the model and its tokenizer into a directory."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    _model(tokenizer).save_pretrained(directory)


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = _byte_letters()
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = _CHAT
    tokenizer.model_max_length = 4096
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte that byte-level tokenizers use, in the order of the bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256 + len(_SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 2:
                scale = 1.0 if "embed" in name else 3.0 * tensor.shape[1] ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        model.lm_head.weight[torch.tensor([i for i in range(config.vocab_size) if not 0x20 <= i < 0x7F])] *= 0.3
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model
