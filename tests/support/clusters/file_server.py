"""A plain HTTP server of a folder's files, which sends parts of them, and can be told to fail."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster.local import LOOPBACK


@dataclass
class FileServer:
    """`has_ranges`: parts are sent; `cut`: so many next parts end in their middle; `asked`: parts by file's name."""

    url: str = ""
    has_ranges: bool = True
    cut: int = 0
    asked: list[tuple[str, int, int]] = field(default_factory=list)


@contextmanager
def file_server(folder: Path) -> Iterator[FileServer]:
    state, lock = FileServer(), threading.Lock()

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if part is None or not state.has_ranges or not path.is_file():
                return super().do_GET()
            start, end = int(part[1]), min(int(part[2]) + 1, os.path.getsize(path))
            with lock:
                state.asked.append((path.name, start, end))
                is_cut = state.cut > 0 and path.suffix == ".safetensors"
                state.cut -= is_cut
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{os.path.getsize(path)}")
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read((end - start) // 2 if is_cut else end - start))
            self.close_connection = is_cut
            return None

    server = ThreadingHTTPServer((LOOPBACK, 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://{LOOPBACK}:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
