"""A model in a process of its own: what breaks there, breaks there."""

from quarrel.process.remote import RemoteLLM, open_remote

__all__ = ["RemoteLLM", "open_remote"]
