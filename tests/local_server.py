"""A web server for tests, on a free port of this machine."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """Answers each connection in a thread that does not outlive the tests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        """Where it answers, without a slash at the end."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors of the handler, but not those of a client that closed its connection.

        A client may do so at any time, for example before it has read all of an answer. The text would appear among
        the messages of the command under test, which runs in the same process.
        """
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
