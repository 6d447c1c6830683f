"""The loop: admit groups, send them, collect, reward, deliver. The only room that sees all the others."""

from onefill.rollout.dispatch import Dispatcher
from onefill.rollout.loop import Outcome, Rollout, RolloutOptions
from onefill.rollout.prompts import PromptReader
from onefill.rollout.sending import Engine
from onefill.rollout.tally import Tally

__all__ = ["Dispatcher", "Engine", "Outcome", "PromptReader", "Rollout", "RolloutOptions", "Tally"]
