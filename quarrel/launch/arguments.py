"""llama-server's arguments and environment names, as launchers pass them: what is heeded, and what is passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quarrel.errors import ConfigError

_VALUES = """
model -m --model LLAMA_ARG_MODEL
host --host LLAMA_ARG_HOST
port --port LLAMA_ARG_PORT
ctx -c --ctx-size LLAMA_ARG_CTX_SIZE
parallel -np --parallel LLAMA_ARG_N_PARALLEL
gpu_layers -ngl --gpu-layers --n-gpu-layers LLAMA_ARG_N_GPU_LAYERS
device -dev --device LLAMA_ARG_DEVICE
main_gpu -mg --main-gpu LLAMA_ARG_MAIN_GPU
threads -t --threads LLAMA_ARG_THREADS
cache_k -ctk --cache-type-k LLAMA_ARG_CACHE_TYPE_K
cache_v -ctv --cache-type-v LLAMA_ARG_CACHE_TYPE_V
lora --lora
mmproj -mm --mmproj LLAMA_ARG_MMPROJ
chat_template --chat-template LLAMA_ARG_CHAT_TEMPLATE
chat_template_file --chat-template-file LLAMA_ARG_CHAT_TEMPLATE_FILE
api_key --api-key LLAMA_API_KEY
api_key_file --api-key-file
alias -a --alias LLAMA_ARG_ALIAS
tags --tags LLAMA_ARG_TAGS
pooling --pooling LLAMA_ARG_POOLING
media_path --media-path
sleep_idle --sleep-idle-seconds
hf_repo -hf -hfr --hf-repo LLAMA_ARG_HF_REPO
hf_file -hff --hf-file LLAMA_ARG_HF_FILE
tools --tools LLAMA_ARG_TOOLS
mcp_config --mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG
mcp_json --mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON
models_dir --models-dir LLAMA_ARG_MODELS_DIR
models_preset --models-preset LLAMA_ARG_MODELS_PRESET
models_max --models-max LLAMA_ARG_MODELS_MAX
keep --keep
slot_save_path --slot-save-path
origins --cors-origins LLAMA_ARG_CORS_ORIGINS
reasoning -rea --reasoning LLAMA_ARG_REASONING
draft -md --model-draft --spec-draft-model LLAMA_ARG_MODEL_DRAFT LLAMA_ARG_SPEC_DRAFT_MODEL
draft_max --draft --draft-n --draft-max --spec-draft-n-max
spec_type --spec-type
n_cpu_moe -ncmoe --n-cpu-moe LLAMA_ARG_N_CPU_MOE
rope_scaling --rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE
rope_scale --rope-scale LLAMA_ARG_ROPE_SCALE
yarn_orig_ctx --yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX
n_predict -n --predict --n-predict LLAMA_ARG_N_PREDICT
temperature --temp --temperature LLAMA_ARG_TEMPERATURE
top_k --top-k LLAMA_ARG_TOP_K
top_p --top-p LLAMA_ARG_TOP_P
min_p --min-p LLAMA_ARG_MIN_P
top_n_sigma --top-nsigma --top-n-sigma
typical_p --typical --typical-p
seed -s --seed
repeat_penalty --repeat-penalty LLAMA_ARG_REPEAT_PENALTY
repeat_last_n --repeat-last-n
presence_penalty --presence-penalty LLAMA_ARG_PRESENCE_PENALTY
frequency_penalty --frequency-penalty LLAMA_ARG_FREQUENCY_PENALTY
dry_multiplier --dry-multiplier
dry_base --dry-base
dry_allowed_length --dry-allowed-length
dry_penalty_last_n --dry-penalty-last-n
xtc_probability --xtc-probability
xtc_threshold --xtc-threshold
dynatemp_range --dynatemp-range
dynatemp_exponent --dynatemp-exp
adaptive_target --adaptive-target
adaptive_decay --adaptive-decay
mirostat --mirostat
mirostat_eta --mirostat-lr
mirostat_tau --mirostat-ent
samplers --samplers
old_engine --old-engine
old_library_path --old-library-path
"""
_SWITCHES = """
help -h --help --usage
version --version
list_devices --list-devices
embedding --embedding --embeddings LLAMA_ARG_EMBEDDINGS
context_shift --context-shift LLAMA_ARG_CONTEXT_SHIFT
no_jinja --no-jinja
ignore_eos --ignore-eos
cpu_moe -cmoe --cpu-moe LLAMA_ARG_CPU_MOE
no_slots --no-slots
lora_unapplied --lora-init-without-apply
no_page --no-webui --no-ui
so --offline --jinja --slots --props --no-log-prefix --no-log-timestamps --log-disable
verbose -v --verbose --log-verbose
metrics --metrics LLAMA_ARG_ENDPOINT_METRICS
unified --kv-unified -kvu LLAMA_ARG_KV_UNIFIED
proxy --ui-mcp-proxy --webui-mcp-proxy
no_autoload --no-models-autoload
so -cb --cont-batching --no-mmproj-offload --mmproj-auto --no-context-shift
no_mmproj --no-mmproj --no-mmproj-auto
so --no-perf --mmap --no-warmup --cache-prompt
"""
_TAKEN = "--log-verbosity -lv --verbosity --load-mode -lm --log-colors --log-file"
"""With a value; like the switches called `so` they ask for nothing that is done otherwise here."""
_SAMPLING = """
n_predict temperature top_k top_p min_p top_n_sigma typical_p seed repeat_penalty repeat_last_n presence_penalty
frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n xtc_probability xtc_threshold
dynatemp_range dynatemp_exponent adaptive_target adaptive_decay mirostat mirostat_eta mirostat_tau samplers
"""
SAMPLING = frozenset(_SAMPLING.split())
"""What requests are answered with that say nothing themselves."""
_OFF = ("", "0", "off", "false", "disabled")
_UNSAID = ("api_key", "mcp_json", "old_engine", "old_library_path")
"""Whose values no log shows: keys, and servers of tools with what their environment holds."""


def _table(text: str) -> dict[str, str]:
    rows = [line.split() for line in text.strip().splitlines()]
    return {flag: row[0] for row in rows for flag in row[1:]}


VALUES, SWITCHES, TAKEN = _table(_VALUES), _table(_SWITCHES), frozenset(_TAKEN.split())


@dataclass(frozen=True)
class Arguments:
    """Values by name, as texts; switches that are on; and, as they were written, what was passed over."""

    values: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    loras: tuple[str, ...] = ()
    heeded: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()

    def text(self, name: str) -> str | None:
        return self.values.get(name)

    def number(self, name: str) -> int | None:
        """Raises ConfigError for what is none."""
        given = self.values.get(name)
        if given is None:
            return None
        try:
            return int(given)
        except ValueError:
            raise ConfigError(f"{self.flag(name)} is {given!r}, wanted a whole number") from None

    def real(self, name: str) -> float | None:
        given = self.values.get(name)
        if given is None:
            return None
        try:
            return float(given)
        except ValueError:
            raise ConfigError(f"{self.flag(name)} is {given!r}, wanted a number") from None

    def flag(self, name: str) -> str:
        """The long form, for a sentence."""
        return max((f for f, n in {**VALUES, **SWITCHES}.items() if n == name and f.startswith("-")), key=len)

    def summary(self) -> str:
        """One line for the log."""
        over = f"; passes over {' '.join(self.passed_over)}" if self.passed_over else ""
        return f"heeds {' '.join(self.heeded) or 'its defaults'}{over}"


def parse(words: Sequence[str], environment: Mapping[str, str]) -> Arguments:
    """The command line over the environment. No word is an error but an option that is heeded and has no value."""
    values: dict[str, str] = {}
    switches: set[str] = set()
    heeded, over, loras = [], [], []
    for name, value in environment.items():
        if name in VALUES and value:
            values[VALUES[name]] = value
            heeded.append(name)
        elif name in SWITCHES and value.lower() not in _OFF:
            switches.add(SWITCHES[name])
            heeded.append(name)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        if flag in SWITCHES:
            switches.add(SWITCHES[flag])
            heeded.append(word)
        elif flag in VALUES or flag in TAKEN:
            if not equals and not rest:
                raise ConfigError(f"{flag} is the last word, wanted a value behind it")
            value = inline if equals else rest.pop(0)
            name = VALUES.get(flag, "")
            if name == "lora":
                loras += [path for path in value.split(",") if path]
            elif name:
                values[name] = value
            heeded.append(flag if name in _UNSAID else f"{flag} {value}")
        else:
            # There are no words but options and their values: behind an unknown option comes its own, or another option.
            takes = bool(rest) and not equals and (not rest[0].startswith("-") or _is_number(rest[0]))
            over.append(f"{word} {rest.pop(0)}" if takes else word)
    return Arguments(values, frozenset(switches), tuple(loras), tuple(heeded), tuple(over))


def _is_number(word: str) -> bool:
    try:
        float(word.split(",")[0])
    except ValueError:
        return False
    return True
