"""Objects as files of a local (or NFS) directory.

An object appears whole or not at all, and survives a power cut once the call returned: its bytes are written to a
temporary file, fsynced, and then linked (`create`) or renamed (`put`) to their name, whose directory is fsynced too.
`link(2)` fails when the name exists, so exactly one of several creators wins; fsspec's own local create checks first
and writes afterwards, which lets two creators win. Temporary files live in a directory of their own that no listing
shows; what a killed process left there is removed a day later.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Keys: TypeAlias = list[str]
Entries: TypeAlias = list[os.DirEntry[str]]
Listing: TypeAlias = list[tuple[str, int, float]]

INCOMING = ".incoming"
ABANDONED_AFTER_SECONDS = 24 * 3600.0
_PREPARE_TRIES = 5


class LocalObjects:
    """Raises the OSError of the operating system; `storage.objects` gives it its type."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the root directory and remove temporary files that a killed process left behind."""
        _make_directory(self.root / INCOMING)
        oldest = time.time() - ABANDONED_AFTER_SECONDS
        for path in (self.root / INCOMING).iterdir():
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue  # its writer finished, or another opener removed it first

    def create(self, key: str, data: bytes) -> bool:
        with self._temporary() as temporary:
            _write_durably(temporary, data)
            try:
                self._place(key, lambda target: os.link(temporary, target))
            except FileExistsError:
                return False
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._temporary() as temporary:
            _write_durably(temporary, data)
            self._place(key, lambda target: os.replace(temporary, target))

    def upload_file(self, local: Path, key: str) -> None:
        with self._temporary() as temporary:
            shutil.copyfile(local, temporary)
            _fsync(temporary)
            self._place(key, lambda target: os.replace(temporary, target))

    def download_file(self, key: str, local: Path) -> None:
        shutil.copyfile(self.root / key, local)

    def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with open(self.root / key, "rb") as file:
            file.seek(start)
            return file.read(length)

    def get_tail(self, key: str, length: int) -> bytes:
        with open(self.root / key, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - length))
            return file.read()

    def size(self, key: str) -> int | None:
        try:
            path = self.root / key
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str, recursive: bool) -> Keys:
        directory, _, name = prefix.rpartition("/")
        if recursive:
            return [key for key in self._walk(directory) if key.startswith(prefix)]
        files = [entry.name for entry in self._scan(directory) if entry.is_file()]
        return [_join(directory, file) for file in files if file.startswith(name)]

    def entries(self, prefix: str) -> Listing:
        """What lies under a prefix now; a file that vanishes meanwhile is left out."""
        found = []
        for key in self._walk(prefix.rstrip("/")):
            try:
                status = (self.root / key).stat()
            except FileNotFoundError:
                continue  # deleted between listing and looking
            found.append((key, status.st_size, status.st_mtime))
        return found

    def directories(self, prefix: str) -> Keys:
        directory = prefix.rstrip("/")
        return [_join(directory, entry.name) + "/" for entry in self._scan(directory) if entry.is_dir()]

    def delete(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        """Delete what lies under a prefix, and the directories that are empty then."""
        for directory, _, files in os.walk(self.root / prefix, topdown=False):
            for file in files:
                Path(directory, file).unlink(missing_ok=True)
            try:
                os.rmdir(directory)
            except OSError:
                if os.path.isdir(directory) and not os.listdir(directory):
                    raise  # empty and still not removable; a directory that gained a file meanwhile is kept

    def _place(self, key: str, move: Callable[[Path], None]) -> None:
        target = self.root / key
        for last_try in (False,) * (_PREPARE_TRIES - 1) + (True,):
            _make_directory(target.parent)
            try:
                move(target)
                break
            except FileNotFoundError:
                if last_try:  # otherwise: a deletion removed the directory between making and using it
                    raise
        _fsync(target.parent)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        path = self.root / INCOMING / secrets.token_hex(16)
        _make_directory(path.parent)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _scan(self, directory: str) -> Entries:
        try:
            with os.scandir(self.root / directory) as entries:
                return [entry for entry in entries if entry.name != INCOMING]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _walk(self, directory: str) -> Iterator[str]:
        for entry in self._scan(directory):
            key = _join(directory, entry.name)
            if entry.is_dir():
                yield from self._walk(key)
            else:
                yield key


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    """Like `mkdir -p`, with the entry of every new directory made durable in its parent."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    _fsync(path.parent)
