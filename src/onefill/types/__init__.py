"""The nouns of Onefill: what a prompt, a sample and a group are. Imports nothing else of ours."""

from onefill.types.arrays import LogprobArray, MaskArray, TokenArray, token_array
from onefill.types.completion import Completion, FinishReason, Timing, VersionSpan
from onefill.types.group import Group, GroupState, Needs
from onefill.types.prompt import Media, Modality, Prompt
from onefill.types.sample import Sample, Status
from onefill.types.sampling import SamplingParams

__all__ = [
    "Completion",
    "FinishReason",
    "Group",
    "GroupState",
    "LogprobArray",
    "MaskArray",
    "Media",
    "Modality",
    "Needs",
    "Prompt",
    "Sample",
    "SamplingParams",
    "Status",
    "Timing",
    "TokenArray",
    "VersionSpan",
    "token_array",
]
