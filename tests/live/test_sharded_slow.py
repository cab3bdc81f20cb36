"""Ranks of a sharded trainer are killed at random moments, while others read what they publish."""

import random

import pytest

from tests.live import trainers
from tests.live.processes import PeerError
from tests.live.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIVES = 8


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_no_version_is_torn_whichever_rank_dies(peer, run_dir, tmp_path, gather):
    chance = random.Random(7)
    reader = peer()
    seconds = LIVES * 5.0
    reader.start(trainers.read_constants, run_dir, seconds)
    for life in range(LIVES):
        ranks = World(2, tmp_path / f"store{life}")
        try:
            ranks(trainers.build, "fsdp2", width=301)
            ranks(trainers.connect, run_dir, gather=gather)
            for one in ranks.peers:
                one.start(trainers.publish_constants, 20)
            dead = chance.randrange(2)
            trainers.time.sleep(chance.uniform(0.05, 1.0))
            ranks.peers[dead].kill()
            with pytest.raises(PeerError, match=f"rank {dead}|closed|reset"):
                ranks.peers[1 - dead].result(25)
        finally:
            ranks.dispose()
        if reader.answered():
            break
    versions, torn = reader.result(seconds + 10)
    assert not torn
    assert versions > LIVES
