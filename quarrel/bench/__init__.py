"""Speed, measured at the step: no HTTP, no text, no loading. `python -m quarrel.bench`."""
