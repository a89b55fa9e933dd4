"""Token ids are stored exactly or refused; text survives tokenizers that allow it; identities name the tokenizer."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nonimage_odd import ODD, names, needs_odd

from lfdata.codecs.tokens import TokensDecoder, TokensEncoder, token_dtype
from lfdata.errors import MissingExtraError, OptionError, SampleError

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")

CORPUS = ["the quick brown fox jumps over the lazy dog", "a picture of two dogs in the snow", "naïve café, 北京 🙂"] * 20


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE trained here, with a template, truncation and padding that must not be applied unasked."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>"))]
    )
    made.enable_truncation(5)
    made.enable_padding(length=50)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def ids_of(encoder: TokensEncoder, raw: object) -> list[int]:
    encoded = encoder.encode(raw)
    result = TokensDecoder(encoder.params).decode(encoded.payload, encoded.sizes)
    assert result.dtype == np.dtype(encoder.params["dtype"]) and result.flags.writeable
    assert encoded.sizes == {"tokens": len(result)}
    return [int(one) for one in result]


def code(encoder: TokensEncoder, raw: object) -> str:
    with pytest.raises(SampleError) as caught:
        encoder.encode(raw)
    return caught.value.code


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (1, "uint8"),
        (256, "uint8"),
        (257, "uint16"),
        (65_000, "uint16"),
        (65_536, "uint16"),
        (65_537, "uint32"),
        (129_280, "uint32"),
        (2**32, "uint32"),
        (2**32 + 1, "uint64"),
        (2**64, "uint64"),
    ],
)
def test_the_smallest_dtype_holds_the_vocabulary(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab).name == dtype
    encoder = TokensEncoder({"vocab": str(vocab)})
    assert ids_of(encoder, [0, vocab - 1]) == [0, vocab - 1]
    assert code(encoder, [0, vocab]) == "range"
    assert code(encoder, [-1]) == "range"


@given(st.lists(st.integers(-(2**65), 2**65), max_size=6), st.sampled_from([1, 256, 300, 65_536, 2**32, 2**64]))
def test_no_id_ever_wraps(ids: list[int], vocab: int) -> None:
    encoder = TokensEncoder({"vocab": str(vocab)})
    if all(0 <= one < vocab for one in ids):
        assert ids_of(encoder, ids) == ids
    else:
        assert code(encoder, ids) == "range"


def test_ready_made_ids_in_their_forms() -> None:
    encoder = TokensEncoder({"vocab": "1000"})
    file = io.BytesIO()
    np.save(file, np.array([1, 2, 999], dtype=">i8"))
    for raw in ([1, 2, 999], (1, 2, 999), np.array([1, 2, 999]), np.array([1, 2, 999], "u2"), file.getvalue()):
        assert ids_of(encoder, raw) == [1, 2, 999]
    assert ids_of(encoder, []) == []
    assert encoder.encode([1, 2]).payload == b"\x01\x00\x02\x00"


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ("text", "type"),
        (b"text", "type"),
        (5, "type"),
        ([1.0, 2.0], "type"),
        ([True], "type"),
        ([None], "type"),
        (["1"], "type"),
        ([[1], [2]], "shape"),
        ([[1], [2, 3]], "shape"),
        (np.array([1000]), "range"),
        (np.array([-1], np.int8), "range"),
        (np.array([1.5]), "type"),
    ],
)
def test_what_is_not_a_list_of_ids_is_refused(raw: object, want: str) -> None:
    assert code(TokensEncoder({"vocab": "1000"}), raw) == want


def test_max_tokens_and_eos_are_stated(tokenizer_file: Path) -> None:
    encoder = TokensEncoder({"vocab": "100", "max_tokens": "3", "eos": "99"})
    assert ids_of(encoder, [1, 2]) == [1, 2, 99]
    assert encoder.encode([1, 2]).warnings == ()
    assert ids_of(encoder, [1, 2, 3, 4]) == [1, 2, 99]
    assert encoder.encode([1, 2, 3, 4]).warnings == ("cut from 5 to 3 tokens",)
    by_name = TokensEncoder({"tokenizer": str(tokenizer_file), "eos": "</s>"})
    assert ids_of(by_name, "the")[-1] == by_name.params["eos"] == 1
    with pytest.raises(OptionError):
        TokensEncoder({"vocab": "100", "eos": "100"})


def test_hugging_face_text_is_exact_and_never_cut_or_padded(tokenizer_file: Path) -> None:
    encoder = TokensEncoder({"tokenizer": tokenizer_file.name}, root=tokenizer_file.parent)
    text = CORPUS[0] * 30
    ids = ids_of(encoder, text)
    assert len(ids) > 50 and 0 not in ids and 1 not in ids
    assert encoder.decode_text(np.array(ids)) == text
    assert ids_of(encoder, b"\xef\xbb\xbf" + text.encode()) == ids
    assert encoder.params["tokenizer"] == {
        "type": "huggingface",
        "name": "tokenizer.json",
        "sha256": hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
        "version": tokenizers.__version__,
    }
    assert json.loads(json.dumps(encoder.params)) == encoder.params


def test_special_tokens_only_when_asked_for(tokenizer_file: Path) -> None:
    plain = TokensEncoder({"tokenizer": str(tokenizer_file)})
    forged = ids_of(plain, "hi </s> there")
    assert 1 not in forged and plain.decode_text(np.array(forged)) == "hi </s> there"
    assert 1 in ids_of(TokensEncoder({"tokenizer": str(tokenizer_file), "special_text": "special"}), "hi </s> there")
    wrapped = ids_of(TokensEncoder({"tokenizer": str(tokenizer_file), "add_special": "yes"}), "hi")
    assert (wrapped[0], wrapped[-1]) == (0, 1)


@needs_odd
def test_naughty_strings_survive_a_byte_level_tokenizer(tokenizer_file: Path) -> None:
    (name,) = [n for n in names(".json") if "blns" in n]
    encoder = TokensEncoder({"tokenizer": str(tokenizer_file)})
    for text in json.loads((ODD / name).read_bytes()):
        assert encoder.decode_text(np.array(ids_of(encoder, text), np.uint32)) == text


def test_bad_text_is_a_named_error(tokenizer_file: Path) -> None:
    encoder = TokensEncoder({"tokenizer": str(tokenizer_file)})
    assert code(encoder, "a\ud800") == "surrogate"
    assert code(encoder, b"a\xff") == "utf8"
    assert code(encoder, [1, 2]) == "type"
    assert ids_of(encoder, "") == []


def test_unknown_tokens_are_reported(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    encoded = TokensEncoder({"tokenizer": "words.json"}, root=tmp_path).encode("cat dog cat")
    assert encoded.warnings == ("1 of 3 tokens are the unknown token",)


def test_encoders_survive_pickling(tokenizer_file: Path) -> None:
    encoder = TokensEncoder({"tokenizer": tokenizer_file.name, "max_tokens": "9"}, root=tokenizer_file.parent)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.params == encoder.params and copy.encode("a dog").payload == encoder.encode("a dog").payload


@pytest.fixture
def small_tiktoken(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """r50k_base replaced, inside tiktoken, by a small byte-level encoding of that name: no network is used."""
    ranks = b"".join(base64.b64encode(bytes((b,))) + b" %d\n" % b for b in range(256)) + base64.b64encode(b"ab") + b" 256\n"
    from tiktoken import registry

    def made() -> dict[str, object]:
        lines = (line.split() for line in ranks.splitlines())
        return {
            "name": "r50k_base",
            "pat_str": r"(?s:.+)",
            "mergeable_ranks": {base64.b64decode(token): int(rank) for token, rank in lines},
            "special_tokens": {"<|endoftext|>": 300},
        }

    tiktoken.list_encoding_names()
    monkeypatch.setitem(registry.ENCODING_CONSTRUCTORS, "r50k_base", made)
    monkeypatch.setattr(registry, "ENCODINGS", {})
    return ranks


def test_tiktoken_text_is_exact_and_identified_by_its_ranks(small_tiktoken: bytes) -> None:
    encoder = TokensEncoder({"tiktoken": "r50k_base", "eos": "<|endoftext|>"})
    assert encoder.params["vocab"] == 301 and encoder.params["dtype"] == "uint16"
    assert encoder.params["tokenizer"]["sha256"] == hashlib.sha256(small_tiktoken).hexdigest()
    assert ids_of(encoder, "xaby") == [ord("x"), 256, ord("y"), 300]
    text = "né <|endoftext|> 北"
    ids = ids_of(encoder, text)
    assert ids.count(300) == 1 and encoder.decode_text(np.array(ids[:-1])) == text
    assert ids_of(TokensEncoder({"tiktoken": "r50k_base", "special_text": "special"}), text).count(300) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocab": "0"},
        {"vocab": "18446744073709551617"},
        {"vocab": "10", "add_special": "yes"},
        {"vocab": "10", "special_text": "special"},
        {"vocab": "10", "max_tokens": "0"},
        {"vocab": "10", "colour": "red"},
        {"tiktoken": "no_such_encoding"},
        {"tokenizer": "no/such/file.json"},
        {"tokenizer": "a.json", "tiktoken": "cl100k_base"},
    ],
)
def test_bad_options_are_refused(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="tokens"):
        TokensEncoder(options, root=tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(OptionError, match="not a Hugging Face tokenizer"):
        TokensEncoder({"tokenizer": "x.json"}, root=tmp_path)


def test_vocab_may_only_enlarge_the_tokenizer(tokenizer_file: Path) -> None:
    assert TokensEncoder({"tokenizer": str(tokenizer_file), "vocab": "70000"}).params["dtype"] == "uint32"
    with pytest.raises(OptionError, match="the tokenizer has"):
        TokensEncoder({"tokenizer": str(tokenizer_file), "vocab": "100"})


@pytest.mark.parametrize(("option", "package"), [("tokenizer", "tokenizers"), ("tiktoken", "tiktoken")])
def test_a_missing_library_names_the_extra(option: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"lfdata\[tokenizers\]"):
        TokensEncoder({option: "cl100k_base"})


def test_damaged_payloads_are_errors() -> None:
    decoder = TokensDecoder({"vocab": 300, "dtype": "uint16"})
    for payload, tokens in ((b"\x01\x00", 2), (b"\x01", 1), (b"\x2c\x01", 1), (b"", -1)):
        with pytest.raises(SampleError):
            decoder.decode(payload, {"tokens": tokens})
    for params in ({}, {"vocab": 300, "dtype": "uint8"}, {"vocab": 0, "dtype": "uint8"}, {"vocab": 5, "dtype": "int8"}):
        with pytest.raises(OptionError):
            TokensDecoder(params)
