"""Options and arguments that several commands have (`commands.py`)."""

from __future__ import annotations

import argparse

from quarrel.cli.flags import hidden

STORIES, CHAT = "demo", "demo-chat"
MODEL = (
    "a GGUF file, a name in the Ollama store or the Hugging Face cache, hf://owner/repo[:file or quant], or a model of"
    f" Quarrel's own: {STORIES} continues stories, {CHAT} talks"
)


def flight_options(p: argparse.ArgumentParser, flag: str, what: str, dest: str) -> None:
    store_options(p, flag, what, dest)
    p.add_argument("--dataset", metavar="NAME", help="the dataset in the store")


def store_options(p: argparse.ArgumentParser, flag: str, what: str, dest: str) -> None:
    p.add_argument(flag, metavar="ADDRESS", dest=dest, help=what)
    p.add_argument("--meta", metavar="ADDRESS", help="the store's other port; by default the next one")
    p.add_argument("--header", metavar="NAME=VALUE", action="append", help="sent with each call; may be repeated")
    p.add_argument("--tls-root", metavar="FILE", help="PEM of who signed the store's certificate (for grpc+tls://)")
    p.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for a call, 30 by default")


def embedding_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--pooling", choices=("mean", "cls", "last"), help="in place of what the model's file says")
    p.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each vector (Matryoshka)")
    p.add_argument("--prefix", metavar="TEXT", help="in front of each text, or a task of the model's, such as search_query")
    p.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=True, help="vectors of length 1, the default"
    )


def text_arguments(p: argparse.ArgumentParser, noun: str, what: str) -> None:
    p.add_argument("words", nargs="*", metavar=noun, help=f"{what}; in front of it, perhaps a model")
    p.add_argument("-m", "--model", metavar="MODEL", help=f"{MODEL}; by default {STORIES}")
    p.add_argument("-p", "--prompt", metavar="TEXT", help=f"{what}, as an option")
    p.add_argument("-f", "--file", metavar="FILE", help=f"a file with {what}; - is standard input")
    hidden(p, "-model", dest="model")
    hidden(p, "-prompt", dest="prompt")


def model_arguments(p: argparse.ArgumentParser, default: str = STORIES) -> None:
    p.add_argument("name", metavar="MODEL", nargs="?", help=f"{MODEL}; by default {default}")
    p.add_argument("-m", "--model", metavar="MODEL", help="the same, as an option")
    hidden(p, "-model", dest="model")


def chat_options(p: argparse.ArgumentParser, implied: str = "") -> None:
    p.add_argument("--system", metavar="TEXT", help=f"a system message to begin with{implied}")
    template = f"a built-in chat template or a file with one, in place of the model's own{implied}"
    p.add_argument("--chat-template", metavar="NAME_OR_FILE", help=template)


def beside_options(p: argparse.ArgumentParser, *, many: bool) -> None:
    """What is loaded beside the model."""
    group = p.add_argument_group("beside the model")
    draft = (
        "a smaller model of the same vocabulary, which proposes tokens, or mtp, the block of the model itself that does;"
        " the text stays the same"
    )
    group.add_argument("--draft", metavar="MODEL", help=draft)
    lora = "a LoRA adapter in GGUF"
    lora += ", which a request selects by its name; may be repeated" if many else ", to write with"
    action = "append" if many else "store"
    group.add_argument("--lora", metavar="[NAME=]FILE", action=action, help=lora, nargs=None if many else 1)
    hidden(group, "-md", "--model-draft", "--draft-model", dest="draft")


def request_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("structure")
    group.add_argument("--json-schema", metavar="FILE", help="keep to this JSON schema; the schema itself will do")
    group.add_argument("--regex", metavar="PATTERN", help="match this regular expression as a whole")
    group.add_argument("--grammar", metavar="FILE", help="keep to this Lark grammar")
    draft_options(p)
    p.add_argument("--timeout", type=float, metavar="SECONDS", help="end with an error after so long")


def draft_options(p: argparse.ArgumentParser) -> None:
    lookup = "draft up to N tokens at once from earlier places of the text; 0, the default, is off"
    p.add_argument("--lookup", type=int, default=0, metavar="N", help=lookup)
    ahead = "tokens that the --draft model may propose at once, 8 by default"
    p.add_argument("--draft-max", type=int, default=8, metavar="N", help=ahead)
    hidden(p, "--draft-n", "--draft-tokens", type=int, dest="draft_max")
