"""Counts for `/metrics`, in Prometheus' text format. A few lines, so no client library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["HttpCounts", "render"]


class HttpCounts:
    """HTTP answers by path and status."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, path: str, status: int) -> None:
        """Counts one answer."""
        self._counts[path, status] += 1

    def lines(self) -> Iterable[str]:
        """The samples of the metric."""
        yield "# HELP onefill_http_requests_total HTTP requests answered, by path and status."
        yield "# TYPE onefill_http_requests_total counter"
        for (path, status), count in sorted(self._counts.items()):
            yield f'onefill_http_requests_total{{path="{path}",status="{status}"}} {count}'


def render(http: HttpCounts, values: Mapping[str, tuple[str, str, float]]) -> str:
    """The page.

    Args:
        http: the HTTP counts.
        values: type (`counter` or `gauge`), help text and value by metric name.
    """
    lines = list(http.lines())
    for name, (kind, about, value) in values.items():
        lines += [
            f"# HELP {name} {about}",
            f"# TYPE {name} {kind}",
            f"{name} {int(value) if value == int(value) else value}",
        ]
    return "\n".join(lines) + "\n"
