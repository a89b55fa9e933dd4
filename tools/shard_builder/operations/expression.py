"""The language of ``filter --where``: comparisons of index columns and keys, and nothing that could do anything else.

    expression = and-terms joined by "or"        and-term = not-terms joined by "and"      not-term = ["not"] comparison
    comparison = sum [OP sum]  |  sum ["not"] "in" "(" constants ")"  |  "has" "(" field ")"  |  "(" expression ")"
    sum        = products joined by + -          product  = factors joined by * / %        factor   = ["-"] number | text | column
    OP         = == != < <= > >= startswith endswith contains (the last three of key)

A comparison that involves an absent value is unknown: ``not`` of it is unknown too, and a sample is kept only where the whole is true.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from lfdata.errors import OptionError
from shard_builder.operations.evaluation import (
    COMPARE,
    KEY_TESTS,
    Columns,
    Node,
    Truth,
    Value,
    arithmetic,
    both,
    compare,
    constant,
    either,
    inverse,
    key_test,
)

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<text>'[^']*'|\"[^\"]*\")|(?P<name>[^\W\d][\w.]*|`[^`]+`)"
    r"|(?P<sign>==|!=|<=|>=|[<>()+\-*/%,]))"
)
_WORDS = ("and", "or", "not", "in", "has", "key", "true", "false", *KEY_TESTS)
_MAX_LENGTH = 10_000
_MAX_DEPTH = 50
_MAX_DIGITS = 40


class Expression:
    """A parsed expression. Raises :class:`OptionError` naming the place of a mistake."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise OptionError(f"--where: an expression of {len(text)} characters; the limit is {_MAX_LENGTH}")
        self.text = text
        parser = _Parser(text)
        self._node = parser.expression()
        parser.end()

    def keep(self, columns: Columns) -> NDArray[np.bool_]:
        """Which rows are kept: bool, (rows,)."""
        found: Truth = self._node(columns)
        return found.true


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._depth = 0
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                place = at + len(text[at:]) - len(text[at:].lstrip()) + 1
                raise OptionError(f"--where {text!r}: what stands at character {place} is not understood")
            kind = str(match.lastgroup)
            self._tokens.append((kind, match[kind], match.start(kind)))
            at = match.end()
        self._at = 0

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at][:2] if self._at < len(self._tokens) else ("end", "")

    def _is(self, *words: str) -> bool:
        kind, word = self._peek()
        return kind in ("name", "sign") and word in words

    def _take(self) -> tuple[str, str]:
        found = self._peek()
        self._at += 1
        return found

    def _expect(self, sign: str) -> None:
        if not self._is(sign):
            raise self._wrong(f"{sign!r} is expected")
        self._at += 1

    def _wrong(self, reason: str) -> OptionError:
        place = self._tokens[self._at][2] + 1 if self._at < len(self._tokens) else len(self._text) + 1
        return OptionError(f"--where {self._text!r}: character {place}: {reason}")

    def end(self) -> None:
        """Refuse anything that is left."""
        if self._at < len(self._tokens):
            raise self._wrong(f"{self._peek()[1]!r} is not expected here")

    # -- truths -------------------------------------------------------------------------------------------------------

    def expression(self) -> Node:
        """Terms joined by ``or``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong(f"nested more than {_MAX_DEPTH} deep")
        nodes = [self._conjunction()]
        while self._is("or"):
            self._at += 1
            nodes.append(self._conjunction())
        self._depth -= 1
        return either(nodes)

    def _conjunction(self) -> Node:
        nodes = [self._negation()]
        while self._is("and"):
            self._at += 1
            nodes.append(self._negation())
        return both(nodes)

    def _negation(self) -> Node:
        negated = False
        while self._is("not"):
            self._at += 1
            negated = not negated
        node = self._comparison()
        return inverse(node) if negated else node

    def _comparison(self) -> Node:
        if self._is("has"):
            return self._has()
        if self._is("(") and self._holds_truth():
            self._at += 1
            node = self.expression()
            self._expect(")")
            return node
        left = self._sum()
        kind, word = self._peek()
        if kind == "sign" and word in COMPARE:
            self._at += 1
            return compare(word, left, self._sum())
        if kind == "name" and word in KEY_TESTS:
            self._at += 1
            return key_test(word, left, self._text_constant())
        if kind == "name" and word in ("in", "not"):
            negated = word == "not"
            self._at += 1 + negated
            if negated and self._tokens[self._at - 1 : self._at] and self._tokens[self._at - 1][1] != "in":
                raise self._wrong("'in' is expected after 'not'")
            node = self._member(left)
            return inverse(node) if negated else node
        raise self._wrong("a comparison such as == or < is expected")

    def _holds_truth(self) -> bool:
        """Whether the parenthesis that opens here holds a comparison rather than a number."""
        depth = 0
        for kind, word, _ in self._tokens[self._at :]:
            if kind == "sign" and word == "(":
                depth += 1
            elif kind == "sign" and word == ")":
                depth -= 1
                if not depth:
                    return False
            elif (kind == "sign" and word in COMPARE) or (
                kind == "name" and word in ("in", "has", "and", "or", "not", *KEY_TESTS)
            ):
                return True
        return False

    def _has(self) -> Node:
        self._at += 1
        self._expect("(")
        kind, name = self._take()
        if kind != "name":
            raise self._wrong("the name of a field is expected")
        self._expect(")")
        name = name.strip("`")

        def node(columns: Columns) -> Truth:
            there = columns.present(name)
            return Truth(there, ~there)

        return node

    def _member(self, left: Node) -> Node:
        self._expect("(")
        options = [self._sum()]
        while self._is(","):
            self._at += 1
            options.append(self._sum())
        self._expect(")")
        return either([compare("==", left, option) for option in options])

    def _text_constant(self) -> bytes:
        kind, word = self._take()
        if kind != "text":
            raise self._wrong("a text in quotes is expected")
        return word[1:-1].encode()

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _sum(self) -> Node:
        first, rest = self._product(), []
        while self._is("+", "-"):
            _, sign = self._take()
            rest.append((sign, self._product()))
        return arithmetic(first, rest)

    def _product(self) -> Node:
        first, rest = self._factor(), []
        while self._is("*", "/", "%"):
            _, sign = self._take()
            rest.append((sign, self._factor()))
        return arithmetic(first, rest)

    def _factor(self) -> Node:
        negative = False
        while self._is("-"):
            self._at += 1
            negative = not negative
        node = self._atom()
        return arithmetic(constant(0), [("-", node)]) if negative else node

    def _atom(self) -> Node:
        if self._is("("):
            self._at += 1
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._wrong(f"nested more than {_MAX_DEPTH} deep")
            node = self._sum()
            self._expect(")")
            self._depth -= 1
            return node
        kind, word = self._peek()
        if kind == "number":
            if len(word) > _MAX_DIGITS:
                raise self._wrong(f"a number of more than {_MAX_DIGITS} digits")
            self._at += 1
            return constant(int(word) if word.isdigit() else float(word))
        if kind == "text":
            self._at += 1
            return constant(word[1:-1].encode())
        if kind == "name" and word in ("true", "false"):
            self._at += 1
            return constant(int(word == "true"))
        if kind == "name" and word == "key":
            self._at += 1
            return lambda columns: Value(columns.keys(), key=True)
        if kind == "name" and word not in _WORDS:
            self._at += 1
            name = word.strip("`")
            return lambda columns: Value(*columns.column(name))
        raise self._wrong("a number, a text, a column or key is expected")
