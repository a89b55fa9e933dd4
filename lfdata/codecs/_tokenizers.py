"""Hugging Face and tiktoken tokenizers behind one small interface."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any, Protocol

from lfdata.errors import MissingExtraError, OptionError, SampleError


class Tokenizer(Protocol):
    """``vocab``: one more than the largest id. ``unknown``: id of the unknown token, if any. ``identity``: for the schema."""

    vocab: int
    unknown: int | None
    identity: dict[str, Any]

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of ``text``. Raises ``SampleError`` (``tokenizer``)."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``, special tokens included."""
        ...

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text."""
        ...


class HuggingFace:
    """A ``tokenizer.json``; its identity is the file's SHA-256."""

    def __init__(self, path: Path, special_text: bool) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise _missing("tokenizers", error) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise OptionError(f"tokens: tokenizer={path}: {error.strerror or error}") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise OptionError(f"tokens: tokenizer={path} is not a Hugging Face tokenizer file: {str(error)[:200]}") from None
        # a file may ask for both, which would cut or fill sequences without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_text
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab = max(max(ids, default=0) + 1, self._tokenizer.get_vocab_size(with_added_tokens=True))
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self.unknown = self._tokenizer.token_to_id(unknown) if isinstance(unknown, str) else None
        self.identity = {
            "type": "huggingface",
            "name": path.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "version": tokenizers.__version__,
        }

    def encode(self, text: str, add_special: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        except BaseException as error:
            raise _failed(error) from None
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class Tiktoken:
    """A tiktoken encoding; its identity is the SHA-256 of its ranks in ``.tiktoken`` form (base64, rank, by rank)."""

    def __init__(self, name: str, special_text: bool) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise _missing("tiktoken", error) from error
        if name not in tiktoken.list_encoding_names():
            known = ", ".join(sorted(tiktoken.list_encoding_names()))
            raise OptionError(f"tokens: tiktoken={name!r} is not an encoding; expected one of {known}")
        try:
            self._encoding: Any = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # network failures are OSError
            raise OptionError(
                f"tokens: tiktoken={name} could not be loaded ({str(error)[:200]}); without a network, set TIKTOKEN_CACHE_DIR "
                "to a directory that holds its cached file"
            ) from None
        self._allowed: Any = "all" if special_text else set()
        self.vocab = int(self._encoding.n_vocab)
        self.unknown: int | None = None  # byte-level: there is no unknown text
        self.identity = {
            "type": "tiktoken",
            "name": name,
            "sha256": _ranks_digest(self._encoding),
            "version": str(tiktoken.__version__),
        }

    def encode(self, text: str, add_special: bool) -> list[int]:
        del add_special  # refused when the encoder is made
        try:
            ids: list[int] = self._encoding.encode(text, allowed_special=self._allowed, disallowed_special=())
        except BaseException as error:
            raise _failed(error) from None
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids, errors="strict"))

    def token_id(self, token: str) -> int | None:
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None


def _ranks_digest(encoding: Any) -> str:
    special = {encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    digest = hashlib.sha256()
    for rank in range(encoding.n_vocab):
        if rank in special:
            continue
        try:
            token = encoding.decode_single_token_bytes(rank)
        except KeyError:  # encodings leave gaps
            continue
        digest.update(base64.b64encode(token) + b" %d\n" % rank)
    return digest.hexdigest()


def _missing(package: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"tokens needs the package {package}: pip install 'lfdata[tokenizers]' ({error})")


def _failed(error: BaseException) -> BaseException:
    """A sample error for anything the tokenizer raises, the panics of Rust code included, which are no ``Exception``."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return SampleError("tokenizer", f"the tokenizer failed: {str(error)[:200]}")
    return error
