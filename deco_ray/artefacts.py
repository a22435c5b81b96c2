"""Artefacts under digests: what a stage produced from exactly these inputs, written atomically.

    <storage>/<cohort>/<kind>/<digest>/         a finished artefact; artefact.json is its record
    <storage>/<cohort>/work/<kind>-<digest>/    state of an unfinished stage (checkpoints), survives kills

A finished artefact is never written again; a changed input changes the digest and so the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deco_ray.errors import DecoError

RECORD = "artefact.json"
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
ABANDONED_S = 24 * 3600.0  # nothing here takes a day without writing
DIGEST_LENGTH = 16  # hex digits: 64 bits, ample for the artefacts of one lab


def digest(inputs: Any) -> str:
    """Digest of anything JSON can hold; key order does not matter."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> str:
    """Put what was written to the file on the disk; returns its checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: str | Path) -> bytes:
    """A file of an artefact, a ValueError if it is no longer what was written; one without a record is as it is."""
    path = Path(path)
    content = path.read_bytes()
    record = read_record(path.parent) if (path.parent / RECORD).is_file() else {}
    written = record.get("files", {}).get(path.name)
    if written and written != hashlib.sha256(content).hexdigest():
        raise ValueError("it is not what was written there")
    return content


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished artefact: its inputs, the checksums of its files, facts about its making."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
        if not (isinstance(record["inputs"], dict) and isinstance(record.get("files", {}), dict)):
            raise TypeError("it is no record of an artefact")
    except (ValueError, KeyError, TypeError) as error:
        raise DecoError(f"{path} is damaged: {error}; remove {folder} to make it again") from error
    return record


def temporary_beside(path: Path) -> Path:
    """A new name beside the path that says whose it is, so that what a killed process left can be told and removed."""
    return path.with_name(f".{path.name}.{owner()}.tmp")


def owner() -> str:
    """Host, process and a random part."""
    return f"{platform.node() or 'host'}~{os.getpid()}~{uuid.uuid4().hex[:8]}"


def is_abandoned(path: Path) -> bool:
    """Whether its maker is gone: a dead process of this host, or anyone who has not touched it for a day."""
    host, _, process = path.name.removesuffix(".tmp").rpartition("~")[0].rpartition("~")
    try:
        if host.endswith(platform.node()) and process.isdigit():
            os.kill(int(process), 0)  # asks only whether it exists
        return time.time() - path.stat().st_mtime > ABANDONED_S
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, or removed meanwhile
        return False


@dataclass(frozen=True)
class ArtefactStore:
    """The artefacts of one cohort below a storage root that all nodes share."""

    root: Path

    def path(self, kind: str, key: str) -> Path:
        return self.root / kind / key

    def exists(self, kind: str, key: str) -> bool:
        return (self.path(kind, key) / RECORD).is_file()

    def is_whole(self, kind: str, key: str) -> bool:
        """Whether the artefact exists with every file that was written."""
        return self.exists(kind, key) and all(
            (self.path(kind, key) / name).is_file() for name in self.record(kind, key).get("files", {})
        )

    def record(self, kind: str, key: str) -> dict[str, Any]:
        return read_record(self.path(kind, key))

    def work(self, kind: str, key: str) -> Path:
        """The folder for resumable state of an unfinished stage."""
        path = self.root / "work" / f"{kind}-{key}"
        with self.explaining():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def sweep(self) -> None:
        """Remove what killed processes left half-written; resumable state stays."""
        for pattern in (".*.tmp", "*/.*.tmp", "work/*/.*.tmp", "work/tune-*"):
            for path in filter(is_abandoned, self.root.glob(pattern)):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, kind: str, key: str, inputs: Any, **facts: Any) -> Iterator[Path]:
        """A temporary folder that becomes the artefact when the block ends without an error."""
        final = self.path(kind, key)
        temporary = temporary_beside(final)
        started = time.time()
        try:
            with self.explaining():
                temporary.mkdir(parents=True)
                yield temporary
                record = {"kind": kind, "digest": key, "inputs": inputs, "seconds": time.time() - started, **facts}
                # a record on disk vouches for all that lies beside it
                written = sorted(path for path in temporary.rglob("*") if path.is_file())
                record["files"] = {path.relative_to(temporary).as_posix(): flush(path) for path in written}
                write_atomically(temporary / RECORD, json.dumps(record, indent=1, sort_keys=True))
                try:
                    os.rename(temporary, final)
                except OSError:
                    # another process finished the same pure function first: its result is ours too
                    if not self.exists(kind, key):
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self.root / "work" / f"{kind}-{key}", ignore_errors=True)

    @contextlib.contextmanager
    def unless_made(self, kind: str, key: str) -> Iterator[None]:
        """An error in the block passes only while there is no artefact.

        Another process that makes the same artefact at the same time clears the work away when it has finished.
        """
        try:
            yield
        except Exception:
            if not self.exists(kind, key):
                raise

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """A store that cannot be written to is the user's to mend; an error about a file elsewhere passes."""
        try:
            yield
        except OSError as error:
            named, root = str(error.filename or self.root), str(self.root)
            ours = named.startswith(root) or root.startswith(named)  # the store, or a parent it could not be made in
            if error.errno not in UNWRITABLE or not ours:
                raise
            raise DecoError(
                f"cannot write to {self.root}: {error.strerror}; make room there or set `storage` to a writable folder"
            ) from error
