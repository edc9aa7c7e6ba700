# SPDX-License-Identifier: Apache-2.0
"""A server's temporary folder, its part of /dev/shm, and how both are cleared away, by the next start if need be.

The folder is locked for as long as a process of its server lives: the lock is handed down to them. So what a launcher
that was killed left behind can be told from what another one uses.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ensemble.launcher.stubs import end_orphans

# Where Linux keeps POSIX shared memory; the Python backend's regions are files there.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108

# The link to the repository in the folder.
REPOSITORY = "repository"

_NAME = "onepass-server-"


class WorkingFolder:
    """A temporary folder with a link to the repository in it.

    The server starts its stubs through a shell and does not quote their arguments: a repository in "My Projects" would
    never be ready. So it is handed a path of plain characters.
    """

    def __init__(self, repository: Path) -> None:
        """Raises OSError."""
        root = tempfile.gettempdir()
        root = root if re.fullmatch(r"[\w./+-]+", root) else "/tmp"  # noqa: S108
        self.root = Path(root)
        self.clear_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=_NAME, dir=root))
        #: Open in this process; a child that gets it holds the lock as well.
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.repository = self.path / REPOSITORY
        try:
            # After the lock: a folder without the link is nobody's leftover yet.
            self.repository.symlink_to(repository.resolve())
        except OSError:
            self.remove()
            raise

    @property
    def shm_prefix(self) -> str:
        """What the names of the server's regions in /dev/shm begin with, and nobody else's."""
        return _shm_prefix(self.path)

    def clear_leftovers(self) -> None:
        """Clear away the folders of this user's servers of which no process lives any more."""
        for path in self.root.glob(f"{_NAME}*"):
            with suppress(OSError):  # another user's, or another launcher was faster
                if (path / REPOSITORY).is_symlink() and path.stat().st_uid == os.getuid():
                    end_orphans(path / REPOSITORY)
                    _clear_unless_locked(path)

    def remove(self) -> None:
        """The folder and the regions. The server's processes have ended."""
        with suppress(OSError):
            os.close(self.lock)
        _clear(self.path)


def _clear_unless_locked(path: Path) -> None:
    """Raises OSError if a process of its server lives."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _clear(path)
    finally:
        os.close(lock)


def _clear(path: Path) -> None:
    for region in SHARED_MEMORY.glob(f"{_shm_prefix(path)}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _shm_prefix(path: Path) -> str:
    return f"{path.name.replace('-', '_')}_"
