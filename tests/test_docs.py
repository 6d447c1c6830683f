"""What the docs show works: Python runs, commands have the flags that they use, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from onefill.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for written in block.replace("\\\n", " ").splitlines():
                line = written.split(" #")[0].strip().removeprefix("$ ")
                if line.startswith("onefill "):
                    found.append((page.name, line))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_in_the_docs_have_the_flags_that_they_use(page: str, line: str) -> None:
    words = shlex.split(line)
    command = typer.main.get_command(app)
    for word in words[1:]:
        deeper = getattr(command, "commands", {}).get(word)
        if deeper is None:
            break
        command = deeper
    flags = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= flags, f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
