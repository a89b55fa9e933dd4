"""Structure-aware fuzzing with a seed: shards are mutated where it hurts, mostly with every check recomputed (RELIABILITY 15)."""

from __future__ import annotations

import functools
import json
import random
import struct

import pytest
from hostilekit import Section, entries_of, outcome, rebuild, reseal, small_shard

from lfdata.errors import LfdataError

INTERESTING = (0, 1, 2, 7, 8, 63, 64, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
               2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1)  # fmt: skip
JSON_VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**70,
    1.5,
    "",
    "uint8",
    "float64",
    "x" * 300,
    [],
    [1],
    {},
    {"a": 1},
    "image",
    "tokens",
    "scalar",
)


@functools.cache
def seeds() -> tuple[bytes, ...]:
    """Shards to start from."""
    return tuple(small_shard(seed, rows) for seed, rows in ((0, 5), (1, 1), (2, 0), (3, 9)))


def number(rng: random.Random) -> int:
    """A number worth trying."""
    return rng.choice(INTERESTING) if rng.random() < 0.7 else rng.getrandbits(rng.randrange(1, 65))


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Damage anywhere, checks left as they were or made right."""
    out = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(out))
        out[at] = rng.randrange(256)
    return reseal(out) if rng.random() < 0.7 else bytes(out)


def mutate_directory(rng: random.Random, raw: bytes) -> bytes:
    """Fields of trailer and directory entries."""
    out = bytearray(raw)
    start, count = struct.unpack_from("<QQ", out, len(out) - 56)
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.2:
            struct.pack_into("<Q", out, len(out) - 128 + 8 * rng.randrange(1, 15), number(rng))
        elif rng.random() < 0.2:
            one, other = (start + 64 * rng.randrange(count) for _ in range(2))
            out[one : one + 64], out[other : other + 64] = out[other : other + 64], out[one : one + 64]
        else:
            at = start + 64 * rng.randrange(count) + 4 * rng.randrange(16)
            struct.pack_into("<I", out, at, number(rng) & 0xFFFFFFFF)
    return reseal(out)


def mutate_elements(rng: random.Random, raw: bytes) -> bytes:
    """Elements of index columns, locators, keys and payloads, with all block checks right."""

    def change(sections: list[Section]) -> None:
        for _ in range(rng.randrange(1, 4)):
            section = rng.choice([s for s in sections if s.data and s.type not in ("META", "BSUM")])
            data = bytearray(section.data)
            width = {1: 1, 2: 2, 3: 4, 6: 2, 7: 4}.get(section.element, 8)
            if section.element and rng.random() < 0.8 and len(data) >= width:
                at = rng.randrange(len(data) // width) * width
                data[at : at + width] = (number(rng) & (2 ** (8 * width) - 1)).to_bytes(width, "little")
            elif rng.random() < 0.3:
                rng.shuffle(data)
            else:
                data[rng.randrange(len(data))] = rng.randrange(256)
            section.data = bytes(data)

    return rebuild(raw, change)


def mutate_sections(rng: random.Random, raw: bytes) -> bytes:
    """Sections dropped, doubled, cut, lengthened, exchanged; another number of rows."""

    def change(sections: list[Section]) -> None:
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(sections))
            what, section = rng.randrange(6), sections[at]
            if what == 0 and len(sections) > 1:
                del sections[at]
            elif what == 1:
                sections.insert(at, Section(**vars(section)))
            elif what == 2:
                section.data = section.data[: rng.randrange(len(section.data) + 1)]
                section.count = rng.choice((section.count, len(section.data), len(section.data) // 8))
            elif what == 3:
                section.data += rng.randbytes(rng.choice((1, 8, 16, 4096)))
                section.count = rng.choice((section.count, len(section.data), len(section.data) // 8))
            elif what == 4:
                other = rng.choice(sections)
                section.data, other.data = other.data, section.data
            else:
                section.field, section.role = rng.randrange(8), rng.randrange(17)

    return rebuild(raw, change, rows=rng.choice((None, None, 0, 1, 4, 6, number(rng))))


def mutate_meta(rng: random.Random, raw: bytes) -> bytes:
    """Values anywhere in META's JSON, or its bytes."""

    def change(sections: list[Section]) -> None:
        for section in sections:
            if section.type == "META":
                section.data = meta_bytes(rng, section.data)
                section.count = len(section.data)

    return rebuild(raw, change)


def meta_bytes(rng: random.Random, data: bytes) -> bytes:
    """META changed somewhere."""
    if rng.random() < 0.3:
        out = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            out[rng.randrange(len(out))] = rng.randrange(256)
        return bytes(out)
    value = json.loads(data)
    for _ in range(rng.randrange(1, 3)):
        node = value if rng.random() < 0.2 else rng.choice(value["fields"] or [value])
        while isinstance(node, dict) and node:
            key = rng.choice(list(node))
            if isinstance(node[key], dict) and node[key] and rng.random() < 0.8:
                node = node[key]
                continue
            if rng.random() < 0.2 and key != "fields":
                del node[key]
            else:
                node[key] = rng.choice(JSON_VALUES) if key != "fields" else node[key][: rng.randrange(len(node[key]) + 1)]
            break
    return json.dumps(value).encode()


MUTATORS = (mutate_bytes, mutate_directory, mutate_elements, mutate_sections, mutate_meta)


def run(first: int, count: int) -> tuple[int, int]:
    """Run cases by number; returns how many were refused and how many read without an error."""
    refused = read = 0
    for case in range(first, first + count):
        rng = random.Random(case)
        raw = rng.choice(seeds())
        for mutator in rng.choices(MUTATORS, k=rng.choice((1, 1, 1, 2))):
            try:
                raw = mutator(rng, raw)
            except (ValueError, IndexError, struct.error, KeyError, MemoryError, OverflowError):
                break  # the mutation before left nothing that this one could take apart
        try:
            found = outcome(raw, verify=True)
        except Exception as error:
            error.add_note(f"fuzz case {case}")
            raise
        refused += isinstance(found, LfdataError)
        read += not isinstance(found, LfdataError)
    return refused, read


def test_the_seeds_are_intact() -> None:
    for raw in seeds():
        found = outcome(raw, verify=True)
        assert isinstance(found, dict) and not found["damage"]
        assert entries_of(raw)


@pytest.mark.parametrize("part", range(4))
def test_mutated_shards(part: int) -> None:
    refused, read = run(part * 500, 500)
    assert refused > 100 and read > 25, "the mutations no longer reach both sides"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_mutated_shards_long(part: int) -> None:
    run(1_000_000 + part * 5_000, 5_000)
