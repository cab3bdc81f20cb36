"""``python -m tools.compat``: check releases of vLLM, and run tests on those that run here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.compat import trial
from tools.compat.check import check, unimplemented
from tools.compat.sources import Sources
from tools.compat.wheels import RELEASES, wheel

HERE = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.compat", description=__doc__)
    parser.add_argument("releases", nargs="*", default=list(RELEASES), metavar="release")
    parser.add_argument("--run", nargs="*", metavar="release", help="also run tests on these")
    arguments = parser.parse_args()
    broken = [release for release in arguments.releases if not whole(release)]
    broken += [release for release in arguments.run or () if not trial.run(release)]
    if broken:
        print(f"weightsync does not work with vLLM {', '.join(dict.fromkeys(broken))}")
    return bool(broken)


def whole(release: str) -> bool:
    """Whether a release has what it must have; says what it has not."""
    sources = Sources.of_wheel(wheel(release))
    findings = check(sources, release)
    findings += unimplemented(sources, Sources.of_folder(HERE, "weightsync"))
    breaks = [finding for finding in findings if finding.breaks]
    print(f"vLLM {release}: {'something is missing' if breaks else 'all there'}", flush=True)
    for finding in findings:
        print(f"  {'MISSING' if finding.breaks else 'without'} {finding}")
    return not breaks


if __name__ == "__main__":
    sys.exit(main())
