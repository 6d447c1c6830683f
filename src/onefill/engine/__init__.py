"""Room: engine. The client of one inference server that speaks SGLang's native protocol."""

from onefill.engine.client import ClientStats, EngineClient
from onefill.engine.guards import Limits, check
from onefill.engine.info import EngineInfo, EngineKind, EngineLoad, capabilities
from onefill.engine.placeholders import Placeholders
from onefill.engine.retry import RetryPolicy
from onefill.engine.transport import Deadlines, open_session

__all__ = [
    "ClientStats",
    "Deadlines",
    "EngineClient",
    "EngineInfo",
    "EngineKind",
    "EngineLoad",
    "Limits",
    "Placeholders",
    "RetryPolicy",
    "capabilities",
    "check",
    "open_session",
]
