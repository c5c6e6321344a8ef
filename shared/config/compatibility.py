"""Rules between sections of a run's config; those of a custom algorithm are in its `validate_run`.

A rule yields one message per contradiction; the first message becomes the error.
"""

import re
from collections.abc import Iterator, Mapping

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.base import AlgorithmConfig, BatchOfUpdate, OwnAlgorithm
from stagecoach.shared.config.algorithms.off_policy import OffPolicyConfig
from stagecoach.shared.config.algorithms.offline import BCConfig
from stagecoach.shared.config.algorithms.on_policy import OnPolicyConfig
from stagecoach.shared.config.algorithms.q_learning import PQNConfig, QLearningConfig, QMIXConfig, R2D2Config
from stagecoach.shared.config.algorithms.replay_buffer import HindsightReplay
from stagecoach.shared.config.environments.hierarchy import HierarchyConfig
from stagecoach.shared.config.league import MEAN_RETURN
from stagecoach.shared.config.league_compatibility import league_rules, replay_rules
from stagecoach.shared.config.recorded import DataEvaluationConfig
from stagecoach.shared.config.sections import ConfigFields

_NO_HIDDEN_STATES = "recorded experience does not hold the hidden state of the policy's core"


def check_sections_together(run: ConfigFields) -> None:
    """Raises `ValueError` at the first contradiction between two sections."""
    _raise_first(_policies(run))
    for policy_id, policy in sorted(run.policies.items()):
        check_algorithm(run, policy_id, policy.algorithm or run.algorithm)
    _raise_first(_run(run))


def check_algorithm(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    """Raises `ValueError` if `algorithm`, a policy's resolved section, cannot learn in this run."""
    try:
        _raise_first(_algorithm(run, policy_id, algorithm))
    except ValueError as error:
        message = in_its_place(run, policy_id, str(error))
        named = len(run.trainable) < 2 or f"policies.{policy_id}" in message
        raise ValueError(message if named else f"policies.{policy_id}: {message}") from None


def in_its_place(run: ConfigFields, policy_id: str, message: str) -> str:
    """Returns a message with the fields of `algorithm` prefixed by the policy, if it has its own section."""
    own = run.policies[policy_id].algorithm is not None
    return re.sub(r"\balgorithm\.(?=\w)", f"policies.{policy_id}.algorithm.", message) if own else message


def check_minibatches(run: ConfigFields, agents: Mapping[str, int]) -> None:
    """Checks minibatches by the number of `agents` of each policy, once it is known; raises `ConfigError`."""
    for policy_id in run.trainable:
        for message in _minibatch(run, run.algorithm_of(policy_id), agents[policy_id]):
            raise ConfigError(in_its_place(run, policy_id, message))


def _raise_first(messages: Iterator[str]) -> None:
    for message in messages:
        raise ValueError(message)


def _policies(run: ConfigFields) -> Iterator[str]:
    if run.dataset is not None:
        yield from _no_core(run, "a dataset", _NO_HIDDEN_STATES)
    if run.trainer.compile:
        yield from _no_core(run, "trainer.compile=true", "the length of its sequences changes with every minibatch")
    if not run.policies:
        yield "policies is empty; add a policy, or leave the section out for a single policy"
    for policy_id in run.policies:
        fits = policy_id.replace("-", "").replace("_", "").isalnum() and len(policy_id.encode()) <= 100
        if not fits or policy_id in {"trainer", "manifest", "all"}:
            expected = "use letters, digits, - and _, at most 100 characters"
            yield f"policies: {policy_id!r:.120} is not a valid policy id; {expected}"
    for agent, policy_id in run.agents.items():
        if policy_id not in run.policies:
            yield f"agents.{agent}={policy_id!r} names no policy; policies has {sorted(run.policies)}"
    if not run.trainable:
        yield f"policies: none of {sorted(run.policies)} is trainable; remove trainable=false from one"


def _no_core(run: ConfigFields, other: str, why: str) -> Iterator[str]:
    for policy_id, policy in sorted(run.policies.items()):
        if policy.core != "none":
            yield f"policies.{policy_id}.core={policy.core} with {other}: {why}; set core=none"


def _run(run: ConfigFields) -> Iterator[str]:
    if run.environment.hierarchy is not None:
        yield from _hierarchy(run, run.environment.hierarchy)
    if run.league is not None:
        yield from league_rules(run, run.league)
    if run.fork_from is not None:
        yield from _fork(run)
    local = "embedded" in (run.redis.url, run.store.url) or run.redis.url.startswith("unix:")
    if run.ray.address != "embedded" and local:
        yield (
            f"ray.address={run.ray.address} with redis.url={run.redis.url} and store.url={run.store.url}: a cluster "
            f"cannot reach servers that only this machine reaches; give both addresses that it reaches, or, for a Ray "
            f"on this machine alone, leave ray.address out and call ray.init(address) before stagecoach.train"
        )
    if run.rollout.complete_episodes:
        yield from _complete_episodes(run)
    yield from _parameters(run)
    yield from _external(run)
    yield from _scores(run)


def _complete_episodes(run: ConfigFields) -> Iterator[str]:
    environment, where = run.environment, "rollout.complete_episodes=true"
    if environment.max_episode_steps is None:
        yield f"{where}: it needs environment.max_episode_steps, which bounds a fragment; set it"
    for other, given in (
        ("vectorization=native", environment.vectorization == "native"),
        ("hierarchy", environment.hierarchy is not None),
        ("api=pettingzoo", environment.api == "pettingzoo"),
    ):
        if given:
            yield f"{where} is not supported with environment.{other}; leave one of the two out"
    if run.dataset is not None:
        yield f"{where}: recorded experience is cut into fragments of rollout.fragment_steps; leave it out"


def _external(run: ConfigFields) -> Iterator[str]:
    if run.environment.api != "external":
        if run.gateway != type(run.gateway)():
            yield "gateway: only environment.api=external has clients; set that, or leave the section out"
        return
    where = "environment.api=external"
    if run.evaluation.episodes:
        yield f"{where}: the evaluator has no client that could play; set evaluation.episodes=0"
    without = sorted(id_ for id_, its in run.algorithms().items() if run.policies[id_].trainable and its.replay is None)
    if run.gateway.late == "learn" and without:
        yield (
            f"gateway.late=learn: {run.algorithms()[without[0]].name} has no replay buffer, and learns only from turns "
            f"of its present version; use late=drop, or an algorithm with a replay buffer"
        )
    if run.dataset is not None or run.rollout.complete_episodes:
        yield f"{where}: experience comes from clients; leave out dataset and rollout.complete_episodes"


def _parameters(run: ConfigFields) -> Iterator[str]:
    environment, drawn = run.environment, set[str]()
    for name, entry in environment.parameters.items():
        where, samplers = f"environment.parameters.{name}", entry.samplers(name, 0)
        if twice := sorted(drawn & set(samplers)):
            yield f"{where} sets {', '.join(twice)}, which another entry sets too; leave one of them out"
        drawn |= set(samplers)
        for criterion in entry.criteria:
            measure, policy_id = criterion.measure, criterion.policy
            if measure == "progress" and run.stop_at.env_steps is None:
                yield f"{where}: progress is the share of stop_at.env_steps; set that"
            if measure == "rating" and run.league is None:
                yield f"{where}: rating needs a league, which the run does not have; use return"
            rated = sorted(learner.policy for learner in run.league_learners.values())
            if policy_id and measure == "rating" and policy_id not in rated:
                yield f"{where}: {policy_id!r} has no rating; the learners have: {rated}"
            if policy_id and measure in ("success", "length"):
                yield f"{where}: {measure} is measured for whole episodes; remove policy={policy_id}, or use return"
            if policy_id and measure != "rating":
                yield from _has_return(run, where, policy_id)
        single = environment.api == "gymnasium" and environment.hierarchy is None and len(run.policies) == 1
        if entry.replay is not None and not (single and isinstance(run.algorithm, OnPolicyConfig)):
            yield (
                f"{where}.replay scores levels by the advantages of one agent: it works with ppo, a2c, impala and appo "
                f"in a Gymnasium environment without a hierarchy, found algorithm.name={run.algorithm.name} and "
                f"environment.{'hierarchy' if environment.hierarchy else f'api={environment.api}'}; use choice or "
                f"uniform instead"
            )
    if unknown := sorted(set(run.evaluation.parameters) - drawn):
        there = f"environment.parameters draws {sorted(drawn) or 'none'}"
        yield f"evaluation.parameters names {', '.join(unknown)}; {there}"


def _scores(run: ConfigFields) -> Iterator[str]:
    stop, evaluation, ranked = run.stop_at, run.evaluation, run.checkpoint.best_by
    if not stop.bounded and not stop.by_scores:
        yield "stop_at is empty, so the run would never end; set stop_at.env_steps or another bound"
    for name, value in (
        ("stop_at.mean_return", stop.mean_return),
        ("stop_at.success_rate", stop.success_rate),
        ("evaluation.every", evaluation.every),
        ("evaluation.env_steps", evaluation.env_steps),
    ):
        if value is not None and not evaluation.enabled:
            yield f"evaluation.episodes=0 evaluates nothing, and {name} needs scores; leave one of them out"
    if ranked not in ("all", *run.policies) and not (run.league and ranked == MEAN_RETURN):
        yield f"checkpoint.best_by: {ranked!r} names no policy; policies has {sorted(run.policies)}"
    for policy_id in stop.mean_return if isinstance(stop.mean_return, dict) else ():
        yield from _has_return(run, "stop_at.mean_return", policy_id)


def _has_return(run: ConfigFields, where: str, policy_id: str) -> Iterator[str]:
    if policy_id not in run.policies:
        yield f"{where}: {policy_id!r} names no policy; policies has {sorted(run.policies)}"
    for learner in run.league_learners.values():
        if learner.policy == policy_id and learner.seat != policy_id:
            why = f"has no agents, and so no return: it plays in the seats of {learner.seat!r}"
            yield f"{where}: {policy_id!r} {why}; name that one, or use another measure"


def _algorithm(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    if isinstance(algorithm, QLearningConfig | PQNConfig):
        yield from _exploration(algorithm, run.policies[policy_id].trainable)
    if not run.policies[policy_id].trainable:
        return
    algorithm.validate_run(run)
    yield from replay_rules(run, policy_id, algorithm)
    if run.environment.api != "pettingzoo":
        yield from _minibatch(run, algorithm, 1)
    if run.state_sizes[policy_id]:
        steps = run.fragment_rows
        if (size := getattr(algorithm, "minibatch_size", steps)) < steps:  # of custom algorithms as well
            episodes = run.rollout.complete_episodes
            field = "the rows of a fragment of complete episodes" if episodes else "rollout.fragment_steps"
            yield (
                f"algorithm.minibatch_size={size} is less than {field}={steps}: a policy with a "
                f"core learns whole sequences of a fragment; raise the first or lower the second"
            )
    elif isinstance(algorithm, R2D2Config):
        where = f"policies.{policy_id}.core=none with algorithm.name={algorithm.name}"
        yield f"{where}, which learns sequences; set core=lstm or gru, or use dqn"
    if isinstance(algorithm, OffPolicyConfig):
        yield from _replay_buffer(run, policy_id, algorithm)
    if isinstance(algorithm, BCConfig) and (run.dataset is None or run.dataset.only_heatup):
        yield "algorithm.name=bc needs recorded experience; set dataset.path, and dataset.only_heatup=false"
    if run.rollout.max_policy_lag and not algorithm.corrects_policy_lag:
        yield (
            f"rollout.max_policy_lag={run.rollout.max_policy_lag} with algorithm.name={algorithm.name}: its gradient "
            f"is wrong for experience of older policies; set it to 0, or use impala or appo, which correct for it"
        )
    if not isinstance(algorithm, OwnAlgorithm):  # its section is unknown until its class is imported
        yield from _critic(run, policy_id, algorithm)
        yield from _demonstrations(run, algorithm)
        yield from _dataset(run, algorithm)


def _minibatch(run: ConfigFields, algorithm: AlgorithmConfig, agents: int) -> Iterator[str]:
    batch = run.transitions_per_update * agents
    if isinstance(algorithm, BatchOfUpdate) and algorithm.minibatch_size > batch:
        factors = f"{_factors(run)} × {agents} agents" if agents > 1 else _factors(run)
        yield (
            f"algorithm.minibatch_size={algorithm.minibatch_size} is more than one update's batch of {batch} "
            f"transitions ({factors}); lower the first or raise one of the others"
        )


def _factors(run: ConfigFields) -> str:
    return (
        f"rollout.fragments_per_update={run.rollout.fragments_per_update} × rollout.fragment_steps="
        f"{run.rollout.fragment_steps} × environment.num_envs={run.environment.num_envs}"
    )


def _exploration(algorithm: QLearningConfig | PQNConfig, learns: bool) -> Iterator[str]:
    kind = algorithm.exploration.kind
    where = f"algorithm.exploration.kind={kind}"
    if kind == "sampling" and not algorithm.noisy and learns:
        yield f"{where} with algorithm.noisy=false would never explore; set noisy=true, or use epsilon_greedy"
    if kind in {"ucb", "bootstrapped"} and algorithm.heads == 1:
        yield f"{where} needs an ensemble, but algorithm.heads=1; set heads to 10, or use epsilon_greedy"
    if kind in {"gaussian", "truncated_gaussian", "ou"}:
        actions = f"is for continuous actions, but {algorithm.name} has discrete actions"
        yield f"{where} {actions}; use epsilon_greedy, boltzmann, parameter_noise, or sampling with noisy=true"


def _replay_buffer(run: ConfigFields, policy_id: str, algorithm: OffPolicyConfig) -> Iterator[str]:
    buffer, size, update = algorithm.replay_buffer, algorithm.minibatch_size, run.transitions_per_update
    if buffer.capacity < size:
        yield (
            f"algorithm.minibatch_size={size} is more than the replay buffer holds (algorithm.replay_buffer.capacity="
            f"{buffer.capacity}); lower the first or raise the second"
        )
    if buffer.capacity < update:
        yield (
            f"algorithm.replay_buffer.capacity={buffer.capacity} is less than the {update} transitions of each update "
            f"({_factors(run)}), so some would be discarded unused; raise the first or lower one of the others"
        )
    if algorithm.signals is not None and algorithm.n_step > 1:
        where = f"algorithm.n_step={algorithm.n_step} with algorithm.reward_signals"
        yield f"{where}: with a replay buffer, signals reward single steps; set n_step=1"
    if isinstance(buffer, HindsightReplay):
        if run.environment.hierarchy is None and (buffer.hindsight_actions or buffer.missed_penalty is not None):
            yield (
                "algorithm.replay_buffer.hindsight_actions and missed_penalty are for the upper levels of a hierarchy "
                "(docs/guides/hierarchy.md); leave them out, or set environment.hierarchy"
            )
        if run.policies[policy_id].changes_rewards:
            yield (
                f"algorithm.replay_buffer.kind=hindsight computes rewards of relabeled goals, which do not match "
                f"rewards changed by policies.{policy_id} (reward_scale, reward_clip or transform); use one of the two"
            )
    drawn, what = size, "transitions"
    if isinstance(algorithm, R2D2Config):
        drawn, what = algorithm.sequences(run.fragment_rows), "sequences"
    if run.trainer.ranks > drawn:
        yield (
            f"trainer.ranks={run.trainer.ranks} is more than the {drawn} {what} of each minibatch "
            f"(algorithm.minibatch_size={size}); lower the first or raise the second"
        )


def _critic(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> Iterator[str]:
    if (observes := run.policies[policy_id].critic_observes) == "own":
        return
    mixes = isinstance(algorithm, QMIXConfig) and observes == "state"
    if not (mixes or isinstance(algorithm, OnPolicyConfig)) or run.environment.api == "gymnasium":
        yield (
            f"policies.{policy_id}.critic_observes={observes} with algorithm.name={algorithm.name} and environment.api="
            f"{run.environment.api}: it needs several agents and ppo, appo, impala or a2c, or qmix with "
            f"critic_observes=state; set critic_observes=own"
        )


def _demonstrations(run: ConfigFields, algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.imitating and run.demonstrations is None:
        yield f"algorithm.{algorithm.imitating[0]} needs recorded experience; set demonstrations.path"
    others = [run.policies[policy_id].algorithm or run.algorithm for policy_id in run.trainable]
    if run.demonstrations is not None and not any(its.imitating or isinstance(its, OwnAlgorithm) for its in others):
        yield (
            f"demonstrations.path={run.demonstrations.path} with algorithm.name={algorithm.name}, which does "
            f"not use them; configure their use (docs/guides/demonstrations.md), or leave them out"
        )
    if algorithm.cloning is not None:
        yield from _no_core(run, "algorithm.behavioral_cloning", _NO_HIDDEN_STATES)


def _fork(run: ConfigFields) -> Iterator[str]:
    if run.initialize_from or any(its.initialize_from for its in run.policies.values()):
        yield "fork_from takes all of a checkpoint, initialize_from policies alone; give one of them"
    if run.league is not None:
        yield "fork_from with a league: its players are in the other run's store; use initialize_from"
    for its in (run.algorithm, *(policy.algorithm for policy in run.policies.values())):
        if isinstance(its, OffPolicyConfig):
            yield f"fork_from with {its.name}: the replay buffer is in the other run's log; use initialize_from"


def _dataset(run: ConfigFields, algorithm: AlgorithmConfig) -> Iterator[str]:
    if run.dataset is None:
        return
    name, path, evaluation = algorithm.name, f"dataset.path={run.dataset.path}", run.dataset.evaluation
    if not algorithm.learns_from_others:
        why = f"learns only from its own policy's experience, not from {path}"
        yield f"algorithm.name={name} {why}; use bc, or an algorithm with a replay buffer"
    if run.league is not None or name in {"vdn", "qmix"}:
        other, remedy = ("a league", "the league") if run.league else (f"algorithm.name={name}", "use dqn")
        why = "recorded experience is separate for each policy, without the actions of others"
        yield f"{path} with {other}: {why}; leave the dataset out, or {remedy}"
    if run.dataset.only_heatup and not run.heatup.duration.amount:
        where = f"dataset.only_heatup=true with heatup={str(run.heatup.duration)!r}"
        yield f"{where}: the data would not be used; set a duration, such as heatup='10000 env_steps'"
    if algorithm.policy == "deterministic" and evaluation.every_updates != 0 and evaluation != DataEvaluationConfig():
        yield (
            f"dataset.evaluation compares action probabilities, but algorithm.name={name} has a "
            f"deterministic policy; leave it out, or use an algorithm whose policy samples (bc, iql, cql, sac), or dqn"
        )


def _hierarchy(run: ConfigFields, hierarchy: HierarchyConfig) -> Iterator[str]:
    where, levels, named = "environment.hierarchy", hierarchy.levels, sorted(run.policies)
    if run.environment.api != "gymnasium" or run.league is not None or run.agents:
        found = "a league" if run.league else f"agents={run.agents}" if run.agents else "environment.api=pettingzoo"
        yield (
            f"{where} with {found}: a hierarchy needs a Gymnasium environment, and its levels (or options) are "
            f"the only agents; leave one of them out"
        )
    if (options := hierarchy.options) is not None:
        algorithms = list(run.algorithms().values())
        if len(algorithms) > 1 or not isinstance(algorithms[0], OnPolicyConfig):
            yield (
                f"{where}.options with policies {named} of {[its.name for its in algorithms]}: options need a single "
                f"policy and an on-policy algorithm; use ppo, appo, a2c or impala, and one policy"
            )
        remedy = f"leave the longest of {where}.options.lengths out"
        yield from _turns(run, "the controller", 1 + max(options.lengths), remedy)
        return
    if sorted(level.policy for level in levels) != named:
        found = f"{where}.levels has the policies {[level.policy for level in levels]}, and policies has {named}"
        yield f"{found}; give each level a section in policies, and each policy a level"
    for number, level in enumerate(levels):
        if number + 1 < len(levels):
            yield from _turns(run, repr(level.policy), hierarchy.turns_within(number), "lower `every`")
        algorithm = run.policies[level.policy].algorithm or run.algorithm
        if not isinstance(algorithm, OffPolicyConfig):
            if hierarchy.test_subgoals and number:
                yield (
                    f"{where}.test_subgoals={hierarchy.test_subgoals:g} with policies.{level.policy}.algorithm.name="
                    f"{algorithm.name}: it learns only from its own samples, but tests act greedily; below the "
                    f"top level, use an algorithm with a replay buffer (ddpg, td3, sac, dqn), or test_subgoals=0"
                )
        elif isinstance(algorithm.replay_buffer, HindsightReplay):
            yield from _hindsight(hierarchy, number, algorithm.replay_buffer, algorithm.n_step)


def _turns(run: ConfigFields, whose: str, turns: int, otherwise: str) -> Iterator[str]:
    if (steps := run.rollout.fragment_steps) < 2 * turns:
        yield (
            f"rollout.fragment_steps={steps} with environment.hierarchy: an action of {whose} lasts up to {turns} "
            f"steps of all agents, and actions cut off at a fragment's end are not learned from; set "
            f"rollout.fragment_steps to {2 * turns} or more, or {otherwise}"
        )


def _hindsight(hierarchy: HierarchyConfig, number: int, buffer: HindsightReplay, n_step: int) -> Iterator[str]:
    level, below = hierarchy.levels[number], hierarchy.levels[number + 1 :]
    where = f"policies.{level.policy}.algorithm.replay_buffer"
    sparse = buffer.reward == hierarchy.reward_of(number) == "sparse"
    if buffer.reward == "sparse" and not (sparse and buffer.threshold == level.threshold and buffer.terminates):
        yield (
            f"{where} has reward=sparse, threshold={buffer.threshold} and terminates={str(buffer.terminates).lower()}, "
            f"and the level of {level.policy!r} reward={hierarchy.reward_of(number)}, threshold={level.threshold}, and "
            f"ends when its goal is achieved; set the same values on both, and terminates: true"
        )
    if buffer.hindsight_actions and (not below or n_step > 1):
        found = f"{where}.hindsight_actions=true with algorithm.n_step={n_step}"
        yield f"{found}: it needs a level below and n_step=1; leave it out, or set n_step=1"
    if buffer.missed_penalty is not None and not (below and hierarchy.test_subgoals):
        yield (
            f"{where}.missed_penalty={buffer.missed_penalty:g}: goals of {level.policy!r} are never tested; leave it "
            f"out, or set environment.hierarchy.test_subgoals, for example to 0.3 (the bottom level sets no goals)"
        )
