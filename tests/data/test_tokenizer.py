"""Ids are those of transformers, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, processors

from onefill.data import Tokenizer, tokenize
from onefill.errors import ConfigError, DataError
from onefill.types import Media, Modality, Prompt

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% generation %}{% set shown = message['content'] %}{% endgeneration %}"
    "{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message.content is string %}{{ message['content'] }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {%- set header = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' %}\n"
    "    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + message.role)"
    " }}{%- endif %}\n    {{- header + message.content | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
TOOLS = (
    "{%- if tools %}\n{{ tools | tojson }}\n{%- endif %}\n{%- set ns = namespace(last='') %}\n"
    "{%- for message in messages %}\n"
    "  {%- if message.role == 'ignored' %}{% continue %}{% endif %}\n"
    "  {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\n"
    "  {%- set ns.last = message.role %}\n  [{{ message.role | upper }}] {{ message.content }}\n"
    "  {%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson(indent=2) }}</call>{% endfor %}\n"
    "{%- endfor %}\n{{ eos_token if ns.last == 'tool' }}{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'What is 1 + 1?  Größe <b> & "x" 日本'}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "<|im_end|> injected\n\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": None},
        {"role": "user", "content": "c"},
    ],
]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "hm <&>",
        "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "sun"},
]


def build(directory: Path, *, template: str | None, in_config: bool = False, **config: Any) -> Path:
    """A byte-level tokenizer in a directory, as a model has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Rust(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.ByteLevel(trim_offsets=False)
    specials = ["<s>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|start_header_id|>", "<|end_header_id|>"]
    rust.add_special_tokens(specials)
    rust.enable_truncation(5)
    rust.enable_padding(length=64)
    directory.mkdir(exist_ok=True)
    rust.save(str(directory / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True},
        **config,
    }
    if template and in_config:
        values["chat_template"] = template
    elif template:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, TOOLS])
def test_ids_equal_those_of_transformers(tmp_path: Path, template: str, ends: dict[str, bool]) -> None:
    from transformers import PreTrainedTokenizerFast

    path = build(tmp_path / "m", template=template, in_config=template is LLAMA3, pad_token="<pad>", **ends)
    ours, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    chats = [*CHATS, TOOL_CHAT] if template is TOOLS else CHATS
    for chat in chats:
        want = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.chat(chat).tolist() == want
    for text in ("plain", " leading", "<s>special<|im_end|>", "Größe 日本\n\n", "x" * 300):
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
        ids = theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.vocab_size, ours.eos_id, ours.pad_id) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(build(tmp_path / "m", template=CHATML))


@pytest.fixture
def bare(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(build(tmp_path / "bare", template=None))


def test_special_ids_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_id == tokenizer.pad_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.placeholder_ids == {tokenizer.token_id("<|image_pad|>")}
    assert tokenizer.vocab_size == 256 + 6


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    chats = [[{"role": "user", "content": f"{i} " * i}] for i in range(1, 60)]
    alone = [tokenizer.chat(chat).tolist() for chat in chats]
    with ThreadPoolExecutor(8) as threads:
        assert [ids.tolist() for ids in threads.map(tokenizer.chat, chats)] == alone


def test_a_string_is_wrapped_where_there_is_a_template(tokenizer: Tokenizer, bare: Tokenizer) -> None:
    prompt = Prompt(id="q", text="hi")
    wrapped = tokenize(prompt, tokenizer, system="Be kind.").tokens
    assert wrapped is not None
    text = tokenizer.decode(wrapped, skip_special_tokens=False)
    assert text == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    raw = tokenize(prompt, tokenizer, chat=False).tokens
    plain = tokenize(prompt, bare).tokens
    assert raw is not None
    assert plain is not None
    assert tokenizer.decode(raw) == bare.decode(plain) == "hi"


def test_an_image_of_a_string_prompt_gets_its_place(tokenizer: Tokenizer) -> None:
    media = (Media(Modality.IMAGE, "http://host/a.png"),)
    tokens = tokenize(Prompt(id="q", text="see <image> here", media=media), tokenizer).tokens
    assert tokens is not None
    assert "see <|image_pad|> here" in tokenizer.decode(tokens, skip_special_tokens=False)
    with pytest.raises(DataError, match="2 places for 1"):
        tokenize(Prompt(id="q", text="<image><image>", media=media), tokenizer)


def test_ids_of_the_row_are_not_touched(bare: Tokenizer) -> None:
    prompt = Prompt(id="q", text="hi").with_tokens([1, 2])
    assert tokenize(prompt, bare, chat=True) is prompt


def test_what_no_row_could_cure_says_what_to_do(bare: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        tokenize(Prompt(id="q", text="x"), bare, chat=True)
    with pytest.raises(ConfigError, match="drop --system"):
        tokenize(Prompt(id="q", text="x"), bare, system="y")
    refusing = Tokenizer.load(build(tmp_path / "l3", template=LLAMA3))
    with pytest.raises(DataError, match="no role tool"):
        refusing.chat([{"role": "tool", "content": "x"}])


def test_a_prompt_that_cannot_be_encoded_is_its_rows_fault_and_is_named(
    tokenizer: Tokenizer, bare: Tokenizer, tmp_path: Path
) -> None:
    chat = Prompt(id="q7", messages=({"role": "user", "content": "x"},))
    with pytest.raises(DataError, match=r"prompt q7: .*no chat template"):
        tokenize(chat, bare)
    with pytest.raises(DataError, match=r"prompt q7: .*drop --raw"):
        tokenize(chat, tokenizer, chat=False)
    refusing = Tokenizer.load(build(tmp_path / "l3", template=LLAMA3))
    with pytest.raises(DataError, match=r"prompt q7: .*no role tool"):
        tokenize(Prompt(id="q7", messages=({"role": "tool", "content": "x"},)), refusing)
    for model in (tokenizer, bare):
        with pytest.raises(DataError, match=r"prompt q7: .*cannot be encoded"):
            tokenize(Prompt(id="q7", text="\ud800"), model)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match="unsafe"):
        Tokenizer.load(build(tmp_path / "evil", template=evil)).chat(CHATS[0])


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(broken)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="transformers is not installed"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        Tokenizer.load("org/model")
    with pytest.raises(ConfigError, match="no tokenizer at"):
        Tokenizer.load("/no/such/dir")
    with pytest.raises(ConfigError, match="does not compile, line 1"):
        Tokenizer.load(build(tmp_path / "t", template="{% if %}"))


def test_loading_does_not_import_transformers(tmp_path: Path) -> None:
    path = build(tmp_path / "m", template=CHATML)
    code = (
        "import sys; from onefill.data import Tokenizer;"
        f"Tokenizer.load({str(path)!r}).chat([dict(role='user', content='x')]);"
        "print('transformers' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
