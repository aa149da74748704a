"""Text to ids and back, by the vocabulary of a GGUF file."""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

from quarrel.errors import RequestError, TokenizerError
from quarrel.gguf import GGUFFile, Metadata, resolve
from quarrel.tokenizer.charsmap import MAX_BYTES, CharsMap
from quarrel.tokenizer.chat import ChatTemplates
from quarrel.tokenizer.detokenizer import Detokenizer, PieceBytes
from quarrel.tokenizer.guard import is_text
from quarrel.tokenizer.special import SpecialTokens, Trust
from quarrel.tokenizer.stops import FIM
from quarrel.tokenizer.vocab import Kind, TokenizerWarning, Vocabulary, read_vocabulary


class _Model(Protocol):
    def encode(self, text: str, after_special: bool) -> list[int]: ...


def load_tokenizer(source: str | os.PathLike[str] | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file, of a model by its name, or of metadata already read. Reads nothing but the header.

    Raises TokenizerError where the vocabulary is unusable, GGUFError where the file is not sound, ModelNotFound.
    """
    if isinstance(source, Metadata):
        return Tokenizer(source)
    if isinstance(source, Mapping):
        return Tokenizer(Metadata(source))
    with GGUFFile.open(resolve(os.fspath(source)).paths[0]) as file:
        return Tokenizer(file.metadata)


class Tokenizer:
    """Ids of texts and texts of ids. Safe to use from several threads.

    n_vocab: how many ids there are. model: "llama" (SentencePiece), "gpt2" (byte-level BPE), "bert" (WordPiece), "t5"
    (unigram) or "gemma4". pre: the file's name for its word rules. *_id: None where the vocabulary has none.
    stop_ids: ids that end a generation. chat_template: the file's default template, Jinja, as it stands there.
    """

    def __init__(self, metadata: Metadata) -> None:
        vocabulary = read_vocabulary(metadata)
        self._vocabulary = vocabulary
        self._model = _model(vocabulary, metadata)
        self._bytes = PieceBytes(vocabulary)
        self._whole: tuple[dict[int, str], dict[int, str]] = ({}, {})  # with the names of control tokens, and without
        self._templates = ChatTemplates(metadata, self._control_texts())
        self._special = SpecialTokens(vocabulary)
        self.n_vocab = len(vocabulary.texts)
        self.model = vocabulary.model
        self.pre = vocabulary.pre
        self.bos_id, self.eos_id, self.unk_id = vocabulary.bos, vocabulary.eos, vocabulary.unk
        self.pad_id, self.sep_id, self.cls_id = vocabulary.pad, vocabulary.sep, vocabulary.cls
        self.mask_id = vocabulary.mask
        self.stop_ids = vocabulary.stops
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.chat_template = self._templates.default
        self.fim_ids = fim_ids(metadata, vocabulary.ids)
        """Ids of "prefix", "suffix", "middle" and "separator" of a text with a hole in it, as far as there are any."""

    def __repr__(self) -> str:
        return f"Tokenizer({self.model}, {self.n_vocab} ids)"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        add_special: BOS and EOS ([CLS] and [SEP]) as the file wants them. parse_special: the names of control tokens
        in the text become those tokens; never set it for text from outside, use `apply_chat`. User-defined tokens are
        found in either case, as in llama.cpp. Raises RequestError for a text that is not valid Unicode.
        """
        trust = Trust.TEMPLATE if parse_special else Trust.REPLY
        ids = self._encode([(checked_text(text), trust)])
        return self._with_special(ids) if add_special else ids

    def encode_spans(self, spans: Sequence[tuple[str, Trust]]) -> list[int]:
        """The ids of a text in runs of one trust each, with BOS and EOS as the file wants them."""
        return self._with_special(self._encode(spans))

    def gap(self, number: int) -> str:
        """A text that no text from outside can hold; among ids it is -1 - number."""
        return self._special.gap(number)

    def encode_pair(self, query: str, document: str) -> list[int]:
        """The ids of a question and a text that may answer it, as rerankers are trained on them.

        By the file's template "rerank" with {query} and {document} in it, where it has one, as Qwen3-Reranker's; else
        `[CLS] query [SEP] document [SEP]`, or `<s> query </s></s> document </s>`. No control tokens come out of either
        text. Raises RequestError for a text that is not valid Unicode.
        """
        template = self._templates.named.get("rerank")
        if template is not None:
            texts = {"{query}": checked_text(query), "{document}": checked_text(document)}
            parts = re.split(r"(\{query\}|\{document\})", template)
            spans = [(texts[p], Trust.CONTENT) if p in texts else (p, Trust.TEMPLATE) for p in parts if p]
            return self._encode(spans, template)
        first, second = self.encode(query), self.encode(document)
        if self.model == "bert" or second[:1] == [self.bos_id]:
            between = self.eos_id if self.sep_id is None else self.sep_id
            doubled = self.model != "bert" and self._vocabulary.add_sep and between is not None
            second = [between, *second[1:]] if doubled and between is not None else second[1:]
        return [*first, *second]

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = True) -> str:
        """The text of ids, without control tokens unless `skip_special` is off; what is not UTF-8 becomes U+FFFD.

        As llama.cpp's detokenize, except that no spaces are removed before punctuation, and that the one space which
        `encode` puts in front of a text (SentencePiece) is removed behind a BOS, too: `decode` undoes `encode`.
        Raises RequestError for an id outside the vocabulary.
        """
        detokenizer = self.detokenizer(skip_special)
        return "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()

    def detokenizer(
        self, skip_special: bool = True, *, continues: bool = False, names: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A decoder for ids that arrive one by one; the sum of its outputs is `decode` of them all.

        continues: the ids go on from a text that was there before (a prompt), so that a first space belongs to them.
        names: control tokens that are written by their names, though others are skipped.
        """
        strip_space = self._vocabulary.add_space_prefix and not continues
        if names:
            return Detokenizer(
                lambda id: self.token_bytes(id, special=not skip_special or operator.index(id) in names), strip_space, {}
            )
        return Detokenizer(
            lambda id: self.token_bytes(id, special=not skip_special), strip_space, self._whole[skip_special]
        )

    def token_bytes(self, id: SupportsIndex, special: bool = False) -> bytes:
        """The bytes that this id adds to a text; none for a control token unless `special`."""
        return self._bytes(self._checked_id(id), special)

    def token_text(self, id: SupportsIndex) -> str:
        """The piece as it is stored; bytes that are not UTF-8 become U+FFFD."""
        text = self._vocabulary.texts[self._checked_id(id)]
        return text if is_text(text) else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of a stored piece."""
        return self._vocabulary.ids.get(text)

    def is_control(self, id: SupportsIndex) -> bool:
        return self._vocabulary.kinds[self._checked_id(id)] in (Kind.CONTROL, Kind.UNKNOWN)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a chat, as the model's template writes it; arguments and errors as for `apply_chat`."""
        source = self._templates.choose(template, tools is not None)
        spans = self._templates.render(
            source, messages, add_generation_prompt, tools=tools, documents=documents, kwargs=kwargs
        )
        return "".join(text for text, _ in spans)

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, object] | None = None,
        rewrite: Callable[[Sequence[tuple[str, Trust]]], Sequence[tuple[str, Trust]]] | None = None,
    ) -> list[int]:
        """The ids of a chat, ready for the model.

        messages: each with a "role" and mostly a "content". template: the name of a variant in the file or of a
        built-in template, or Jinja itself, which must never come out of a request; the file's own otherwise.
        kwargs: up to 16 further variables for it, values of JSON. rewrite: what becomes of the rendered text, in runs of
        one trust each. Control tokens come from the template only: no message can name one. BOS is put in front where the
        file wants one and the template has written none. Raises RequestError for messages that the template refuses, or
        where there is no template; TokenizerError for a template that is broken, hostile or too slow.
        """
        source = self._templates.choose(template, tools is not None)
        spans = self._templates.render(
            source, messages, add_generation_prompt, tools=tools, documents=documents, kwargs=kwargs
        )
        ids = self._encode(spans if rewrite is None else rewrite(spans), source)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def template_text(self, template: str | None, tools: bool = False) -> str:
        """The Jinja text that `apply_chat` would use, with tools or without. Raises RequestError where there is none."""
        return self._templates.choose(template, tools)

    def check_chat_template(self) -> None:
        """Renders a greeting by the file's template, if it has one. Raises TokenizerError where that fails; warns where
        control tokens come out in a way that cannot be traced to the template, and so are not recognised."""
        if self.chat_template is None:
            return
        spans = self._templates.greet()
        whole = "".join(text for text, _ in spans)
        if list(self._special.split(spans)) != list(self._special.split([(whole, Trust.TEMPLATE)])):
            warnings.warn(
                "the chat template computes control tokens instead of writing them, and they are not recognised; "
                "choose another template",
                TokenizerWarning,
                stacklevel=2,
            )

    def _encode(self, spans: Sequence[tuple[str, Trust]], structure: str = "") -> list[int]:
        ids: list[int] = []
        after_special = True
        for part in self._special.split(spans, structure):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
            else:
                ids += self._model.encode(part, after_special)
                after_special = False
        return ids

    def _with_special(self, ids: list[int]) -> list[int]:
        if self.model == "bert":
            first, last = self.cls_id, self.sep_id
        else:
            first, last = self.bos_id if self.add_bos else None, self.eos_id if self.add_eos else None
        return [*([] if first is None else [first]), *ids, *([] if last is None else [last])]

    def _checked_id(self, id: SupportsIndex) -> int:
        try:
            number = operator.index(id)
        except TypeError:
            raise RequestError(f"a token id is a {type(id).__name__}, wanted an integer") from None
        if not 0 <= number < self.n_vocab:
            raise RequestError(f"the token id {number} is outside the vocabulary, wanted 0 to {self.n_vocab - 1}")
        return number

    def _control_texts(self) -> dict[str, str]:
        """The variables by which templates name control tokens."""
        named = {
            "bos_token": self._vocabulary.bos,
            "eos_token": self._vocabulary.eos,
            "unk_token": self._vocabulary.unk,
            "pad_token": self._vocabulary.pad,
            "sep_token": self._vocabulary.sep,
            "cls_token": self._vocabulary.cls,
        }
        texts = {name: self._vocabulary.texts[id] for name, id in named.items() if id is not None}
        return {name: text if is_text(text) else "" for name, text in texts.items()}


def checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"a text is a {type(text).__name__}, wanted a str")
    if not is_text(text):
        raise RequestError("the text holds a lone surrogate, which no encoding can carry; send valid Unicode")
    return text


def fim_ids(metadata: Metadata, ids: Mapping[str, int]) -> dict[str, int]:
    """By the file's own keys, or by the names that vocabularies give them."""
    found = {}
    for part, texts in FIM.items():
        keys = (f"tokenizer.ggml.fim_{part[:3]}_token_id", f"tokenizer.ggml.{part}_token_id")
        stated = next((id for key in keys if (id := metadata.int(key, None)) is not None), None)
        id = stated if stated is not None else next((ids[text] for text in texts if text in ids), None)
        if id is not None and 0 <= id < len(ids):
            found[part] = id
    return found


def _model(vocabulary: Vocabulary, metadata: Metadata) -> _Model:
    # Each imported where it is wanted: their libraries take as long as a small vocabulary.
    if vocabulary.model == "llama":
        from quarrel.tokenizer.spm import SentencePieceModel

        return SentencePieceModel(vocabulary)
    if vocabulary.model == "bert":
        from quarrel.tokenizer.wpm import WordPieceModel

        return WordPieceModel(vocabulary)
    if vocabulary.model == "t5":
        from quarrel.tokenizer.ugm import UnigramModel

        n_bytes = metadata.length("tokenizer.ggml.precompiled_charsmap") or 0
        if n_bytes > MAX_BYTES:
            raise TokenizerError(f"tokenizer.ggml.precompiled_charsmap has {n_bytes} bytes, wanted at most {MAX_BYTES}")
        charsmap = metadata.ints("tokenizer.ggml.precompiled_charsmap", [])
        # An array of signed bytes is the same map.
        if any(not -128 <= byte < 256 for byte in charsmap):
            raise TokenizerError("tokenizer.ggml.precompiled_charsmap is no array of bytes")
        return UnigramModel(vocabulary, CharsMap.parse(bytes([byte & 0xFF for byte in charsmap])))
    from quarrel.tokenizer.bpe import BytePairModel

    assert vocabulary.pre_tokenizer is not None
    merges = metadata.strs("tokenizer.ggml.merges", None)
    if merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing, and a BPE vocabulary cannot be used without it")
    return BytePairModel(vocabulary, merges, vocabulary.pre_tokenizer)
