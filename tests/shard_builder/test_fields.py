"""``--field`` texts and mapping files: what they mean, and that every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lfdata.errors import OptionError
from shard_builder.fields import check_unique, load_mapping, parse_field
from shard_builder.sources.base import FieldSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "image:image=img_path@file,codec=webp,quality=80",
            FieldSpec("image", "image", "img_path", "file", {"codec": "webp", "quality": "80"}),
        ),
        ("caption:text=text", FieldSpec("caption", "text", "text")),
        ("ids:tokens=text,tokenizer=tok.json", FieldSpec("ids", "tokens", "text", "inline", {"tokenizer": "tok.json"})),
        (
            "audio:audio=wav@file,rate=16000,channels=mono",
            FieldSpec("audio", "audio", "wav", "file", {"rate": "16000", "channels": "mono"}),
        ),
        ("meta:json=*", FieldSpec("meta", "json", "*")),
        ("label:scalar=cls,dtype=int32", FieldSpec("label", "scalar", "cls", "inline", {"dtype": "int32"})),
        ("image:image=jpg;jpeg;png", FieldSpec("image", "image", "jpg;jpeg;png", "file")),
        ("blob:bytes=data@base64", FieldSpec("blob", "bytes", "data", "base64")),
        ('x:text="a,b@c:d=e"', FieldSpec("x", "text", "a,b@c:d=e")),
        ('x:text="say ""hi"""@inline', FieldSpec("x", "text", 'say "hi"')),
        ('"a:b":text=t', FieldSpec("a:b", "text", "t")),
        ('x:text=t,k="1,2"', FieldSpec("x", "text", "t", "inline", {"k": "1,2"})),
        ("x:tokens=t,encoding=a=b", FieldSpec("x", "tokens", "t", "inline", {"encoding": "a=b"})),
        ("画像:image=写真", FieldSpec("画像", "image", "写真", "file")),
        ("x:text=two words", FieldSpec("x", "text", "two words")),
    ],
)
def test_a_field_text_means_what_the_grammar_says(text: str, expected: FieldSpec) -> None:
    assert parse_field(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "NAME:KIND=COLUMN"),
        ("image", "NAME:KIND=COLUMN"),
        ("image:image", "NAME:KIND=COLUMN"),
        ("image=jpg", "NAME:KIND=COLUMN"),
        ("image:picture=jpg", "image, tokens, audio"),
        ("image:image=", "column"),
        (":image=jpg", "1 to 255"),
        ("__key:text=t", "underscores"),
        ("x:text=t@disk", "inline, file, base64"),
        ("x:text=t,codec", "value"),
        ("x:text=t,a=1,a=2", "twice"),
        ('x:text="t', "quote"),
        (f"{'n' * 256}:text=t", "255"),
    ],
)
def test_a_mistake_is_an_option_error_that_says_what_is_right(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_field(text)


def test_names_of_255_bytes_count_bytes_and_not_characters() -> None:
    assert parse_field(f"{'n' * 255}:text=t").name == "n" * 255
    with pytest.raises(OptionError, match="255"):
        parse_field(f"{'é' * 128}:text=t")


def test_names_are_unique_and_there_is_one_at_least() -> None:
    with pytest.raises(OptionError, match="twice"):
        check_unique([parse_field("a:text=x"), parse_field("a:json=y")])
    with pytest.raises(OptionError):
        check_unique([])


def test_a_mapping_file_declares_the_same_as_texts_in_its_own_order(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(
        """
        [[fields]]
        name = "zebra"
        kind = "image"
        column = "img_path"
        options = { codec = "webp", quality = 80, lossless = true }

        [[fields]]
        name = "a"
        kind = "text"
        column = "caption, long"
        """
    )
    assert load_mapping(path) == [
        FieldSpec("zebra", "image", "img_path", "file", {"codec": "webp", "quality": "80", "lossless": "yes"}),
        FieldSpec("a", "text", "caption, long"),
    ]


def test_a_tokenizer_named_in_a_mapping_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text("{}")
    path = tmp_path / "map.toml"
    path.write_text('[[fields]]\nname="t"\nkind="tokens"\ncolumn="t"\noptions={tokenizer="tok.json"}\n')
    assert load_mapping(path)[0].options["tokenizer"] == str(tmp_path / "tok.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fields = 3",
        "[[fields]]\nname = 'a'\nkind = 'text'",
        "[[fields]]\nname = 'a'\nkind = 'nope'\ncolumn = 'x'",
        "[[fields]]\nname = 'a'\nkind = 'text'\ncolumn = 'x'\ncodec = 'webp'",
        "[[fields]]\nname = 'a'\nkind = 'text'\ncolumn = 'x'\norigin = 3",
        "[[fields]]\nname = 'a'\nkind = 'text'\ncolumn = 'x'\noptions = 3",
        "[[fields]]\nname = 'a'\nkind = 'text'\ncolumn = 'x'\n" * 2,
        "not toml [",
        "a = " + "[" * 5000,
    ],
)
def test_a_bad_mapping_file_is_an_option_error_naming_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "map.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"map\.toml|field"):
        load_mapping(path)


def test_a_missing_mapping_file_is_an_option_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"none\.toml"):
        load_mapping(tmp_path / "none.toml")
