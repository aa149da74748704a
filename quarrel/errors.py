"""Every error that Quarrel raises on purpose. Each message is one sentence: what, found, wanted, what to do.

QuarrelError
├── ModelError            the file cannot be used as a model
│   ├── GGUFError         its bytes are not a sound GGUF file
│   ├── TokenizerError    its vocabulary or template is unusable
│   └── UnsupportedModel  it is sound, but asks for something we do not compute
├── ModelNotFound         a name led to no file
├── DownloadError         a file could not be fetched whole
├── RequestError          a caller's argument is outside its range
│   └── ContextOverflow   the prompt does not fit the context
├── BackendUnavailable    the backend asked for cannot run on this machine
├── UnsupportedOp         no implementation takes an op; carries backend, op, spec and the reasons
├── OutOfMemory           the memory plan does not fit
└── ConfigError           a QUARREL_* variable or flag is malformed
"""

from __future__ import annotations


class QuarrelError(Exception):
    """Base of all deliberate errors; the command line prints its text without a traceback."""


class ModelError(QuarrelError):
    """The file cannot be used as a model."""


class GGUFError(ModelError):
    """The bytes are not a sound GGUF file."""


class TokenizerError(ModelError):
    """The vocabulary or chat template in the file is unusable."""


class UnsupportedModel(ModelError):
    """The file is sound, but asks for mathematics that Quarrel does not compute."""


class ModelNotFound(QuarrelError):
    """A model name led to no file."""


class DownloadError(QuarrelError):
    """A file could not be fetched whole."""


class RequestError(QuarrelError, ValueError):
    """A caller's argument is outside its range."""


class ContextOverflow(RequestError):
    """The prompt does not fit the context window."""


class BackendUnavailable(QuarrelError):
    """The backend asked for cannot run on this machine."""


class UnsupportedOp(QuarrelError):
    """No implementation takes this op on this backend."""

    def __init__(self, backend: str, op: str, spec: object, reasons: list[str]) -> None:
        self.backend, self.op, self.spec, self.reasons = backend, op, spec, reasons
        why = "; ".join(reasons) or "nothing is registered for it"
        super().__init__(f"{backend} has no implementation of {op} for {spec}: {why}")


class OutOfMemory(QuarrelError):
    """The memory plan does not fit the device or the budget."""


class ConfigError(QuarrelError):
    """A QUARREL_* variable or a flag is malformed."""
