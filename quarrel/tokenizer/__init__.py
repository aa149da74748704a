"""Text and ids: vocabularies, chat templates, and ids back to text as they come."""

from quarrel.tokenizer.detect import pre_name, pre_of_pattern
from quarrel.tokenizer.detokenizer import Detokenizer
from quarrel.tokenizer.templates import BUILTIN_TEMPLATES
from quarrel.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quarrel.tokenizer.vocab import Kind, TokenizerWarning

__all__ = [
    "BUILTIN_TEMPLATES",
    "Detokenizer",
    "Kind",
    "Tokenizer",
    "TokenizerWarning",
    "load_tokenizer",
    "pre_name",
    "pre_of_pattern",
]
