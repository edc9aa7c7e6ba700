# SPDX-License-Identifier: Apache-2.0
"""Puts a finished export into a model repository, all of it or none. Knows nothing of how the files were made."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path

from ensemble.artifacts import CURRENT, FOLDER, LINKS, MANIFEST, sha256_of
from ensemble.errors import ExportError

STAGING = ".staging"


@contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """A folder to make the files in; installed if the block ends well, gone if it does not.

    The caller has read the repository's configs. Held by one export at a time; what a killed export left behind is
    cleared away by the next.
    """
    artifacts = repository / FOLDER
    with ExitStack() as stack:
        with _writing_to(artifacts):
            artifacts.mkdir(exist_ok=True)
            lock = stack.enter_context((artifacts / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExportError(f"another export into {repository} is running: wait for it") from None
            for leftover in artifacts.glob(f"{STAGING}*"):
                leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
            folder = artifacts / f"{STAGING}-{os.getpid()}"
            folder.mkdir()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with _writing_to(artifacts):
            yield folder
            _install(repository, folder)


@contextmanager
def _writing_to(artifacts: Path) -> Iterator[None]:
    """Tell a full disk or a read-only folder in one line. What is no matter of files passes."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write to {artifacts} ({error.strerror or error}): nothing was installed") from error


def _install(repository: Path, folder: Path) -> None:
    """Move the staged files into place; the last step, one rename, makes them the current ones."""
    artifacts = folder.parent
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    final = artifacts / f"{stamp}-{sha256_of(folder / MANIFEST)[:8]}"
    folder.rename(final)
    for place, name in LINKS.items():
        link = repository / place
        if not (final / name).exists():
            link.unlink(missing_ok=True)  # an export without an engine leaves no link to an older one's
        elif not link.is_symlink():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(artifacts / CURRENT / name, link.parent))
    pointer = artifacts / f"{STAGING}-{CURRENT}"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(final.name)
    pointer.replace(artifacts / CURRENT)
    for other in artifacts.iterdir():
        if other.is_dir() and not other.is_symlink() and other != final:
            shutil.rmtree(other, ignore_errors=True)
