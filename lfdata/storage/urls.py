"""Locations by URL: what one is, names below it, and what of it may be shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from lfdata.errors import OptionError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ANY_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>]*")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_QUOTED = ("http", "https")


def is_url(location: object) -> bool:
    """Whether a location is a URL and not a path."""
    return isinstance(location, str) and _SCHEME.match(location) is not None


def protocol(url: str) -> str:
    """Its scheme, in lower case."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """A URL without user, password, query and fragment: as it may stand in messages, manifests and states."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    rest = rest.partition("?")[0].partition("#")[0] if protocol(url) in _QUOTED else rest
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def scrubbed(text: str) -> str:
    """A library's words without what they may give away: URLs beyond their scheme, and credentials of the environment."""
    text = _ANY_URL.sub(r"\1...", text)
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "...")
    return text if len(text) <= 300 else text[:300] + "..."


def checked(url: str, *, query: bool = False) -> str:
    """The URL without a trailing slash.

    Raises:
        OptionError: it holds a user or password, or (unless ``query``) a query.
    """
    web = protocol(url) in _QUOTED
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise OptionError(f"{shown(url)}: a user or password in a URL: credentials belong into the environment")
    if web and not query and ("?" in url or "#" in url):
        raise OptionError(
            f"{shown(url)}: a URL with a query (such as a signed one) is of one object and has no files below it. It can be a source "
            "of `shard-builder convert`; for a folder or data set, credentials belong into the environment"
        )
    if not urlsplit(url).netloc and protocol(url) not in ("file", "memory", "local"):
        raise OptionError(f"{shown(url)}: a URL without a host or bucket")
    scheme, separator, rest = url.partition("://")
    path, mark, asked = rest.partition("?") if web else (rest, "", "")
    return f"{scheme.lower()}{separator}{path.rstrip('/')}{mark}{asked}"


def below(url: str, name: str) -> str:
    """The URL of a file below a directory's."""
    return f"{url}/{quote(name) if protocol(url) in _QUOTED else name}"


def local_path(url: str) -> Path | None:
    """The path of a ``file://`` URL; ``None`` for others."""
    if protocol(url) not in ("file", "local"):
        return None
    rest = url.partition("://")[2]
    return Path(unquote(rest.removeprefix("localhost")))
