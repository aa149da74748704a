"""llama-server's protocol over the same models: what Ollama and other launchers ask of the engine that they start."""
