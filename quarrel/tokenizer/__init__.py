"""Text and ids: vocabularies, chat templates, and ids back to text as they come."""

from quarrel.tokenizer.detokenizer import Detokenizer
from quarrel.tokenizer.templates import BUILTIN_TEMPLATES
from quarrel.tokenizer.tokenizer import Tokenizer, load_tokenizer
from quarrel.tokenizer.vocab import TokenizerWarning

__all__ = ["BUILTIN_TEMPLATES", "Detokenizer", "Tokenizer", "TokenizerWarning", "load_tokenizer"]
