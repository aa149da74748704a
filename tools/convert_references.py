"""Writes tests/convert/references.json.gz: what llama.cpp's own converter makes of small folders of every architecture.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py:. python -m tools.convert_references [CASE ...]

LLAMA_CPP is a checkout whose convert_hf_to_gguf.py runs here, with transformers. The configurations are those of the
reference cases; the values of weights follow from their names, so that the file holds shapes and sums only. Layer types of
older hybrids are read as they stand: transformers renames them, after which llama.cpp does not know them any more.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from quarrel.gguf import GGUFFile
from tests.convert.folders import fingerprint, weights, write_safetensors, write_tokenizer
from tests.paths import CASE_SETS

TARGET = Path(__file__).resolve().parents[1] / "tests" / "convert" / "references.json.gz"
LEFT_OUT = ("minilm", "tinyllama", "mistral", "smollm2", "gptoss_trunc", "granitehybrid_dense")
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
"""Of a further case: qwen3vl with experts."""
AS_WRITTEN = ("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM")


def stored(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors of a checkpoint: what transformers saves, and blocks that predict further tokens."""
    import safetensors
    import transformers

    made = getattr(transformers, config["architectures"][0])
    known = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    with tempfile.TemporaryDirectory() as folder:
        made(made.config_class(**known)).float().save_pretrained(folder)
        with safetensors.safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    n, e, v = (config.get(name, 0) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if config.get("mtp_num_hidden_layers"):
        last = f"model.layers.{n - 1}."
        shapes |= {name.replace(last, "mtp.layers.0."): shape for name, shape in shapes.items() if name.startswith(last)}
        shapes |= {"mtp.fc.weight": [e, 2 * e]}
        shapes |= {f"mtp.{name}.weight": [e] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    if config.get("num_nextn_predict_layers") and config["model_type"] == "glm4_moe":
        last, more = f"model.layers.{n - 1}.", f"model.layers.{n}."
        shapes |= {name.replace(last, more): shape for name, shape in shapes.items() if name.startswith(last)}
        shapes |= {f"{more}{name}.weight": [e] for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{more}eh_proj.weight": [e, 2 * e]}
        shapes |= {f"{more}{name}.weight": [v, e] for name in ("embed_tokens", "shared_head.head")}
    return shapes


def converted(folder: Path) -> dict[str, Any]:
    """What llama.cpp makes of the folder, without its tokenizer."""
    import conversion
    import conversion.bert
    import gguf
    import torch
    from conversion.base import ModelBase, ModelType, get_model_architecture

    read = ModelBase.load_hparams
    written = json.loads((folder / "config.json").read_text())
    if written["architectures"][0] in AS_WRITTEN:
        ModelBase.load_hparams = staticmethod(lambda dir_model, is_mistral_format: dict(written))
    conversion.bert.NomicBertModel._is_tokenizer_xlmroberta = lambda self: False
    try:
        kind = conversion.get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
        more = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        ModelBase.no_mtp = kind.no_mtp = not any(written.get(name) for name in more)
        with torch.inference_mode():
            model = kind(folder, gguf.LlamaFileType.ALL_F32, folder / "theirs.gguf")
            for part in (model, getattr(model, "impl", model)):
                part.set_vocab = lambda: None
            model.write()
    finally:
        ModelBase.load_hparams = read
    with GGUFFile.open(folder / "theirs.gguf") as file:
        keys = {key: file.metadata[key] for key in file.metadata if not key.startswith(("general.", "tokenizer."))}
        tensors = {name: [list(info.shape), fingerprint(file.array(name))] for name, info in file.tensors.items()}
    return {"architecture": file.metadata["general.architecture"], "keys": keys, "tensors": tensors}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help="only these; the others stay as they are")
    wanted = parser.parse_args().cases
    references = json.loads(gzip.decompress(TARGET.read_bytes())) if wanted else {}
    configs = {}
    for path in sorted(path for cases in CASE_SETS for path in cases.glob("*/meta.json")):
        config = json.loads(path.read_text()).get("config")
        if config is not None and path.parent.name not in LEFT_OUT:
            configs[path.parent.name] = config
    moe = json.loads(
        json.dumps(configs["qwen3vl"]).replace("Qwen3VLFor", "Qwen3VLMoeFor").replace("qwen3_vl", "qwen3_vl_moe")
    )
    configs["qwen3vlmoe"] = {**moe, "text_config": {**moe["text_config"], **EXPERTS}}
    for name, config in configs.items():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            shapes = stored(config)
            write_safetensors(folder / "model.safetensors", {name: weights(name, shape) for name, shape in shapes.items()})
            (folder / "config.json").write_text(json.dumps(config))
            write_tokenizer(folder, config.get("vocab_size") or config["text_config"]["vocab_size"])
            references[name] = {"config": config, "stored": shapes, **converted(folder)}
            print(name, len(references[name]["tensors"]), "tensors")
    TARGET.write_bytes(gzip.compress(json.dumps(references, sort_keys=True).encode(), mtime=0))


if __name__ == "__main__":
    main()
