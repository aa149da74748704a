"""The keys of a config.json behind typed reads, so that one that is missing or makes no sense is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quarrel.errors import ModelError, ModelNotFound

MAX_BYTES = 256 << 20
MAX_LAYERS, MAX_HEAD = 1 << 12, 1 << 16
"""Far beyond any model; tables are made of so many names or numbers."""
POINTER = "version https://git-lfs"
POINTED = "is a pointer of Git LFS and not the file: fetch it with `git lfs pull`, or download the model again"
_PREDICTOR = re.compile(r"(?:.*\.)?(?:layers\.(\d+)\.eh_proj|mtp\.layers\.(\d+)\..*)\.weight")


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; raises ModelError, with its name, for another."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path} has more than {MAX_BYTES >> 20} MiB, which no such file has")
        text = path.read_text("utf-8")
        if text.startswith(POINTER):
            raise ModelError(f"{path} {POINTED}")
        found = json.loads(text)
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object")
    return found


class Config:
    """What config.json says, the part about text on top, above the defaults of an architecture."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        text = values.get("text_config") or values.get("llm_config")
        self.values: dict[str, Any] = {**values, **(text if isinstance(text, dict) else {})}
        if values.get("tie_word_embeddings") is False:
            # The part about text is written with a default of its own, and an output matrix that is there counts.
            self.values["tie_word_embeddings"] = False
        self.path = path
        self.rope = self._rope()

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        return Config({**defaults, **{k: v for k, v in self.values.items() if v is not None}}, self.path)

    def and_predictors(self, names: Iterable[str]) -> Config:
        """And what the names of tensors tell: fewer models are saved with such blocks than config.json speaks of them."""
        found = [(m[1], m[2]) for name in names if (m := _PREDICTOR.fullmatch(name))]
        behind = {int(number) for number, _ in found if number and int(number) >= self.layers}
        own = {int(number) for _, number in found if number}
        return Config({**self.values, "stored_predictors": len(behind) or len(own)}, self.path) if found else self

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these that is there and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def integer(self, *names: str, default: int | None = None) -> int:
        return self._typed(names, default, "an integer", lambda v: isinstance(v, int) and not isinstance(v, bool))  # type: ignore[no-any-return]

    def real(self, *names: str, default: float | None = None) -> float:
        number = self._typed(names, default, "a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool))
        return float(number)

    def reals(self, name: str, count: int) -> list[float]:
        return [float(x) for x in self._list(name, count, "numbers", lambda v: isinstance(v, int | float))]

    def strs(self, name: str, count: int) -> list[str]:
        return self._list(name, count, "strings", lambda v: isinstance(v, str))

    @property
    def layers(self) -> int:
        layers = self.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if not 1 <= layers <= MAX_LAYERS:
            raise self.refusal("num_hidden_layers", layers, f"1 to {MAX_LAYERS}")
        return layers

    @property
    def predictors(self) -> int:
        """Blocks behind the layers that predict further tokens (MTP, nextn), as the folder holds them."""
        return self.integer("stored_predictors", default=0)

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        size = self.integer("head_dim", default=self.integer("hidden_size", "n_embd") // max(1, self.heads))
        if not 0 <= size <= MAX_HEAD:
            raise self.refusal("head_dim", size, f"up to {MAX_HEAD}")
        return size

    @property
    def sliding(self) -> list[bool]:
        """Which layers slide, by `layer_types`."""
        return [kind == "sliding_attention" for kind in self.strs("layer_types", self.layers)]

    @property
    def full_rope(self) -> dict[str, Any]:
        """The rotation of layers that see everything."""
        full = self.rope.get("full_attention")
        return full if isinstance(full, dict) else self.rope

    def rotated(self, default: float = 1.0) -> int:
        """How many values of a head rotate."""
        factor = self.full_rope.get("partial_rotary_factor", default)
        return int(self.head_dim * self.number(factor, "partial_rotary_factor"))

    def number(self, value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(name, value, "a number")
        return float(value)

    def refusal(self, name: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"{self.path} has {name} {str(value)[:80]}, wanted {wanted}")

    def _typed(self, names: tuple[str, ...], default: Any, wanted: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.get(*names, default=default)
        if value is None:
            raise ModelError(f"{self.path} has no {names[0]}, and the model cannot be converted without it")
        if not accepts(value):
            raise self.refusal(next((n for n in names if self.get(n) is not None), names[0]), value, wanted)
        return value

    def _list(self, name: str, count: int, wanted: str, accepts: Callable[[Any], bool]) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) < count or not all(map(accepts, value)):
            raise self.refusal(name, value, f"{count} {wanted}")
        return value[:count]

    def _rope(self) -> dict[str, Any]:
        """Facts of the rotation in one place, where older files have them in several."""
        found = self.get("rope_parameters", "rope_scaling", default={})
        if not isinstance(found, dict):
            raise self.refusal("rope_parameters", found, "an object")
        rope = dict(found)
        if "full_attention" in rope or "sliding_attention" in rope:
            return rope
        local = self.get("local_rope_theta", "swa_rope_theta", "rope_local_base_freq")
        moved = {
            "rope_theta": self.get("global_rope_theta", "rope_theta", "rotary_emb_base"),
            "rope_type": rope.get("type"),
            "partial_rotary_factor": self.get("partial_rotary_factor", "rope_pct"),
            "original_max_position_embeddings": self.get("original_max_position_embeddings"),
            "sliding_attention": None if local is None else {"rope_theta": local},
        }
        return {**{name: value for name, value in moved.items() if value is not None}, **rope}
