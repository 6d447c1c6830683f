"""Per-sample and group rewards, isolated and within a time limit.

Invariants: a reward that fails leaves its sample without one, with a reason; it is never a 0 and never ends the
run. Importing this room loads neither math-verify nor reasoning-gym; they are loaded in worker processes.
"""

from onefill.reward.call import RewardInput, RewardOutcome
from onefill.reward.parse import BUILT_IN, Place, Reward, of_function, parse
from onefill.reward.rewarder import Rewarder

__all__ = [
    "BUILT_IN",
    "Place",
    "Reward",
    "RewardInput",
    "RewardOutcome",
    "Rewarder",
    "of_function",
    "parse",
]
