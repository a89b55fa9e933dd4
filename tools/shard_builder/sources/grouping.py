"""Members of a tar become samples: keys and extensions from names, consecutive members of one key together."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from shard_builder.sources.files import show
from shard_builder.sources.tarstream import Member

SPLITS = ("first", "last", "mapped")
DUPLICATE_MEMBERS = ("error", "first", "last")

_MAX_MEMBERS = 4096
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})\Z")
_META = re.compile(rb"__[^/]*__(?:/|\Z)")


class Splitter:
    """Splits a member's name into the sample's key and the extension, which names the column.

    Args:
        rule: ``first``: at the first dot of the last path component (as WebDataset); ``last``: at its last dot; ``mapped``:
            before the longest declared extension that fits.
        extensions: the declared extensions, in lower case, without the leading dot.
    """

    def __init__(self, rule: str, extensions: Iterable[str]) -> None:
        self._rule = rule
        self._endings = sorted({"." + extension for extension in extensions}, key=lambda ending: (-len(ending), ending))

    def split(self, name: bytes) -> tuple[bytes, str] | str:
        """Key and extension (in lower case); or, as one word, why the member takes no part."""
        if _META.match(name):
            return "meta"
        folder, slash, base = name.rpartition(b"/")
        if base.startswith(b"."):
            return "hidden"
        if self._rule == "mapped":
            text = base.decode("utf-8", "surrogateescape")
            ending = next((e for e in self._endings if len(text) > len(e) and text[-len(e) :].lower() == e), None)
            if ending is None:
                return "unmapped"
            stem = text[: -len(ending)].encode("utf-8", "surrogateescape")
            return folder + slash + stem, ending[1:]
        stem, dot, extension = base.partition(b".") if self._rule == "first" else base.rpartition(b".")
        if not dot or not extension:
            return "no-extension"
        return folder + slash + stem, extension.decode("utf-8", "surrogateescape").lower()


def sparse_reason(member: Member) -> str:
    """Why a sparse member is refused."""
    return f"member {show(member.name)!r} is sparse ({member.size} bytes when expanded); those are not read: repack the tar"


def link_reason(member: Member) -> str:
    """Why a sample with a link is refused."""
    return (
        f"member {show(member.name)!r} is a link; those are not followed: repack the tar with the files themselves "
        "(tar --dereference --hard-dereference)"
    )


@dataclass(slots=True)
class Group:
    """The members of one sample. ``start`` is the place of the first member's header, ``problem`` a code and a reason."""

    key: bytes
    start: int
    members: dict[str, Member] = field(default_factory=dict)
    problem: tuple[str, str] | None = None

    def add(self, extension: str, member: Member, duplicates: str) -> None:
        """Take a member in."""
        if member.skip == "sparse":
            self.problem = self.problem or ("sparse", sparse_reason(member))
        before = self.members.get(extension)
        if before is not None and duplicates == "error":
            self.problem = self.problem or (
                "duplicate-member",
                f"two members for {show(extension)!r}: {show(before.name)!r} at byte {before.start} "
                f"and {show(member.name)!r} at byte {member.start}",
            )
        if before is not None and duplicates == "first":
            return
        if len(self.members) >= _MAX_MEMBERS and before is None:
            self.problem = self.problem or ("too-many-members", f"more than {_MAX_MEMBERS} members of one key")
            return
        self.members[extension] = member


class Grouper:
    """Collects consecutive members of one key.

    Args:
        needed: extensions of the declared fields: a sample that has a link for one of them is no whole sample.
    """

    def __init__(self, splitter: Splitter, duplicates: str, needed: Collection[str] = ()) -> None:
        self._splitter, self._duplicates, self._needed = splitter, duplicates, needed
        self._link: tuple[bytes, Member] | None = None
        self.current: Group | None = None

    def feed(self, member: Member) -> tuple[Group | None, str]:
        """Take the next member in. Returns the group it completes, if any, and why the member takes no part, if so."""
        split = "" if member.skip not in ("", "sparse", "link") else self._splitter.split(member.name)
        if member.skip == "link" and not isinstance(split, str) and split[1] in self._needed:
            self._link = (split[0], member)
            self._mark()
        if member.skip and member.skip != "sparse":
            return None, member.skip
        if isinstance(split, str):
            return None, split
        key, extension = split
        done = None
        if self.current is None or self.current.key != key:
            done, self.current = self.current, Group(key, member.start)
            self._mark()
        self.current.add(extension, member, self._duplicates)
        return done, ""

    def _mark(self) -> None:
        """The last link spoils the sample it belongs to, whether it came before or among its members."""
        if self._link and self.current and self.current.key == self._link[0]:
            self.current.problem = self.current.problem or ("link", link_reason(self._link[1]))

    def take(self) -> Group | None:
        """The group in the making."""
        group, self.current = self.current, None
        return group


def expand(pattern: str, limit: int = 1_000_000) -> Iterator[str]:
    """Names of a brace pattern: ``{000..123}`` (padded with zeros as written) and ``{a,b}``, in the order written.

    Raises:
        ValueError: an unclosed brace, a backward range, or more than ``limit`` names.
    """
    parts = re.split(r"\{([^{}]*)\}", pattern)
    if any("{" in part or "}" in part for part in parts[::2]):
        raise ValueError("braces that do not match, or stand inside each other")
    choices = [_choices(text, limit) for text in parts[1::2]]
    if math.prod(map(len, choices)) > limit:
        raise ValueError(f"more than {limit} names")
    for chosen in itertools.product(*choices):
        yield "".join(itertools.chain.from_iterable(zip(parts[::2], (*chosen, ""), strict=True)))


def _choices(text: str, limit: int) -> list[str]:
    found = _RANGE.match(text)
    if found is None:
        return text.split(",")
    first, last = found[1], found[2]
    if int(last) < int(first):
        raise ValueError(f"the range {{{text}}} runs backwards")
    if int(last) - int(first) >= limit:
        raise ValueError(f"more than {limit} names")
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
