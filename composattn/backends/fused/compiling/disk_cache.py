"""The folder of compiled kernels: who may own it, and a check that what comes out of it is what was put in.

    <folder>/<key>/kernel-<sum>.so     an entry: `key` names what it was made from, `sum` is of its own bytes
    <folder>/.writing/                 files on their way in; what a killed process left there goes after an hour

Entries are machine code that runs as it lies. So a folder is not used where others can write to it, or where they can
put another in its place: by a link of theirs on the way, or in a folder above it. An entry is not used where others
could have written it. Checksums find damage, no more: who can write an entry can name it by its sum. A file's time is
that of its latest use. Nothing goes by itself, as a kernel of last month may be asked for again; `composattn cache
--unused DAYS` removes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "COMPOSATTN_CACHE_DIR"
_WRITING = ".writing"
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LEFT_BEHIND = 3600.0  # seconds after which no writer can be at it any more


def folder() -> Path:
    """Where kernels are kept: COMPOSATTN_CACHE_DIR, by default ~/.cache/composattn.

    A user without a home, as containers have them, gets a folder of the user's number among the temporary files.
    """
    asked = os.environ.get(VARIABLE) or "~/.cache/composattn"
    first, _, rest = asked.partition(os.sep)
    if first != "~":
        return Path(os.path.expanduser(asked)).absolute()
    home = _home()
    return Path(tempfile.gettempdir()) / f"composattn-{os.getuid()}" if home is None else home / rest


def _home() -> Path | None:
    told = os.environ.get("HOME")
    if told:
        return Path(told)
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def usable() -> Path:
    """`folder()`, made for its user alone if it was not there.

    Where it can't be made, or others could write into it, one of this process, with a warning.
    """
    path = folder()
    why = unusable(path)
    if why is None:
        return path
    _warn_unkept(path, why)
    return of_process()


def unusable(path: Path) -> str | None:
    """Why kernels are not kept in `path`, which is made for its user alone if it was not there; None where they are."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _distrusted(path.stat()) or _replaceable(path)
    except OSError as error:
        return f"it can't be made ({error})"


def _distrusted(facts: os.stat_result) -> str | None:
    if not stat.S_ISDIR(facts.st_mode):
        return "it is no folder"
    if facts.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {facts.st_uid}, who could put machine code there that runs as you"
    if facts.st_mode & _OF_OTHERS:
        return (
            "others can write to it, and could put machine code there that runs as you (chmod go-w, or empty it first)"
        )
    return None


def _replaceable(path: Path) -> str | None:
    """Who could put another folder in its place: by what links on the way lead through, or in a folder above.

    In a folder with the sticky bit (/tmp) only its owner moves an entry. A group that may write above is the owner's
    choice.
    """
    known = (os.getuid(), 0, _nobody())
    for part in (path, *path.parents):
        if part.is_symlink() and part.lstat().st_uid not in known:
            return f"{part} is a link of user {part.lstat().st_uid}, who could lead it elsewhere"
    for above in (*path.parents, *path.resolve().parents):
        facts = above.stat()
        if facts.st_uid not in known:
            return f"{above} belongs to user {facts.st_uid}, who could put another folder in its place"
        if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
            return f"everyone can write to {above}, and could put another folder in its place"
    return None


@functools.cache
def _nobody() -> int:
    """Who owns, inside of a container, what belongs to users that it does not know: its host's root, say."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def _warn_unkept(path: Path, why: str) -> None:
    warnings.warn(f"compiled kernels are not kept: {path}: {why}; set {VARIABLE} to a folder of your own", stacklevel=4)


@functools.cache
def of_process() -> Path:
    """A folder that goes with this process."""
    made = tempfile.mkdtemp(prefix="composattn-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def get(folder: Path, key: str, suffix: str) -> Path | None:
    """The file kept under `key`, or None. One that is not what was written is removed, with a warning.

    One that others could have written, or that can't be read, stays where it is, unused, with a warning.
    """
    place = folder / key
    for path in sorted(place.glob(f"kernel-*{suffix}")):
        try:
            why = _written_by_others(place) or _written_by_others(path)
            damaged = why is None and path.name != _name(path.read_bytes(), suffix)
        except OSError as error:  # of another's, or gone: another process removes what is unused
            why, damaged = f"{path} can't be read ({error})", False
        if why is None and not damaged:
            with contextlib.suppress(OSError):  # another's file that may only be read
                os.utime(path)
            return path
        warnings.warn(f"compiling again: {why or f'{path} is damaged (its checksum differs)'}", stacklevel=3)
        if damaged:
            drop(path)
    return None


def _written_by_others(path: Path) -> str | None:
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        return f"{path} is a link"
    if facts.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to user {facts.st_uid}"
    if facts.st_mode & _OF_OTHERS:
        return f"others can write to {path}"
    return None


def put(folder: Path, key: str, suffix: str, content: bytes) -> Path:
    """Keeps `content` under `key`; other processes see the whole file or none. Where that fails, in `of_process()`."""
    try:
        return _put(folder, key, suffix, content)
    except OSError as unwritable:
        _warn_unkept(folder, f"it can't be written ({unwritable})")
        return _put(of_process(), key, suffix, content)


def _put(folder: Path, key: str, suffix: str, content: bytes) -> Path:
    kept = folder / key / _name(content, suffix)
    with writing(folder) as aside:
        made = aside / kept.name
        made.write_bytes(content)
        made.chmod(stat.S_IMODE(made.stat().st_mode) & ~_OF_OTHERS)  # whatever the umask is
        if os.path.lexists(kept.parent) and _written_by_others(kept.parent) is not None:
            os.replace(kept.parent, aside / "of others")  # `get` would use nothing in it, in this process or later ones
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(made, kept)
    return kept


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A place for files on their way into `folder`; what killed processes left goes by the way."""
    place = folder / _WRITING
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in place.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=place) as made:
        yield Path(made)


def drop(path: Path) -> None:
    """Removes an entry, where that is allowed."""
    with contextlib.suppress(OSError):
        path.unlink()


def entries(folder: Path) -> dict[Path, tuple[int, float]]:
    """The kernels in `folder`, those compiled offline too: bytes, and seconds since the latest use."""
    found, now = {}, time.time()
    for place in (folder, folder / "offline"):
        for entry in place.iterdir() if place.is_dir() else ():
            files = [f.stat() for f in entry.glob("kernel-*")] if _KEY.fullmatch(entry.name) else []
            if files:
                found[entry] = sum(f.st_size for f in files), now - max(f.st_mtime for f in files)
    return found


def remove(entry: Path) -> None:
    """Removes a kernel. A process that runs it keeps it; one that would load it compiles again."""
    for path in entry.glob("kernel-*"):
        drop(path)
    with contextlib.suppress(OSError):  # something else lies there, or it is gone
        entry.rmdir()


_KEY = re.compile("[0-9a-f]{32}")


def _name(content: bytes, suffix: str) -> str:
    return f"kernel-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
