"""Stands in for Ray where it is not installed: vLLM's ``ipc`` engine imports it all the same."""
