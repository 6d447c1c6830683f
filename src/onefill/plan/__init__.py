"""Pure functions from a group and an engine's capabilities to requests: no I/O, no clock, no asyncio."""

from onefill.plan.capabilities import Capabilities, Support
from onefill.plan.planner import Plan, plan
from onefill.plan.request import Request
from onefill.plan.rules import RULES, Context, Rule, barring
from onefill.plan.strategy import Form, Strategy

__all__ = [
    "RULES",
    "Capabilities",
    "Context",
    "Form",
    "Plan",
    "Request",
    "Rule",
    "Strategy",
    "Support",
    "barring",
    "plan",
]
