"""A league's learners, shares and players against the run's policies and agents."""

from collections.abc import Mapping

from stagecoach.shared.base.errors import ConfigError
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
            f"checkpoint.best_by: {run.checkpoint.best_by!r} has no rating, since no learner has this policy; the "
            f"learners' policies are {', '.join(sorted(taught))}"
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
            f"league.players={league.players} with {len(learners)} learners: only the first snapshots of "
            f"each would be kept; set it to more than {len(learners)}"
        )
    snapshots = {name for name in league.fixed if SNAPSHOT.fullmatch(name)}
    if taken := sorted(({*league.fixed} & {*run.policies}) | snapshots):
        said = "ids of policies or might be their snapshots'"
        raise ValueError(f"league.fixed: {taken} are {said}; give the players names of their own")


def check_replay(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    """Raises `ValueError` if a league resets or pauses a policy that learns from a replay buffer. `algorithm` is its
    resolved section."""
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
    """Rejects win rates that no match counts for."""
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
            f"{where}.reset.win_rate counts matches against current weights, which "
            f"league.opponents.latest=0 excludes; give latest a share, or use reset.or_after"
        )


def check_stops(run: ConfigFields, agents: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a return to stop at that is summed over several sides: evaluations play current
    weights."""
    asked = run.stop_at.mean_return
    if run.league is None or asked is None:
        return
    sides = run.league.sides or tuple((agent,) for agent in agents)
    for policy_id in asked if isinstance(asked, dict) else (None,):
        summed = [side for side in sides if policy_id is None or policy_id in {agents[agent] for agent in side}]
        if len(summed) > 1:
            field = "" if policy_id is None else f".{policy_id}"
            raise ConfigError(
                f"stop_at.mean_return{field} would add up the returns of {len(summed)} sides of the league, which in a "
                f"game that one side wins say nothing (0 where the pay is zero-sum); name a policy of one side, as in "
                f"stop_at.mean_return={{POLICY: 0.5}}, or end by env_steps"
            )


def seating(run: ConfigFields, agents: Mapping[str, str]) -> tuple[tuple[tuple[str, ...], ...], dict[str, str]]:
    """Returns the sides of a league by agent, and learning policy → policy whose agents' seats it takes. Raises
    `ConfigError` if sides and learners do not fit the environment's agents."""
    if run.league is None:
        return (), {}
    sides = run.league.sides or tuple((agent,) for agent in agents)
    named = [agent for side in sides for agent in side]
    if unknown := sorted(set(named) - set(agents)):
        raise ConfigError(f"league.sides names {unknown}, but the environment has {sorted(agents)}")
    if left := sorted(set(agents) - set(named)):
        raise ConfigError(f"league.sides has no side for {left}; add each agent of the environment to one")
    if len(sides) < 2:
        raise ConfigError(f"a league needs two sides, and the environment has one agent, {sorted(agents)}")
    for side in sides:
        if len(policies := sorted({agents[agent] for agent in side})) > 1:
            raise ConfigError(
                f"league.sides: the agents {list(side)} of one side are mapped to the policies {policies}, expected "
                f"one; map them to one in `agents`, or make sides of them"
            )
    seats, algorithms = {its.policy: its.seat for its in run.league_learners.values()}, run.algorithms()
    for policy_id, seat in seats.items():
        its, team = algorithms[policy_id].name, run.policies[policy_id].critic_observes == "team"
        opposed = [list(side) for side in sides if agents[side[0]] == seat]
        if (team or its in ("vdn", "qmix")) and len(opposed) > 1:
            raise ConfigError(
                f"league: {policy_id!r} learns by {'a critic that observes its team' if team else its}, to which all "
                f"agents of a policy are one team, and {seat!r} plays the sides {opposed} against each other; map each "
                f"side to a policy of its own in `agents`, or use "
                f"{'critic_observes=own or state' if team else 'another algorithm'}"
            )
        if "state" in (sees := {run.policies[each].critic_observes for each in (policy_id, seat)}) and len(sees) > 1:
            raise ConfigError(
                f"league: {policy_id!r} plays in the seats of {seat!r}, and only one has critic_observes=state; set "
                f"it for both, or for neither"
            )
        if seat not in agents.values():
            raise ConfigError(
                f"league: {policy_id!r} would take the seats of {seat!r}, to which no agent is mapped; map one in "
                f"`agents`, or name another policy in plays (mapped are {sorted(set(agents.values()))})"
            )
        if seat != policy_id and policy_id in agents.values():
            raise ConfigError(
                f"league: {policy_id!r} plays in the seats of {seat!r}, and has agents of its own; leave plays out, or "
                f"map its agents to another policy"
            )
    return sides, seats
