"""Onefill rolls out prompt groups for reinforcement learning: prefill once, sample n.

Importing this package is cheap: torch, transformers, pyarrow and the like are loaded where they are used.
"""

from onefill.errors import ConfigError, DataError, InfraError, OnefillError, ProtocolError
from onefill.types import (
    Completion,
    FinishReason,
    Group,
    GroupState,
    Media,
    Modality,
    Needs,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    VersionSpan,
)

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ConfigError",
    "DataError",
    "FinishReason",
    "Group",
    "GroupState",
    "InfraError",
    "Media",
    "Modality",
    "Needs",
    "OnefillError",
    "Prompt",
    "ProtocolError",
    "Sample",
    "SamplingParams",
    "Status",
    "VersionSpan",
    "__version__",
]
