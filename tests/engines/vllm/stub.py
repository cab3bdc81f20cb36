"""A tiny HTTP server that answers as it is told, and remembers what it was asked."""

import copy
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GOOD = {
    "/server_info": {
        "vllm_config": {
            "weight_transfer_config": {"backend": "weightsync"},
            "parallel_config": {"world_size": 2, "data_parallel_size": 1},
            "lora_config": None,
        }
    },
    "/version": {"version": "0.32.0"},
    "/health": (200, b""),
    "/weight_info": {"weight_version": "7:3"},
    "/resume": {"status": "resumed"},
    "/is_paused": {"is_paused": False},
    "/is_sleeping": {"is_sleeping": False},
    "/collective_rpc": {"results": ['{"rank": 0}', '{"rank": 1}']},
    "/reset_prefix_cache": {"success": True},
}


class Stub:
    """``replies``: by route, JSON or ``(status, bytes)`` or a function of the handler."""

    def __init__(self):
        self.replies = copy.deepcopy(GOOD)
        self.asked = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stub.asked.append(self)
                missing = (404, b'{"detail": "Not Found"}')
                reply = stub.replies.get(self.path.partition("?")[0], missing)
                if callable(reply):
                    reply = reply(self)
                if reply is None:
                    return
                if isinstance(reply, dict):
                    reply = 200, json.dumps(reply).encode()
                self.answer(*reply)

            do_POST = do_GET

            def answer(self, status, content, **headers):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def routes(self):
        return [handler.path.partition("?")[0] for handler in self.asked]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def stub():
    server = Stub()
    try:
        yield server
    finally:
        server.close()


def drop(handler):
    """Close the connection in the middle of a request."""
    handler.close_connection = True
    handler.connection.close()


def drip(handler):
    """An answer that never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(200):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.02)
    handler.close_connection = True
