"""A local web server for tests of downloads."""

import contextlib
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


class Handler(http.server.SimpleHTTPRequestHandler):
    cut = 0  # bytes that are missing at the end of every file

    def log_message(self, *args):
        pass

    def copyfile(self, source, outputfile):
        data = source.read()
        outputfile.write(data[: len(data) - self.cut])


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves the files of a folder at the URL that it yields, past any proxy."""
    handler = functools.partial(Handler, directory=str(folder))
    with (
        mock.patch.dict(os.environ, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1"),
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
