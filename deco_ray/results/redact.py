"""Credentials never leave the process: they are struck out of URIs, texts and settings before anything is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

STRUCK = "***"

# Every repetition is bounded or starts at a fixed text: a long value must not take quadratic time.
# A URI ends at white space or at the quote that closes it: one inside a password has more of it behind.
_WORD = re.compile(r"(?:[^\s'\"]+|['\"](?![\s,;:)\]}>]|$))+")
# s3://KEY:SECRET@bucket, as much of it as stands before the last @: a secret may itself hold /, ?, # or @
_USER_PASSWORD = re.compile(r"(?<=://)[^/?#:]*:.*")
# http://user@host; an @ of the path (s3://bucket/cohort@v2) is kept, whoever reads it needs it
_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
_KEYS = r"(?:api|access|account|private)[_-]?key"
_NAMES = rf"pass(?:word|wd|phrase)|pwd|secret|token|{_KEYS}|credentials?|authorization|signature"
# ?token=…&sig=…, ?key=…, X-Amz-Signature=…; "password": "…" and token: … in messages
_ASSIGNED = re.compile(
    rf"(?P<name>(?:(?:{_NAMES})[\w-]{{0,30}}|\bsig|(?<=[?&])key)['\"]?\s{{0,2}}[=:]\s{{0,2}}['\"]?)"
    r"(?:(?:Bearer|Basic)\s+)?[^\s&;,'\"}]+",
    re.I,
)
_BEARER = re.compile(r"\b(?P<name>Bearer|Basic)\s+[\w.~+/=-]{8,}")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)", re.S)
_SECRET_KEY = re.compile(_NAMES, re.I)


def redact(text: str) -> str:
    """The text without passwords in URIs, secret query values, private keys and authorisation headers."""
    text = _WORD.sub(_without_password, text)
    text = _USER.sub(f"{STRUCK}@", text)
    text = _PEM.sub(STRUCK, text)
    text = _ASSIGNED.sub(rf"\g<name>{STRUCK}", text)
    return _BEARER.sub(rf"\g<name> {STRUCK}", text)


def _without_password(word: re.Match[str]) -> str:
    before, at, after = word[0].rpartition("@")
    return _USER_PASSWORD.sub(STRUCK, before) + at + after


def redact_tree(value: Any, key: str = "") -> Any:
    """A copy of nested settings; a text under a secret's name goes as a whole, every other text through `redact`."""
    if isinstance(value, Mapping):
        return {name: redact_tree(child, str(name)) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(child, key) for child in value]
    if not isinstance(value, str):
        return value  # numbers under such names are sizes (`n_tokens`), not secrets
    return STRUCK if value and _SECRET_KEY.search(key) else redact(value)
