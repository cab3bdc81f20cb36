"""Whatever becomes of a benchmark, its processes end and its folders go.

The janitor is a small process of its own that waits until the benchmark lets go of it, on purpose
or because it was killed, and then ends what it was told of and removes the folders. It is the only
place where that is done, so that it is done alike in all cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

# In a string, because it imports nothing of ours: it starts within milliseconds.
_JANITOR = """
import os, shutil, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
folders = sys.argv[1:]
processes = [int(line) for line in sys.stdin]
for process in processes:
    try:
        os.kill(process, signal.SIGKILL)
    except OSError:
        pass
until = time.monotonic() + 10
while time.monotonic() < until:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    gone = not any(os.path.exists(f"/proc/{process}/fd/0") for process in processes)
    if gone and not any(map(os.path.exists, folders)):
        break
    time.sleep(0.02)
"""

PREFIX = "weightsync-bench-"


class Janitor:
    """Ends processes and removes folders when it is closed, or when this process ends.

    Args:
        folders: made already; of the benchmark's own.
    """

    def __init__(self, folders: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _JANITOR, *folders],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, process: int) -> None:
        """End that process, too."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{process}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(20)


@contextmanager
def own_folders(
    shared: str, disk: str, named: Sequence[str] = ()
) -> Iterator[tuple[Janitor, str, str]]:
    """A folder of this turn's own in each of two places, and who looks after them.

    Args:
        named: more folders, to be made and removed like these.

    Raises:
        FileExistsError: one of ``named`` is there already. It stays as it is.
    """
    prefix = f"{PREFIX}{os.getpid()}-"
    folders = [tempfile.mkdtemp(prefix=prefix, dir=place) for place in (shared, disk)]
    try:
        for folder in named:
            os.mkdir(folder, 0o700)
            folders.append(folder)
    except OSError:
        Janitor(folders).close()
        raise
    janitor = Janitor(folders)
    try:
        yield janitor, folders[0], folders[1]
    finally:
        janitor.close()
