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
├── BackendUnavailable    the requested backend cannot run on this machine
├── UnsupportedOp         no implementation takes an op; carries backend, op, spec and the reasons
├── OutOfMemory           the memory plan does not fit
├── QueueFull             too many requests wait already; carries when to try again
├── DeadlineExceeded      a request's time was over before it was done
├── Diverged              the model's numbers are no numbers any more, for one request
├── EngineFault           a step broke on the device; carries nothing over, the engine goes on
├── EngineLost            the process of a model ended; its requests are lost, another can be started
├── FlightError           an Arrow Flight server refused something
│   ├── FlightNotFound    it has no such dataset or row
│   ├── FlightUnavailable it could not be reached, or did not finish in time
│   └── FlightDataError   what it sent is unsound, or not what the protocol says
└── ConfigError           a QUARREL_* variable or flag is malformed
"""

from __future__ import annotations


def installing(extra: str) -> str:
    """How an extra is added, for an error's last words: to the package as it is installed, from a clone or a wheel."""
    return f"pip install 'longbow-quarrel[{extra}]'"


class QuarrelError(Exception):
    """Base of all deliberate errors; the command line prints its text without a traceback.

    fields: the options that the message names, the one at fault first: fields of `LoadOptions`, `SamplingParams` or
    `Service` ("service.draft"), or arguments of a call. The command line replaces them by its flags.
    """

    def __init__(self, message: object = "", *fields: str) -> None:
        super().__init__(message)
        self.fields = fields

    @property
    def field(self) -> str | None:
        """The option at fault, if the message names one."""
        return self.fields[0] if self.fields else None


class OptionWarning(UserWarning):
    """A warning about what an option was set to, or left at; `fields` as in `QuarrelError`."""

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields


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
    """The prompt does not fit the context window. `tokens` it has, where that is known, and `n_ctx` the window."""

    def __init__(self, message: object = "", *fields: str, tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message, *fields)
        self.tokens, self.n_ctx = tokens, n_ctx


class BackendUnavailable(QuarrelError):
    """The requested backend cannot run on this machine."""


class UnsupportedOp(QuarrelError):
    """No implementation takes this op on this backend."""

    def __init__(self, backend: str, op: str, spec: object, reasons: list[str], *fields: str) -> None:
        self.backend, self.op, self.spec, self.reasons = backend, op, spec, reasons
        why = "; ".join(reasons) or "nothing is registered for it"
        super().__init__(f"{backend} has no implementation of {op} for {spec}: {why}", *fields)


class OutOfMemory(QuarrelError):
    """The memory plan does not fit the device or the budget."""


class QueueFull(QuarrelError):
    """Too many requests wait already. `retry_after`: seconds until one more is likely to be admitted."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(QuarrelError):
    """The time that a request was given is over."""


class Diverged(QuarrelError):
    """A row of logits holds a NaN: the request's state or the model's weights are broken."""


class EngineFault(QuarrelError):
    """A step failed on the device; the requests in it are lost, later ones run."""


class EngineLost(QuarrelError):
    """The process that a model ran in has ended, and the requests in it with it."""


class FlightError(QuarrelError):
    """An Arrow Flight server refused something."""


class FlightNotFound(FlightError):
    """It has no such dataset or row."""


class FlightUnavailable(FlightError):
    """It could not be reached, or did not finish in time."""


class FlightDataError(FlightError):
    """What it sent is unsound, or not what the protocol says."""


class ConfigError(QuarrelError):
    """A QUARREL_* variable or a flag is malformed."""
