"""The processes that train: the trainer, with each way out of it, and the followers."""

import signal

import redis

from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.base.failure import Failure, FailureKind, RoleEnd
from stagecoach.shared.base.process import keep_freed_memory
from stagecoach.shared.runtime.launch import RoleLaunch, shutdown_on_signal
from stagecoach.shared.runtime.restarts import RestartBound, learning_progress
from stagecoach.trainer_node.distributed.follower import Follower
from stagecoach.trainer_node.distributed.leader import rank_id
from stagecoach.trainer_node.distributed.process_group import GroupBroken
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer


def run(given: bytes, name: str) -> str:
    """Runs an encoded `RoleLaunch` as `trainer`, or as another rank, such as `rank-1`: see `run_rank`."""
    return run_rank(RoleLaunch.decoded(given), int(name.partition("-")[2] or 0))


def run_rank(launch: RoleLaunch, rank: int = 0, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> str:
    """Runs the trainer (rank 0) until the run ends, or another rank until the trainer has finished; returns the reason,
    or `preempted`. If the group of ranks breaks, the next incarnation resumes here, if there is progress."""
    keep_freed_memory()
    if rank:
        follower = Follower(launch.open(rank_id(rank)), rank)
        with shutdown_on_signal(follower.request_shutdown, numbers=signals):
            return follower.run()
    role = launch.open("trainer")
    bound = RestartBound(role.config.rollout.restarts_allowed)
    bound.record_progress(learning_progress(role.redis, role.run_id))
    incarnation = Incarnation(role, launch.run_folder)
    with shutdown_on_signal(lambda: incarnation.request_shutdown(), role.config.trainer.grace_seconds, signals):
        while not incarnation.shutdown_requested:
            try:
                return run_trainer(incarnation)
            except GroupBroken as error:
                bound.record_progress(learning_progress(role.redis, role.run_id))
                if bound.ended():
                    incarnation.fail(error)
                    raise
                leaving = incarnation.shutdown_requested
                incarnation = Incarnation(role, launch.run_folder)
                incarnation.shutdown_requested |= leaving
    return RoleEnd.PREEMPTED


def run_trainer(incarnation: Incarnation, kind: type[Trainer] = Trainer) -> str:
    """One incarnation, from its start until the run is to end or it leaves; reports each way out."""
    incarnation.role.check_config()  # a role that was started wrongly must not end the run as failed
    try:
        with incarnation.stages.during("start"):
            trainer = kind.start(incarnation)
        return trainer.run()
    except KeyboardInterrupt:  # asked twice, or its grace is over: the log has what is not durable
        return incarnation.preempted("at once")
    except Fenced as error:
        incarnation.fenced(error)
        raise
    except GroupBroken as error:  # what the ranks were about to learn is in the log
        incarnation.closing.close()
        incarnation.preempted(f"with its broken group of ranks ({error})")
        raise
    except Exception as error:
        if isinstance(error, redis.RedisError) and incarnation.shutdown_requested:
            return incarnation.preempted(f"while Redis is away ({error})")  # the next trainer waits for it, too
        if (failure := Failure.of(error)).kind is FailureKind.RESOURCES:  # neither the run nor its data is to blame
            incarnation.preempted(f"for lack of memory or files ({failure})")
        else:
            incarnation.fail(error)
        raise
