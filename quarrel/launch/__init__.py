"""The engine that a launcher such as Ollama starts: llama-server's command line, its log, and a place beside the old one.

A launcher starts it for every model and waits, so that whatever takes long is imported late.
"""
