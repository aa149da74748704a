"""Options of a server: flags before `WEBUI_*` variables before defaults."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quarrel.engine import Sampling
from quarrel.errors import ConfigError
from quarrel.server.origins import Origins

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORT = 8080
SHORTEST_KEY = 16
DATA_DIR = Path("~/.local/share/quarrel").expanduser()


@dataclass(frozen=True)
class Rates:
    """What one API key, or one address without keys, may use. Requests and tokens are per minute; 0 is no limit."""

    requests: int = 600
    prompt_tokens: int = 0
    output_tokens: int = 0
    streams: int = 1024
    """Requests in flight at once."""


@dataclass(frozen=True)
class Settings:
    """See `quarrel serve --help`; times are seconds, sizes bytes."""

    models: tuple[str, ...] = ("demo",)
    models_dir: Path | None = None
    host: str = "127.0.0.1"
    port: int = PORT
    metrics_port: int | None = None
    """A second listener with /metrics alone; None serves it on `port` only."""
    data_dir: Path = DATA_DIR
    """Where API keys are kept (as hashes)."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that are good beside those; only their hashes are kept further on."""
    origins: tuple[str, ...] = ()
    """Web origins besides the server's own that browsers may call from, as patterns (`Origins`)."""
    hosts: tuple[str, ...] = ()
    """Names in the Host header besides the address that is bound and localhost; a proxy's public name belongs here."""
    open_access: bool = False
    """Serve without keys on an address that other machines reach."""
    strict_api: bool = False
    """Refuse fields that are not understood, instead of reporting them in a header."""
    ollama: bool = True
    """Serve Ollama's protocol too."""
    llama: bool = False
    """Speak llama-server's protocol, in the place of routes and errors that are called alike, and of Ollama's."""
    adapter: str | None = None
    """In that protocol: the adapter of requests, which name none there."""
    adapter_file: str = ""
    """Where it came from."""
    adapter_applied: bool = True
    """Whether requests have it from the start."""
    sampling: Sampling | None = field(default=None, hash=False)
    """In that protocol: what holds where a request says nothing."""
    context_shift: bool = False
    """In that protocol: whether a text goes on where its context is full; and how many tokens of its prompt it keeps."""
    keep: int = 0
    verbose: bool = False
    """In that protocol: whether chats tell what they were made of."""
    thinking: bool = True
    """In that protocol: whether templates are told to let the model think."""
    slots: bool = True
    """In that protocol: whether /slots lists what is computed; and whether there is a page."""
    page: bool = True
    metrics: bool = True
    """In that protocol: whether there is /metrics; what else the model is called; and what it is said to be for."""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    router: bool = False
    """In that protocol: whether requests choose among several models; how many are loaded at most, 0 for any number; and
    whether a request loads the one that it names."""
    models_max: int = 0
    autoload: bool = True
    pooling: str = ""
    """In that protocol: how the rows of a text's tokens become its vector; empty for the model's own way."""
    predict_route: str = ""
    """In that protocol: where Google's Vertex AI sends its requests; empty for nowhere."""
    proxy: bool = False
    """In that protocol: whether a page may reach MCP servers elsewhere through this one."""
    slot_save_path: Path | None = None
    """In that protocol: the folder that slots are saved to, and the one whose pictures messages may name by file://."""
    media_path: Path | None = None
    media_marker: str = field(default_factory=lambda: f"<__media_{secrets.token_hex(16)}__>")
    """In that protocol: what stands for an image in a prompt's text; by default no caller's text has it by chance."""
    chat_template: str | None = None
    """In place of the models' own."""
    backend: str = "auto"
    n_ctx: int | None = None
    max_seqs: int = 16
    queue: int = 100
    """Requests that may wait for each model."""
    timeout: float = 300.0
    grace: float = 30.0
    """How long work in flight may go on after a signal to stop."""
    body_limit: int = 48 << 20
    """Bytes of a request; an image of the largest size that is decoded, in base64, and what is said about it."""
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 60.0
    connections_per_address: int = 2048
    """Of HTTP and WebSockets, one more is 429. Those of a trusted proxy count for whom it forwards."""
    sockets_per_model: int = 512
    """WebSockets that may have requests of one model in flight."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose X-Forwarded-For says who calls."""
    rates: Rates = Rates()
    shared_limits: str = field(default="", repr=False)
    """The address of a Redis or Valkey in which all servers count what a key uses; without it each counts for itself."""
    keep_alive: float | None = None
    """Unload a model that nobody has used for so long; None keeps it."""
    budget: int | None = None
    """Memory that all models share; None is what each of them takes by itself."""
    lookup: int = 0
    """Tokens that are guessed at once from the text, and at most by a draft model (`quarrel.Service`)."""
    draft_max: int = 8

    def __post_init__(self) -> None:
        if self.llama:
            object.__setattr__(self, "ollama", False)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self, has_keys: bool) -> None:
        """Raises `ConfigError` for what is not safe or makes no sense."""
        for name, port in (("port", self.port), ("metrics port", self.metrics_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"the {name} is {port}, wanted 0 to 65535")
        if self.metrics_port is not None and self.metrics_port == self.port != 0:
            raise ConfigError(f"port and metrics port are both {self.port}: give one of them another number")
        shortest = min(map(len, self.api_keys), default=SHORTEST_KEY)
        if shortest < SHORTEST_KEY and not self.llama:  # there the launcher makes one up
            raise ConfigError(f"the API key has {shortest} characters, wanted {SHORTEST_KEY} random ones or more")
        networks(self.trusted_proxies)
        Origins(self.origins)
        if not self.loopback and not has_keys and not self.open_access:
            raise ConfigError(
                f"{self.host} can be reached by other machines and there is no API key: make one with"
                " `quarrel keys create NAME`, bind 127.0.0.1, or say --open-access"
            )


def networks(given: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks such as 10.0.0.0/8; raises `ConfigError` for what is neither."""
    found = []
    for text in given:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            message = f"the trusted proxy {text!r} is no address, wanted one such as 127.0.0.1 or 10.0.0.0/8 ({error})"
            raise ConfigError(message) from error
    return tuple(found)


_VARIABLES = {
    "WEBUI_HOST": "host",
    "WEBUI_PORT": "port",
    "WEBUI_METRICS_PORT": "metrics_port",
    "WEBUI_DATA_DIR": "data_dir",
    "WEBUI_ALLOWED_ORIGINS": "origins",
    "WEBUI_API_KEY": "api_keys",
    "WEBUI_SHARED_LIMITS": "shared_limits",
    "MODEL_PATH": "models",
}


def from_environment(variables: Mapping[str, str]) -> dict[str, object]:
    """The fields of `Settings` that variables set; `ConfigError` names a malformed one."""
    found: dict[str, object] = {}
    for variable, name in _VARIABLES.items():
        value = variables.get(variable, "")
        if not value:
            continue
        if name.endswith("port"):
            if not (value.isascii() and value.isdigit() and int(value) <= 65535):
                raise ConfigError(f"{variable} is {value!r}, wanted a port from 0 to 65535")
            found[name] = int(value)
        elif name == "origins":
            found[name] = tuple(v.strip() for v in value.split(",") if v.strip())
        elif name in ("models", "api_keys"):
            found[name] = (value,)
        else:
            found[name] = Path(value) if name == "data_dir" else value
    return found


def cache_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """What WEBUI_CACHE_DIR means to this process and those that it starts: compiled kernels and downloads are kept there.

    What the variables of Triton and of the Hugging Face cache say of a folder of their own still holds.
    """
    given = variables.get("WEBUI_CACHE_DIR", "")
    if not given:
        return {}
    folder = Path(given).expanduser().absolute()
    return {"XDG_CACHE_HOME": str(folder), "TRITON_CACHE_DIR": variables.get("TRITON_CACHE_DIR") or str(folder / "triton")}
