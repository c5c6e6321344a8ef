"""A league's learners, shares and players against the run's policies."""

from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.league import MEAN_RETURN, LeagueConfig, LearnerConfig
from stagecoach.shared.config.sections import ConfigFields
from stagecoach.shared.league.table import SNAPSHOT


def check_league(run: ConfigFields, league: LeagueConfig) -> None:
    """Raises `ValueError` at the first contradiction between `run.league` and the policies."""
    if run.environment.api == "gymnasium":
        raise ValueError(
            f"league with environment.api={run.environment.api}: it needs several agents; set "
            f"environment.api, or leave the league out"
        )
    learners, known = run.league_learners, sorted(run.policies)
    for name, learner in learners.items():
        for field, policy_id in (("policy", learner.policy), *(("plays", seat) for seat in learner.plays)):
            if policy_id not in run.policies:
                raise ValueError(f"league.learners.{name}.{field}={policy_id!r} names no policy; policies has {known}")
        if not run.policies[learner.policy].trainable:
            raise ValueError(
                f"league.learners.{name}.policy={learner.policy!r} is frozen (policies.{learner.policy}.trainable="
                f"false) and cannot learn; set that to true, or take it from league.learners"
            )
        alone = len(run.policies) == 1 or {*run.agents.values()} == {learner.policy}
        if alone and learner.reset is not None and learner.reset.win_rate is not None:
            raise ValueError(
                f"league.learners.{name}.reset.win_rate counts matches against the current weights of others, and all "
                f"agents have its own policy {learner.policy!r}; use reset.or_after"
            )
        _check_meets(run, league, name, learner, alone)
    if not learners:
        raise ValueError("league: no policy is trainable, so nothing would be learned; make one trainable")
    taught = {learner.policy for learner in learners.values()}
    if run.checkpoint.best_by == MEAN_RETURN and not (league.fixed and run.evaluation.episodes):
        raise ValueError(
            f"checkpoint.best_by={MEAN_RETURN} in a league is measured against its fixed players, with league.fixed="
            f"{sorted(league.fixed)} and evaluation.episodes={run.evaluation.episodes}; give both, or leave best_by out"
        )
    if run.checkpoint.best_by not in ("all", MEAN_RETURN, *taught):
        raise ValueError(
            f"checkpoint.best_by: {run.checkpoint.best_by!r} is no learner's policy, and so has no rating; the "
            f"learners' are {', '.join(sorted(taught))}"
        )
    if left_out := sorted(name for name, its in run.policies.items() if its.trainable and name not in taught):
        raise ValueError(
            f"league.learners has {', '.join(learners)}, and so policies.{left_out[0]} would not learn: name it in "
            f"league.learners too, or set policies.{left_out[0]}.trainable=false"
        )
    if league.swap_every is not None and len(learners) < 2:
        raise ValueError(
            f"league.swap_every={str(league.swap_every)!r} with one learner, {next(iter(learners))!r}, "
            f"would change nothing; leave it out"
        )
    if league.players <= len(learners):
        raise ValueError(
            f"league.players={league.players} with {len(learners)} learners: the first snapshot of each stays, so no "
            f"later one would; set it to more than {len(learners)}"
        )
    snapshots = {name for name in league.fixed if SNAPSHOT.fullmatch(name)}
    if taken := sorted(({*league.fixed} & {*run.policies}) | snapshots):
        said = "ids of policies or might be their snapshots'"
        raise ValueError(f"league.fixed: {taken} are {said}; give the players names of their own")


def check_replay(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    """Raises `ValueError` where a league begins a policy again, or lets it wait, that learns from a replay buffer.
    `algorithm` is its section, a user's own resolved."""
    if run.league is None or getattr(algorithm, "replay_buffer", None) is None:
        return
    for name, learner in run.league_learners.items():
        if learner.policy != policy_id:
            continue
        for field, why in (
            (
                f"learners.{name}.reset" if learner.reset is not None else "",
                "hold what the former weights learned from",
            ),
            (
                "swap_every" if run.league.swap_every is not None else "",
                "be learned from while it is another one's turn",
            ),
        ):
            if field:
                raise ValueError(
                    f"league.{field} with the algorithm {algorithm.name} of {policy_id!r}: its replay buffer "
                    f"would {why}; leave {field.rpartition('.')[2]} out, or use an algorithm without a replay buffer"
                )


def _check_meets(run: ConfigFields, league: LeagueConfig, name: str, learner: LearnerConfig, alone: bool) -> None:
    """Whether there are the matches by whose win rate something is to happen."""
    opponents, where = league.opponents, f"league.learners.{name}"
    if learner.plays == (learner.policy,):
        raise ValueError(f"{where}.plays=[{learner.policy}] names its own policy, whose seats it has; leave plays out")
    if alone and league.snapshot.every is None and opponents.latest == 1:
        raise ValueError(
            "league.snapshot.win_rate without `every`, and opponents.latest=1 where all agents have one policy: each "
            f"match of {learner.policy!r} is against itself, so no snapshot of it would ever be taken; give "
            f"snapshot.every, or a share to past"
        )
    learn = {its.policy for its in run.league_learners.values()} >= {*run.policies}
    if learner.reset and learner.reset.win_rate is not None and learn and not opponents.latest + opponents.fixed.share:
        raise ValueError(
            f"{where}.reset.win_rate counts matches against current weights, and with league.opponents.latest=0 there "
            f"are none; give latest a share, or use reset.or_after"
        )
