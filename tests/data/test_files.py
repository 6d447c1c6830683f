"""Reading is lazy, bounded, and restorable."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefill.data import Cursor, FileSource, Item, open_files
from onefill.data.jsonl import JsonLines
from onefill.errors import ConfigError, DataError
from tests.data.rows_helpers import write_jsonl, write_parquet


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 rows, 46 MB."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    body = "word " * 80
    with path.open("w") as file:
        for i in range(100_000):
            file.write(json.dumps({"prompt": f"{i} {body}", "label": str(i)}) + "\n")
    return path


def seen(items: list[Item]) -> list[str]:
    return [item.prompt.id if item.prompt else str(item.error) for item in items]


def mixed(directory: Path) -> list[Path]:
    bad = [{"prompt": f"c{i}"} if i % 5 else {} for i in range(13)]
    (directory / "z.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in bad).encode()))
    return [
        write_jsonl(directory / "a.jsonl", [{"prompt": f"a{i}"} for i in range(300)]),
        write_parquet(directory / "b.parquet", [{"prompt": f"b{i}"} for i in range(120)], row_group=25),
        directory / "z.jsonl.gz",
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.none() | st.integers(0, 2**32), cuts=st.lists(st.integers(0, 900), min_size=1, max_size=3))
def test_a_restored_reading_goes_on_as_if_it_had_not_stopped(seed: int | None, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = mixed(Path(directory))
        whole = list(open_files(paths, shuffle_seed=seed, epochs=2).read())
        assert len(whole) == 2 * 433
        for cut in (min(cut, len(whole) - 1) for cut in cuts):
            saved = json.loads(json.dumps(whole[cut].cursor.to_dict()))
            rest = list(open_files(paths, shuffle_seed=seed, epochs=2).read(Cursor.from_dict(saved)))
            assert seen(rest) == seen(whole[cut + 1 :])


def test_a_repeated_id_reads_the_same_after_restoring(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x", "id": i} for i in ("a", "b", "a")])
    whole = list(open_files([path]).read())
    assert seen(list(open_files([path]).read(whole[1].cursor))) == seen(whole[2:]) == ["a"]


def test_every_row_comes_once_an_epoch_and_epochs_differ(tmp_path: Path) -> None:
    items = list(open_files(mixed(tmp_path), shuffle_seed=3, epochs=2).read())
    first, second = ([i.prompt.text for i in part if i.prompt] for part in (items[:433], items[433:]))
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert len(set(first)) == len(first) == 430
    assert first != second
    in_order = [i.prompt.text for i in open_files(mixed(tmp_path)).read() if i.prompt]
    assert first != in_order


def test_ids_differ_between_epochs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x", "id": "q"}])
    assert seen(list(itertools.islice(open_files([path], epochs=None).read(), 3))) == ["q", "q#2", "q#3"]


def test_files_of_one_name_in_two_directories_get_different_ids(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", [{"prompt": name}])
    assert seen(list(open_files([tmp_path / "x", tmp_path / "y"]).read())) == ["train.1-1", "train.2-1"]


def test_globs_and_directories_are_sorted(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    (tmp_path / "README.md").write_text("not data")
    assert seen(list(open_files([tmp_path]).read())) == ["a-1", "b-1"]
    assert seen(list(open_files([str(tmp_path / "*.jsonl")]).read())) == ["a-1", "b-1"]


def test_paths_that_lead_nowhere_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a.csv").write_text("x")
    for path, reason in (
        ("missing.jsonl", "no such file"),
        ("empty.jsonl", "is empty"),
        ("nothing", "no data files"),
        ("a.csv", "unknown type"),
        ("*.parquet", "no data file matches"),
    ):
        with pytest.raises(DataError, match=reason):
            open_files([str(tmp_path / path)])


def test_a_file_of_blank_lines_is_an_error_and_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n \n")
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x"}])
    blank, good = open_files([tmp_path]).read()
    assert "holds no rows" in str(blank.error)
    assert good.prompt is not None


def test_a_broken_file_is_one_error_and_the_next_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:-12])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no parquet")
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "x"}])
    items = list(open_files([tmp_path]).read())
    assert [str(tmp_path / "a.jsonl.gz") in str(i.error) for i in items if i.error] == [True, False]
    assert items[-1].prompt is not None


def test_note_32_endless_epochs_over_nothing_but_errors_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{}, {}])
    assert len(list(open_files([path], epochs=None).read())) == 2


def test_a_huge_line_is_refused_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "' + "x" * 100_000 + '"}\n{"prompt": "ok"}\n')
    huge, good = FileSource([JsonLines(path, max_line=1000)]).read()
    assert "longer than 1000 bytes" in str(huge.error)
    assert good.prompt is not None
    assert good.prompt.id == "d-2"


@pytest.mark.parametrize("change", ["rows", "seed"])
def test_a_cursor_of_other_data_is_refused(tmp_path: Path, change: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "x"}] * 3)
    cursor = next(iter(open_files([path], shuffle_seed=1).read())).cursor
    if change == "rows":
        write_jsonl(path, [{"prompt": "x"}] * 4)
    with pytest.raises(ConfigError, match="give the same --data and --seed"):
        open_files([path], shuffle_seed=2 if change == "seed" else 1).read(cursor)


def test_a_damaged_cursor_is_refused() -> None:
    good = Cursor(source="files:x").to_dict()
    for damage in ({"version": 9}, {"row": -1}, {"row": True}, {"extra": 1}, {"source": 3}):
        with pytest.raises(ConfigError, match="saved cursor"):
            Cursor.from_dict({**good, **damage})


@pytest.mark.parametrize("seed", [None, 5])
def test_the_first_of_100_000_rows_is_there_at_once(many: Path, seed: int | None) -> None:
    started = time.perf_counter()
    item = next(iter(open_files([many], shuffle_seed=seed).read()))
    assert time.perf_counter() - started < 0.5  # 1 ms in order and 30 ms shuffled on an idle core
    assert item.prompt is not None


@pytest.mark.parametrize("seed", [None, 5])
def test_memory_does_not_grow_with_the_file(many: Path, seed: int | None) -> None:
    def peak(rows: int) -> int:
        tracemalloc.start()
        count = sum(1 for _ in itertools.islice(open_files([many], shuffle_seed=seed).read(), rows))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == rows
        return top

    assert peak(24_000) < 1.5 * peak(9_000)


def test_importing_the_room_is_cheap() -> None:
    code = (
        "import sys, onefill.data, onefill.reward;"
        "print([m for m in ('pyarrow', 'reasoning_gym', 'transformers', 'math_verify', 'torch') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
