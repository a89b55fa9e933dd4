"""What of a failed process's last words says why, as one line."""

from __future__ import annotations

import re

MOST_LETTERS, MOST_OWN = 400, 200
"""Letters of a reason, and of a subject's own words in it."""
# What an exception group puts in front of the lines of its parts.
_GUTTER = re.compile(r"^\s*(\| ?|\+-[-+ ]*(\d+ [-+ ]*)?$)")
# Lines of a traceback that are not the message.
_FRAME = re.compile(
    r"\s|Traceback |Original Traceback|During handling of|The above exception|[\^~]+$|[-+= ]+(\d+ [-+= ]*)?$|Exception ignored"
)
# Messages that only say that something else failed, which has said why before.
_HOLLOW = re.compile(
    r"(\w+\.)*(CalledProcessError|PipelineFailure|PipelineError|ExceptionGroup|BrokenProcessPool)\b"
    r"|.*Caught \w+ in DataLoader worker|.*worker .*exited unexpectedly|.*returned non-zero exit status"
    r"|(\w+: )?(The )?[Pp]ipeline stage\b"
)
_MESSAGE = re.compile(
    r"(\w+\.)*\w*(Error|Exception|Failure|Interrupt|Exit)\b|(?i:error|fatal|usage|failed|shard-builder)\b"
    r"|.*\b(?i:error|failed|cannot)\b"
)
_STATUS = re.compile(r"exit status (-?\d+): ?")
# What loggers put in front of their message.
_LOGGER = re.compile(r"^(\d{4}-\d\d-\d\d[ T][\d:,.]+\s*)?(\[?(ERROR|CRITICAL|WARNING|E\d{4})\b[\w .:-]*\]?:?\s+)?")


def short(reason: str) -> str:
    """The lines that say why, cleaned: the last message of an exception, and where that only says that another process or thread failed,
    the last message before it; and the source file that cannot be read, where the harness found one."""
    status = _STATUS.match(reason)
    lines = [_GUTTER.sub("", line) for line in reason[status.end() if status else 0 :].splitlines()]
    sources = [line for line in lines if line.startswith("source: ")]
    words = [line.strip() for line in lines if line.strip() and not _FRAME.match(line) and line not in sources]
    telling = [_LOGGER.sub("", line) or line for line in words if _MESSAGE.match(line)] or words
    solid = [line for line in telling if not _HOLLOW.match(line)]
    own = (solid or telling or [""])[-1]
    if telling and telling[-1] != own:
        # By its name alone: the rest of it is a command or a list of stages.
        name = re.match(r"(?:\w+\.)*(\w+(?:Error|Failure|Group|Pool))\b", telling[-1])
        own += f" ({name[1]})" if name and name[1] not in own else ""
    if not own and status:
        own = f"exit status {status[1]}, without a word"
    parts = [
        _cut(part, most)
        for part, most in ((own, MOST_OWN if sources else MOST_LETTERS), (" ".join(sources), MOST_LETTERS))
        if part
    ]
    return _cut("; ".join(parts).replace("|", "/"), MOST_LETTERS)


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
