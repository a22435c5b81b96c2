"""Credentials never leave the process: they are struck out of URIs, texts and settings before anything is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

STRUCK = "***"

# Every repetition is bounded or starts at a fixed text: a long value must not take quadratic time.
# s3://KEY:SECRET@bucket, http://user:password@host; the path is kept, whoever reads it needs it
_USERINFO = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
_NAMES = r"pass(?:word|wd|phrase)|pwd|secret|token|api[_-]?key|access[_-]?key|credentials?|authorization|signature"
# ?token=…&sig=…, X-Amz-Signature=…; "password": "…" and token: … in messages
_ASSIGNED = re.compile(
    rf"(?P<name>(?:(?:{_NAMES})[\w-]{{0,30}}|\bsig)['\"]?\s{{0,2}}[=:]\s{{0,2}}['\"]?)"
    r"(?:(?:Bearer|Basic)\s+)?[^\s&;,'\"}]+",
    re.I,
)
_BEARER = re.compile(r"\b(?P<name>Bearer|Basic)\s+[\w.~+/=-]{8,}")
_SECRET_KEY = re.compile(_NAMES, re.I)


def redact(text: str) -> str:
    """The text without passwords in URIs, secret query values and authorisation headers."""
    text = _USERINFO.sub(f"{STRUCK}@", text)
    text = _ASSIGNED.sub(rf"\g<name>{STRUCK}", text)
    return _BEARER.sub(rf"\g<name> {STRUCK}", text)


def redact_tree(value: Any, key: str = "") -> Any:
    """A copy of nested settings; a text under a secret's name goes as a whole, every other text through `redact`."""
    if isinstance(value, Mapping):
        return {name: redact_tree(child, str(name)) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(child, key) for child in value]
    if not isinstance(value, str):
        return value  # numbers under such names are sizes (`n_tokens`), not secrets
    return STRUCK if value and _SECRET_KEY.search(key) else redact(value)
