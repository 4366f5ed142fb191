"""Files that are whole, safe on disk and written by one process at a time; and one line for what the operating system refuses."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock(descriptor: int) -> bool:
    """Take the open file for as long as `descriptor` is open; False if it is taken, by a process or a thread of this one.

    The lock dies with the process, however it dies; a program that the process starts does not inherit it, a fork shares it.
    Edge cases: where there are no such locks (Windows, some network file systems) it is True, and nothing is held.
    """
    try:
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line which file the operating system refused, and what to do; errno stays what it was."""
    try:
        yield
    except OSError as error:
        refused = OSError(
            f"{path} could not be written ({error.strerror or error}): what a run must keep has to be safe on disk before the run goes on. "
            "Free space or give access there and repeat the command; a run that was begun continues with --resume."
        )
        refused.errno = error.errno
        raise refused from error


def write_atomically(path: Path, payload: bytes | str, *, mode: int = 0o644) -> None:
    """Write beside `path`, fsync, rename over it, fsync the folder: a crash leaves the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            _write(temporary, os.O_TRUNC, payload, mode, durable=True)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write behind what is there.  durable: fsync it, and the folder; a crash or a full disk may leave a last line without its end."""
    with writing(path):
        _write(path, os.O_APPEND, text, mode, durable=durable)
        if durable:
            sync_folder(path.parent)


def cache_folder() -> Path:
    """What can be computed again and is kept for later processes: fiberdp/ in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fiberdp"


def make_folder(path: Path) -> None:
    """Make `path`, and its parents, if they are not there; durably, or a power cut would take all that is in it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with writing(path):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove what a killed process left of `write_atomically`."""
    for left in folder.rglob(".*.tmp"):
        with writing(left):
            left.unlink()


def sync_folder(folder: Path) -> None:
    """Make the entry of a new file durable: fsync of the file alone does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, flags: int, payload: bytes | str, mode: int, *, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    try:
        rest = memoryview(payload.encode() if isinstance(payload, str) else payload)
        while rest:  # one call writes 2 GiB at most, and less on a disk that is about to be full
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
