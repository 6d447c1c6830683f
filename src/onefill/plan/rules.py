"""The one table of what keeps a group from being sent natively.

Invariants:
- A rule is a name, a reason that a user understands and a pure predicate. There is no other place in Onefill
  where native sampling is refused.
- A group is native exactly when no rule applies. Falling back never changes what is sampled, only how it is sent.
- Unknown capability counts as unsupported, for everything but plain text with n > 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onefill.plan.capabilities import Capabilities, Support
from onefill.types import Group, Modality, Prompt, Status

__all__ = ["RULES", "Context", "Rule", "barring"]


@dataclass(frozen=True, slots=True)
class Context:
    """What the plan must know besides the group.

    Args:
        capabilities: of the engine that would serve the group.
        seed: the run's; sampling seeds are derived from it where the engine needs one for each sample.
        group_reward: a reward for whole groups is configured.
        group_reward_required: the user's trainer takes native groups only with a group reward (some frameworks
            score samples one by one as they arrive, and would wait for a reply that comes for all at once).
    """

    capabilities: Capabilities = Capabilities()
    seed: int = 0
    group_reward: bool = False
    group_reward_required: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Why a group is not sent natively.

    Args:
        name: stable, for counts and scripts.
        reason: one sentence for the user.
        bars: True where the rule keeps this group from native sampling.
    """

    name: str
    reason: str
    bars: Callable[[Group, Context], bool]


_MEDIA_SUPPORT = {Modality.VIDEO: "video", Modality.AUDIO: "audio"}


def _media_unproven(group: Group, context: Context) -> bool:
    counts: dict[Modality, int] = {}
    for item in group.prompt.media:
        counts[item.modality] = counts.get(item.modality, 0) + 1
    for modality, count in counts.items():
        feature = _MEDIA_SUPPORT.get(modality) or ("image" if count == 1 else "images")
        if getattr(context.capabilities, feature) is not Support.YES:
            return True
    return False


def _same_prompt(a: Prompt, b: Prompt) -> bool:
    if a is b:
        return True
    if a.media != b.media:
        return False
    if a.tokens is None or b.tokens is None:
        return a.tokens is b.tokens and a.text == b.text and a.messages == b.messages
    return a.tokens.size == b.tokens.size and bool((a.tokens == b.tokens).all())


def _mixed_prompts(group: Group, _: Context) -> bool:
    return any(s.prompt is not None and not _same_prompt(s.prompt, group.prompt) for s in group.samples)


RULES: tuple[Rule, ...] = (
    Rule(
        "evaluation",
        "evaluation groups are measured, not trained on; they go out as single requests, so that figures stay "
        "comparable whatever the engine supports",
        lambda g, _: g.needs.evaluation,
    ),
    Rule(
        "single-sample",
        "fewer than two samples need tokens, so there is nothing to share",
        lambda g, _: len(g.unfinished) < 2,
    ),
    Rule(
        "no-group-reward",
        "the trainer wants a reward for each sample as it arrives, and a native group arrives at once; set a group "
        "reward to allow it",
        lambda _, c: c.group_reward_required and not c.group_reward,
    ),
    Rule(
        "partial-sample",
        "a sample was aborted and goes on from its own tokens, which its siblings do not have",
        lambda g, _: any(s.status is Status.ABORTED for s in g.samples),
    ),
    Rule(
        "sample-holds-output",
        "a sample already holds tokens, text or a loss mask, so the group does not start from the prompt alone",
        lambda g, _: any(s.tokens.size or s.text or s.loss_mask.size for s in g.unfinished),
    ),
    Rule(
        "mixed-status",
        "the samples' statuses do not match: only a whole, untouched group is one request",
        lambda g, _: len({s.status for s in g.samples}) > 1,
    ),
    Rule(
        "mixed-prompts",
        "prompts or media differ inside the group, and a native request has one of each",
        _mixed_prompts,
    ),
    Rule(
        "sample-seed",
        "samples carry seeds of their own, and a native request has one seed for all",
        lambda g, _: any(s.seed is not None for s in g.samples),
    ),
    Rule(
        "deterministic-mode",
        "the engine runs in deterministic mode, where all samples of one request share a seed and are copies",
        lambda _, c: c.capabilities.deterministic,
    ),
    Rule(
        "distillation",
        "on-policy distillation asks for scores of other tokens, which servers return for single requests only",
        lambda g, _: g.needs.distillation,
    ),
    Rule(
        "routed-experts",
        "routing replay needs return_routed_experts for every sample, and this engine was not seen to give it "
        "with n > 1",
        lambda g, c: g.needs.routed_experts and c.capabilities.routed_experts is not Support.YES,
    ),
    Rule(
        "lora",
        "a LoRA adapter with n > 1 was not seen to work on this engine",
        lambda g, c: g.needs.lora is not None and c.capabilities.lora is not Support.YES,
    ),
    Rule(
        "speculative-decoding",
        "the engine runs speculative decoding, which was not seen to work with n > 1 there",
        lambda _, c: c.capabilities.speculative_decoding and c.capabilities.speculative is not Support.YES,
    ),
    Rule(
        "custom-generate",
        "a generate function of the user's own makes the requests, one a sample",
        lambda g, _: g.needs.custom_generate,
    ),
    Rule(
        "media-unproven",
        "this engine was not seen to show the media to every one of n samples",
        _media_unproven,
    ),
    Rule(
        "parallel-sampling-broken",
        "this engine was seen to answer n > 1 wrongly",
        lambda _, c: c.capabilities.parallel_sampling is Support.NO,
    ),
)


def barring(group: Group, context: Context) -> tuple[Rule, ...]:
    """Every rule that keeps `group` from native sampling, in the table's order; () where it is eligible."""
    return tuple(rule for rule in RULES if rule.bars(group, context))
