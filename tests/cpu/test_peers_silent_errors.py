"""What peers get silently wrong, on the streaming backend."""

from __future__ import annotations

from tests.silent_errors import Suite


class TestStreaming(Suite):
    backend = "streaming"
