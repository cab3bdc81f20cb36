"""What TRL asks of a vLLM server, answered by a module of the test's process."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class StandIn:
    """Generates with ``policy``, into which a receiver of the test writes.

    Attributes:
        backend: which weight transfer it says that it was started with.
        reset: how often its caches were reset.
        silent: while it is set, requests for tokens are not answered.
    """

    def __init__(self, policy):
        self.policy = policy
        self.backend = "weightsync"
        self.reset = 0
        self.silent = threading.Event()
        self._end = threading.Event()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def ended(self):
        return self._end.is_set()

    def stop(self):
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, route, body):
        if route == "/health":
            return {}
        if route == "/version":
            return {"version": "0"}
        if route == "/v1/models":
            return {"data": [{"id": "policy"}]}
        if route == "/server_info":
            transfer = self.backend and {"backend": self.backend}
            parallel = {"data_parallel_size": 1, "world_size": 1}
            model = {"logprobs_mode": "processed_logprobs"}
            return {
                "vllm_config": {
                    "weight_transfer_config": transfer,
                    "parallel_config": parallel,
                    "model_config": model,
                }
            }
        if route == "/get_world_size":
            return {"world_size": 1}
        if route == "/reset_prefix_cache":
            self.reset += 1
            return {"success": True}
        if route == "/v1/completions":
            if self.silent.is_set():
                self._end.wait(60)
            return {"choices": [c for p in body["prompt"] for c in self._complete(p, body)]}
        raise KeyError(route)

    @torch.no_grad()
    def _complete(self, prompt, body):
        rows = torch.tensor([prompt] * body["n"])
        logprobs = []
        for _ in range(body["max_tokens"]):
            every = self.policy(rows, use_cache=False).logits[:, -1].log_softmax(-1)
            sampled = torch.multinomial(every.exp(), 1)
            logprobs.append(every.gather(-1, sampled))
            rows = torch.cat([rows, sampled], 1)
        for row, values in zip(rows.tolist(), torch.cat(logprobs, 1).tolist(), strict=True):
            tokens = row[len(prompt) :]
            yield {
                "prompt_token_ids": prompt,
                "token_ids": tokens,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": values,
                    "top_logprobs": [{}] * len(tokens),
                },
            }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.stand_in.ended:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            document = self.stand_in.answer(self.path.partition("?")[0], json.loads(body or "{}"))
            status = 200
        except KeyError:
            document, status = {"detail": "Not Found"}, 404
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@contextmanager
def standing_in(policy):
    made = StandIn(policy)
    try:
        yield made
    finally:
        made.stop()
