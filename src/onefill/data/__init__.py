"""Where prompts come from: files, tasks, and the tokenizer that turns them into ids.

Invariants: a source is read lazily, in bounded memory, and restored from its cursor to the same sequence; a bad
row is one error that names its place. Importing this room loads neither pyarrow, reasoning_gym nor transformers.
"""

from onefill.data.cursor import Cursor
from onefill.data.discover import find_files, open_files
from onefill.data.errors import RowError
from onefill.data.fields import Fields
from onefill.data.files import FileSource
from onefill.data.source import Item, OnError, Source, prompts
from onefill.data.tasks import TaskSource, open_task
from onefill.data.tokenize import tokenize
from onefill.data.tokenizer import Tokenizer

__all__ = [
    "Cursor",
    "Fields",
    "FileSource",
    "Item",
    "OnError",
    "RowError",
    "Source",
    "TaskSource",
    "Tokenizer",
    "find_files",
    "open_files",
    "open_task",
    "prompts",
    "tokenize",
]
