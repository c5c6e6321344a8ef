"""Rules between a league and the run's policies and agents, with a message per contradiction."""

from collections.abc import Iterator, Mapping

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.league import MEAN_RETURN, LeagueConfig, LearnerConfig
from stagecoach.shared.config.sections import ConfigFields
from stagecoach.shared.league.table import SNAPSHOT


def league_rules(run: ConfigFields, league: LeagueConfig) -> Iterator[str]:
    """Yields the contradictions between `run.league` and the policies."""
    if run.environment.api == "gymnasium":
        where = f"league with environment.api={run.environment.api}"
        yield f"{where}: it needs several agents; set environment.api, or leave the league out"
    learners, known = run.league_learners, sorted(run.policies)
    for name, learner in learners.items():
        where = f"league.learners.{name}"
        for field, policy_id in (("policy", learner.policy), *(("plays", seat) for seat in learner.plays)):
            if policy_id not in run.policies:
                yield f"{where}.{field}={policy_id!r} names no policy; policies has {known}"
        if not run.policies[learner.policy].trainable:
            frozen = f"policies.{learner.policy}.trainable=false"
            yield f"{where}.policy={learner.policy!r} with {frozen}: it cannot learn; leave one of them out"
        yield from _matches(run, league, where, learner)
    if not learners:
        yield "league: no policy is trainable, so nothing would be learned; make one trainable"
    taught, best_by = {learner.policy for learner in learners.values()}, run.checkpoint.best_by
    if best_by == MEAN_RETURN and not (league.fixed and run.evaluation.episodes):
        yield (
            f"checkpoint.best_by={MEAN_RETURN} in a league is measured against its fixed players, with league.fixed="
            f"{sorted(league.fixed)} and evaluation.episodes={run.evaluation.episodes}; give both, or leave best_by out"
        )
    if best_by not in ("all", MEAN_RETURN, *taught):
        why = "has no rating, since no learner has this policy"
        yield f"checkpoint.best_by: {best_by!r} {why}; the learners' policies are {', '.join(sorted(taught))}"
    for policy_id in run.trainable:
        if policy_id not in taught:
            yield (
                f"league.learners has {', '.join(learners)}, and so policies.{policy_id} would not learn: name it in "
                f"league.learners too, or set policies.{policy_id}.trainable=false"
            )
    if league.swap_every is not None and len(learners) < 2:
        where = f"league.swap_every={str(league.swap_every)!r} with one learner, {next(iter(learners))!r}"
        yield f"{where}, would change nothing; leave it out"
    if league.players <= len(learners):
        where = f"league.players={league.players} with {len(learners)} learners"
        yield f"{where}: only the first snapshots of each would be kept; set it to more than {len(learners)}"
    if taken := sorted(name for name in league.fixed if name in run.policies or SNAPSHOT.fullmatch(name)):
        yield f"league.fixed: {taken} are ids of policies or might be their snapshots'; choose other names"


def _matches(run: ConfigFields, league: LeagueConfig, where: str, learner: LearnerConfig) -> Iterator[str]:
    """Yields conditions that no match counts for."""
    alone = len(run.policies) == 1 or {*run.agents.values()} == {learner.policy}
    by_win_rate = learner.reset is not None and learner.reset.win_rate is not None
    if alone and by_win_rate:
        yield (
            f"{where}.reset.win_rate counts matches against the current weights of others, and all agents have its own "
            f"policy {learner.policy!r}; use reset.or_after"
        )
    if learner.plays == (learner.policy,):
        yield f"{where}.plays=[{learner.policy}] names its own policy, whose seats it has; leave plays out"
    if alone and league.snapshot.every is None and league.opponents.latest == 1:
        yield (
            f"league.snapshot.win_rate without `every`, and opponents.latest=1 where all agents have one policy: each "
            f"match of {learner.policy!r} is against itself, so no snapshot of it would ever be taken; give "
            f"snapshot.every, or a share to past"
        )
    learn = {its.policy for its in run.league_learners.values()} >= {*run.policies}
    if by_win_rate and learn and not league.opponents.latest + league.opponents.fixed.share:
        why = "counts matches against current weights, which league.opponents.latest=0 excludes"
        yield f"{where}.reset.win_rate {why}; give latest a share, or use reset.or_after"


def replay_rules(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yields parts of a league that would reset or pause a policy with a replay buffer. `algorithm` is its resolved
    section."""
    if run.league is None or algorithm.replay is None:
        return
    for name, learner in run.league_learners.items():
        if learner.policy != policy_id:
            continue
        for field, given, why in (
            (f"learners.{name}.reset", learner.reset, "hold what the former weights learned from"),
            ("swap_every", run.league.swap_every, "be learned from while it is another one's turn"),
        ):
            if given is not None:
                yield (
                    f"league.{field} with the algorithm {algorithm.name} of {policy_id!r}: its replay buffer would "
                    f"{why}; leave {field.rpartition('.')[2]} out, or use an algorithm without a replay buffer"
                )


def check_stops(run: ConfigFields, agents: Mapping[str, str]) -> None:
    """Raises `ConfigError` if `stop_at.mean_return` sums the returns of several sides, which evaluations play with
    current weights."""
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
    seats = {its.policy: its.seat for its in run.league_learners.values()}
    for message in _sides(agents, sides):
        raise ConfigError(message)
    for policy_id, seat in seats.items():
        for message in _seat(run, agents, sides, policy_id, seat):
            raise ConfigError(message)
    return sides, seats


def _sides(agents: Mapping[str, str], sides: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    named = {agent for side in sides for agent in side}
    if unknown := sorted(named - set(agents)):
        yield f"league.sides names {unknown}, but the environment has {sorted(agents)}"
    if left := sorted(set(agents) - named):
        yield f"league.sides has no side for {left}; add each agent of the environment to one"
    if len(sides) < 2:
        yield f"a league needs two sides, and the environment has one agent, {sorted(agents)}"
    for side in sides:
        if len(policies := sorted({agents[agent] for agent in side})) > 1:
            yield (
                f"league.sides: the agents {list(side)} of one side are mapped to the policies {policies}, expected "
                f"one; map them to one in `agents`, or make sides of them"
            )


def _seat(
    run: ConfigFields, agents: Mapping[str, str], sides: tuple[tuple[str, ...], ...], policy_id: str, seat: str
) -> Iterator[str]:
    name, plays = run.algorithm_of(policy_id).name, f"league: {policy_id!r} plays in the seats of {seat!r}"
    opposed = [list(side) for side in sides if agents[side[0]] == seat]
    team = run.policies[policy_id].critic_observes == "team"
    if (team or name in ("vdn", "qmix")) and len(opposed) > 1:
        way = "a critic that observes its team" if team else name
        remedy = "critic_observes=own or state" if team else "another algorithm"
        yield (
            f"league: {policy_id!r} learns by {way}, to which all agents of a policy are one team, and {seat!r} plays "
            f"the sides {opposed} against each other; map each side to a policy of its own in `agents`, or use {remedy}"
        )
    observes = {run.policies[each].critic_observes for each in (policy_id, seat)}
    if "state" in observes and len(observes) > 1:
        yield f"{plays}, and only one has critic_observes=state; set it for both, or for neither"
    if seat not in agents.values():
        yield (
            f"league: {policy_id!r} would take the seats of {seat!r}, to which no agent is mapped; map one in "
            f"`agents`, or name another policy in plays (mapped are {sorted(set(agents.values()))})"
        )
    if seat != policy_id and policy_id in agents.values():
        yield f"{plays}, and has agents of its own; leave plays out, or map its agents to another policy"
