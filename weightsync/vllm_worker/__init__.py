"""The half that runs inside vLLM's worker processes. Nothing else imports it."""
