"""Runs tests on another vLLM release, in an environment that borrows everything else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tools.compat.wheels import cache, wheel

TESTS = ("tests/vllm/test_llm.py", "-m", "not slow", "-q", "--timeout", "600")


def environment(release: str) -> Path:
    """The Python of an environment with this release; made if it is not there.

    Everything but vLLM is that of the environment this runs in, so that it costs the room of one
    wheel: a release that was built for another torch does not run in it.
    """
    folder = cache() / f"vllm-{release}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=False, clear=True, symlinks=True)
        own = next(folder.glob("lib/python*/site-packages"))
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(own), str(wheel(release))], check=True)
        # Behind its own packages, so that its vLLM comes first.
        borrowed = sysconfig.get_path("purelib")
        (own / "zz_borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
        ready.touch()
    return python


def run(release: str, tests: tuple[str, ...] = TESTS) -> bool:
    """Whether the tests pass on a release; their output is shown."""
    python = environment(release)
    done = subprocess.run([str(python), "-m", "pytest", *tests], timeout=1800)
    return done.returncode == 0
