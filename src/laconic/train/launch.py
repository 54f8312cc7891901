from laconic.train.stop import StopRequest
from laconic.train.world import join_world, read_environment
from laconic.train.run import run
import os
def launch(config):
    place = read_environment(os.environ)
    world = join_world(place, config.rank_timeout_seconds)
    try:
        return run(config, world, StopRequest())
    finally:
        world.leave()
