"""Checks across sections of a run's config; those of a custom algorithm are in its `validate_run`."""

import re
from collections.abc import Mapping

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.base import AlgorithmConfig, BatchOfUpdate, Cloning, OwnAlgorithm
from stagecoach.shared.config.algorithms.off_policy import OffPolicyConfig
from stagecoach.shared.config.algorithms.offline import BCConfig
from stagecoach.shared.config.algorithms.on_policy import OnPolicyConfig
from stagecoach.shared.config.algorithms.q_learning import QLearningConfig, QMIXConfig, R2D2Config
from stagecoach.shared.config.algorithms.replay_buffer import HindsightReplay
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.config.environments.hierarchy import HierarchyConfig, OptionsConfig
from stagecoach.shared.config.league import MEAN_RETURN
from stagecoach.shared.config.league_compatibility import check_league, check_replay
from stagecoach.shared.config.recorded import DataEvaluationConfig
from stagecoach.shared.config.sections import ConfigFields

_NO_HIDDEN_STATES = "recorded experience does not hold the hidden state of the policy's core"


def check_sections_together(run: ConfigFields) -> None:
    """Raises `ValueError` at the first contradiction between two sections."""
    _check_policies(run)
    for policy_id, policy in sorted(run.policies.items()):
        check_algorithm(run, policy_id, policy.algorithm or run.algorithm)
    environment = run.environment
    if environment.vectorization == "native":
        _check_native(environment)
    if environment.api != "pettingzoo" and environment.episode_ends != "all":
        raise ValueError(
            f"environment.episode_ends={environment.episode_ends} with environment.api={environment.api}: it is for "
            f"episodes of several agents; leave it out, or set environment.api=pettingzoo"
        )
    if environment.hierarchy is not None:
        _check_hierarchy(run, environment.hierarchy)
    if run.league is not None:
        check_league(run, run.league)
    if run.ray.address != "embedded" and "embedded" in (run.redis.url, run.store.url):
        raise ValueError(
            f"ray.address={run.ray.address} with redis.url={run.redis.url} and store.url={run.store.url}: roles "
            f"on a cluster cannot reach servers on this machine's loopback; give both addresses that they reach"
        )
    warm_up = run.heatup.duration
    if warm_up.unit not in ("env_steps", "episodes") and warm_up.amount:
        raise ValueError(f"heatup={str(warm_up)!r}: warm-up has no updates; use env_steps or episodes")
    if run.rollout.complete_episodes:
        _check_complete_episodes(run)
    _check_parameters(run)
    _check_evaluation(run)
    ranked, asked = run.checkpoint.best_by, run.stop_at.mean_return
    if ranked not in ("all", *run.policies) and not (run.league and ranked == MEAN_RETURN):
        raise ValueError(f"checkpoint.best_by: {ranked!r} names no policy; policies has {sorted(run.policies)}")
    for policy_id in asked if isinstance(asked, dict) else ():
        _check_has_return(run, "stop_at.mean_return", policy_id)


def _check_has_return(run: ConfigFields, where: str, policy_id: str) -> None:
    """Rejects a policy without agents, which has no return."""
    if policy_id not in run.policies:
        raise ValueError(f"{where}: {policy_id!r} names no policy; policies has {sorted(run.policies)}")
    for learner in run.league_learners.values():
        if learner.policy == policy_id and learner.seat != policy_id:
            raise ValueError(
                f"{where}: {policy_id!r} has no agents, and so no return: it plays in the seats of {learner.seat!r}; "
                f"name that one, or use another measure"
            )


def _check_complete_episodes(run: ConfigFields) -> None:
    environment, why = run.environment, ""
    if environment.max_episode_steps is None:
        why = "it needs environment.max_episode_steps, which bounds a fragment; set it"
    elif environment.several_agents or environment.vectorization == "native":
        what = "hierarchy" if environment.hierarchy else f"api={environment.api}"
        what = "vectorization=native" if environment.vectorization == "native" else what
        why = f"not supported with environment.{what}; leave one of the two out"
    elif run.dataset is not None:
        why = "recorded experience is cut into fragments of rollout.fragment_steps; leave it out"
    if why:
        raise ValueError(f"rollout.complete_episodes=true: {why}")


def _check_native(environment: EnvironmentConfig) -> None:
    for field, given, other in (
        (f"wrappers={[wrapper.path for wrapper in environment.wrappers]}", environment.wrappers, ""),
        ("action_mask=info", environment.action_mask == "info", ", or an environment that observes its action_mask"),
        ("hierarchy" if environment.hierarchy else "api=pettingzoo", environment.several_agents, ""),
        (
            f"parameters_by={environment.parameters_by}",
            environment.parameters and environment.parameters_by != "options",
            ", or environment.parameters_by=options",
        ),
    ):
        if given:
            raise ValueError(
                f"environment.{field} with environment.vectorization=native, whose environment "
                f"holds all copies at once; use sync or async{other}"
            )


def _check_parameters(run: ConfigFields) -> None:
    environment, parameters = run.environment, run.environment.parameters
    drawn = set[str]()
    for name, entry in parameters.items():
        where, samplers = f"environment.parameters.{name}", entry.samplers(name, 0)
        if twice := sorted(drawn & set(samplers)):
            raise ValueError(f"{where} sets {', '.join(twice)}, which another entry sets too; leave one of them out")
        drawn |= set(samplers)
        for criterion in entry.criteria:
            if criterion.measure == "progress" and run.stop_at.env_steps is None:
                raise ValueError(f"{where}: progress is the share of stop_at.env_steps; set that")
            if criterion.measure == "rating" and run.league is None:
                raise ValueError(f"{where}: rating needs a league, which the run does not have; use return")
            if criterion.policy and criterion.measure == "return":
                _check_has_return(run, where, criterion.policy)
            elif criterion.policy and criterion.measure == "rating":
                if criterion.policy not in (rated := sorted(its.policy for its in run.league_learners.values())):
                    raise ValueError(f"{where}: {criterion.policy!r} has no rating; the learners have: {rated}")
            elif criterion.policy and criterion.measure in ("success", "length"):
                raise ValueError(
                    f"{where}: {criterion.measure} is measured for whole episodes, not for a policy; remove "
                    f"policy={criterion.policy}, or use return"
                )
            elif criterion.policy and criterion.policy not in run.policies:
                raise ValueError(
                    f"{where}: policy {criterion.policy!r} (ML-Agents' behavior) does not exist; policies has "
                    f"{sorted(run.policies)}"
                )
        replayable = isinstance(run.algorithm, OnPolicyConfig) and environment.api == "gymnasium"
        replayable = replayable and environment.hierarchy is None
        if entry.replay is not None and not (replayable and len(run.policies) == 1):
            raise ValueError(
                f"{where}.replay scores levels by the advantages of one agent: it works with ppo, a2c, impala and appo "
                f"in a Gymnasium environment without a hierarchy, found algorithm.name={run.algorithm.name} and "
                f"environment.{'hierarchy' if environment.hierarchy else f'api={environment.api}'}; use choice or "
                f"uniform instead"
            )
    if parameters and environment.id.startswith("envpool:"):
        raise ValueError("environment.parameters: not supported by EnvPool; use sync or async Gymnasium environments")
    if unknown := sorted(set(run.evaluation.parameters) - drawn):
        raise ValueError(
            f"evaluation.parameters names {', '.join(unknown)}; environment.parameters draws {sorted(drawn) or 'none'}"
        )


def _check_evaluation(run: ConfigFields) -> None:
    stop, evaluation = run.stop_at, run.evaluation
    if not stop.bounded and not stop.by_scores:
        raise ValueError("stop_at is empty, so the run would never end; set stop_at.env_steps or another bound")
    if not evaluation.enabled:
        asked: dict[str, object] = {"stop_at.mean_return": stop.mean_return, "stop_at.success_rate": stop.success_rate}
        asked["evaluation.every"], asked["evaluation.env_steps"] = evaluation.every, evaluation.env_steps
        if given := [name for name, value in asked.items() if value is not None]:
            raise ValueError(
                f"evaluation.episodes=0 evaluates nothing, and {given[0]} needs scores; leave one of them out"
            )


def check_algorithm(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    """Raises `ValueError` if `algorithm`, a policy's resolved section, cannot learn in this run."""
    try:
        _check_algorithm(run, policy_id, algorithm)
    except ValueError as error:
        message = in_its_place(run, policy_id, str(error))
        named = len(run.trainable) < 2 or f"policies.{policy_id}" in message
        raise ValueError(message if named else f"policies.{policy_id}: {message}") from None


def in_its_place(run: ConfigFields, policy_id: str, message: str) -> str:
    """Returns a message with the fields of `algorithm` prefixed by the policy, if it has its own section."""
    own = run.policies[policy_id].algorithm is not None
    return re.sub(r"\balgorithm\.(?=\w)", f"policies.{policy_id}.algorithm.", message) if own else message


def _check_algorithm(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    if isinstance(algorithm, QLearningConfig):
        _check_exploration(algorithm, run.policies[policy_id].trainable)
    if not run.policies[policy_id].trainable:
        return
    algorithm.validate_run(run)
    check_replay(run, policy_id, algorithm)
    if isinstance(algorithm, BatchOfUpdate) and run.environment.api == "gymnasium":
        _check_minibatch(run, algorithm, 1)
    if run.state_sizes[policy_id]:
        _check_sequences(run, algorithm)
    elif isinstance(algorithm, R2D2Config):
        raise ValueError(
            f"policies.{policy_id}.core=none with algorithm.name={algorithm.name}, which learns sequences; set "
            f"core=lstm or gru, or use dqn"
        )
    if isinstance(algorithm, OffPolicyConfig):
        _check_replay_buffer(run, policy_id, algorithm)
    if isinstance(algorithm, BCConfig) and (run.dataset is None or run.dataset.only_heatup):
        raise ValueError("algorithm.name=bc needs recorded experience; set dataset.path, and dataset.only_heatup=false")
    if run.rollout.max_policy_lag and not algorithm.corrects_policy_lag:
        raise ValueError(
            f"rollout.max_policy_lag={run.rollout.max_policy_lag} with algorithm.name={algorithm.name}: its gradient "
            f"is wrong for experience of older policies; set it to 0, or use impala or appo, which correct for it"
        )
    if not isinstance(algorithm, OwnAlgorithm):  # what it can is known once its class is imported
        _check_critics(run, policy_id, algorithm)
        _check_demonstrations(run, algorithm)
        _check_dataset(run, algorithm)


def _check_sequences(run: ConfigFields, algorithm: AlgorithmConfig) -> None:
    steps = run.fragment_rows
    if (size := getattr(algorithm, "minibatch_size", steps)) < steps:
        field = (
            "the rows of a fragment of complete episodes" if run.rollout.complete_episodes else "rollout.fragment_steps"
        )
        raise ValueError(
            f"algorithm.minibatch_size={size} is less than {field}={steps}: a policy with a core learns "
            f"whole sequences of a fragment; raise the first or lower the second"
        )


def check_minibatches(run: ConfigFields, agents: Mapping[str, int]) -> None:
    """Checks minibatches by the number of `agents` of each policy, once it is known; raises `ConfigError`."""
    for policy_id in run.trainable:
        if isinstance(algorithm := run.algorithm_of(policy_id), BatchOfUpdate):
            try:
                _check_minibatch(run, algorithm, agents[policy_id])
            except ValueError as error:
                raise ConfigError(in_its_place(run, policy_id, str(error))) from None


def _check_minibatch(run: ConfigFields, algorithm: BatchOfUpdate, agents: int) -> None:
    if algorithm.minibatch_size > run.transitions_per_update * agents:
        factors = f"{_factors(run)} × {agents} agents" if agents > 1 else _factors(run)
        raise ValueError(
            f"algorithm.minibatch_size={algorithm.minibatch_size} is more than one update's batch of "
            f"{run.transitions_per_update * agents} transitions ({factors}); lower the first or raise one of the others"
        )


def _factors(run: ConfigFields) -> str:
    return (
        f"rollout.fragments_per_update={run.rollout.fragments_per_update} × rollout.fragment_steps="
        f"{run.rollout.fragment_steps} × environment.num_envs={run.environment.num_envs}"
    )


def _check_replay_buffer(run: ConfigFields, policy_id: str, algorithm: OffPolicyConfig) -> None:
    capacity, update = algorithm.replay_buffer.capacity, run.transitions_per_update
    if capacity < algorithm.minibatch_size:
        raise ValueError(
            f"algorithm.minibatch_size={algorithm.minibatch_size} is more than the replay buffer holds "
            f"(algorithm.replay_buffer.capacity={capacity}); lower the first or raise the second"
        )
    if capacity < update:
        raise ValueError(
            f"algorithm.replay_buffer.capacity={capacity} is less than the {update} transitions of each update "
            f"({_factors(run)}), so some would be discarded unused; raise the first or lower one of the others"
        )
    if getattr(algorithm, "reward_signals", None) is not None and algorithm.n_step > 1:
        raise ValueError(
            f"algorithm.n_step={algorithm.n_step} with algorithm.reward_signals: with a replay "
            f"buffer, signals reward single steps; set n_step=1"
        )
    buffer = algorithm.replay_buffer
    of_levels = isinstance(buffer, HindsightReplay) and (buffer.hindsight_actions or buffer.missed_penalty is not None)
    if of_levels and run.environment.hierarchy is None:
        raise ValueError(
            "algorithm.replay_buffer.hindsight_actions and missed_penalty are for the upper levels of a hierarchy "
            "(docs/HIERARCHY.md); leave them out, or set environment.hierarchy"
        )
    if buffer.kind == "hindsight" and run.policies[policy_id].changes_rewards:
        raise ValueError(
            f"algorithm.replay_buffer.kind=hindsight computes rewards of relabeled goals, which do not match "
            f"rewards changed by policies.{policy_id} (reward_scale, reward_clip or transform); use one of the two"
        )
    drawn, what = algorithm.minibatch_size, "transitions"
    if isinstance(algorithm, R2D2Config):
        drawn, what = algorithm.sequences(run.fragment_rows), "sequences"
    if run.trainer.ranks > drawn:
        raise ValueError(
            f"trainer.ranks={run.trainer.ranks} is more than the {drawn} {what} of each minibatch "
            f"(algorithm.minibatch_size={algorithm.minibatch_size}); lower the first or raise the second"
        )


def _check_exploration(algorithm: QLearningConfig, learns: bool) -> None:
    kind = algorithm.exploration.kind
    if kind == "sampling" and not algorithm.noisy and learns:
        raise ValueError(
            "algorithm.exploration.kind=sampling with algorithm.noisy=false would never explore; set noisy=true, "
            "or explore with epsilon_greedy"
        )
    if kind in {"ucb", "bootstrapped"} and algorithm.heads == 1:
        raise ValueError(
            f"algorithm.exploration.kind={kind} needs an ensemble, but algorithm.heads=1; set heads to 10, or "
            f"use epsilon_greedy"
        )
    if kind in {"gaussian", "truncated_gaussian", "ou"}:
        raise ValueError(
            f"algorithm.exploration.kind={kind} is for continuous actions, but {algorithm.name} has discrete actions; "
            f"use epsilon_greedy, boltzmann, parameter_noise, or sampling with noisy=true"
        )


def _check_demonstrations(run: ConfigFields, algorithm: AlgorithmConfig) -> None:
    if algorithm.imitating and run.demonstrations is None:
        raise ValueError(f"algorithm.{algorithm.imitating[0]} needs recorded experience; set demonstrations.path")
    others = [run.policies[policy_id].algorithm or run.algorithm for policy_id in run.trainable]
    if run.demonstrations is not None and not any(its.imitating or isinstance(its, OwnAlgorithm) for its in others):
        raise ValueError(
            f"demonstrations.path={run.demonstrations.path} with algorithm.name={algorithm.name}, which does "
            f"not use them; configure their use (docs/DEMONSTRATIONS.md), or leave them out"
        )
    if isinstance(algorithm, Cloning) and algorithm.behavioral_cloning is not None:
        _check_no_core(run, "algorithm.behavioral_cloning", _NO_HIDDEN_STATES)


def _check_dataset(run: ConfigFields, algorithm: AlgorithmConfig) -> None:
    if run.dataset is None:
        return
    name = algorithm.name
    if not algorithm.learns_from_others:
        raise ValueError(
            f"algorithm.name={name} learns only from its own policy's experience, not from dataset.path="
            f"{run.dataset.path}; use bc, or an algorithm with a replay buffer"
        )
    if run.league is not None or name in {"vdn", "qmix"}:
        raise ValueError(
            f"dataset.path={run.dataset.path} with {f'algorithm.name={name}' if run.league is None else 'a league'}: "
            f"recorded experience is separate for each policy, without the actions of others; leave the dataset "
            f"out, or {'the league' if run.league is not None else 'use dqn'}"
        )
    if run.dataset.only_heatup and not run.heatup.duration.amount:
        raise ValueError(
            f"dataset.only_heatup=true with heatup={str(run.heatup.duration)!r}: the data would not be used; set "
            f"a duration, such as heatup='10000 env_steps'"
        )
    evaluation = run.dataset.evaluation
    asked = evaluation.every_updates != 0 and evaluation != DataEvaluationConfig()
    if asked and algorithm.policy == "deterministic":
        raise ValueError(
            f"dataset.evaluation compares action probabilities, but algorithm.name={name} has a "
            f"deterministic policy; leave it out, or use an algorithm whose policy samples (bc, iql, cql, sac), or dqn"
        )


def _check_policies(run: ConfigFields) -> None:
    if run.dataset is not None:
        _check_no_core(run, "a dataset", _NO_HIDDEN_STATES)
    if run.trainer.compile:
        _check_no_core(run, "trainer.compile=true", "the length of its sequences changes with every minibatch")
    if not run.policies:
        raise ValueError("policies is empty; add a policy, or leave the section out for a single policy")
    for policy_id in run.policies:
        fits = policy_id.replace("-", "").replace("_", "").isalnum() and len(policy_id.encode()) <= 100
        if not fits or policy_id in {"trainer", "manifest", "all"}:
            raise ValueError(
                f"policies: {policy_id!r:.120} is not a valid policy id; use letters, digits, - and _, "
                f"at most 100 characters"
            )
    for agent, policy_id in run.agents.items():
        if policy_id not in run.policies:
            raise ValueError(f"agents.{agent}={policy_id!r} names no policy; policies has {sorted(run.policies)}")
    if not run.trainable:
        raise ValueError(
            f"policies: none of {sorted(run.policies)} is trainable; remove trainable=false from one (`stagecoach "
            f"evaluate` only plays them)"
        )


def _check_hierarchy(run: ConfigFields, hierarchy: HierarchyConfig) -> None:
    where, levels, named = "environment.hierarchy", hierarchy.levels, sorted(run.policies)
    if run.environment.api != "gymnasium" or run.league is not None or run.agents:
        found = "a league" if run.league else f"agents={run.agents}" if run.agents else "environment.api=pettingzoo"
        raise ValueError(
            f"{where} with {found}: a hierarchy needs a Gymnasium environment, and its levels (or options) are "
            f"the only agents; leave one of them out"
        )
    if hierarchy.options is not None:
        _check_options(run, hierarchy.options)
        return
    if sorted(level.policy for level in levels) != named:
        raise ValueError(
            f"{where}.levels has the policies {[level.policy for level in levels]}, and policies has {named}; give "
            f"each level a section in policies, and each policy a level"
        )
    for number, level in enumerate(levels):
        if number + 1 < len(levels):
            _check_turns(run, repr(level.policy), hierarchy.turns_within(number), "lower `every`")
        algorithm = run.policies[level.policy].algorithm or run.algorithm
        if hierarchy.test_subgoals and number and not isinstance(algorithm, OffPolicyConfig):
            raise ValueError(
                f"{where}.test_subgoals={hierarchy.test_subgoals:g} with policies.{level.policy}.algorithm.name="
                f"{algorithm.name}: it learns only from its own samples, but tests act greedily; below the "
                f"top level, use an algorithm with a replay buffer (ddpg, td3, sac, dqn), or test_subgoals=0"
            )
        buffer = getattr(algorithm, "replay_buffer", None)
        if isinstance(buffer, HindsightReplay):
            _check_hindsight(hierarchy, number, buffer, getattr(algorithm, "n_step", 1))


def _check_options(run: ConfigFields, options: OptionsConfig) -> None:
    where, algorithms = "environment.hierarchy.options", list(run.algorithms().values())
    if len(algorithms) > 1 or not isinstance(algorithms[0], OnPolicyConfig):
        raise ValueError(
            f"{where} with policies {sorted(run.policies)} of {[its.name for its in algorithms]}: options "
            f"need a single policy and an on-policy algorithm; use ppo, appo, a2c or impala, and one policy"
        )
    _check_turns(run, "the controller", 1 + max(options.lengths), f"leave the longest of {where}.lengths out")


def _check_turns(run: ConfigFields, whose: str, turns: int, otherwise: str) -> None:
    if (steps := run.rollout.fragment_steps) < 2 * turns:
        raise ValueError(
            f"rollout.fragment_steps={steps} with environment.hierarchy: an action of {whose} lasts up to {turns} "
            f"steps of all agents, and actions cut off at a fragment's end are not learned from; set "
            f"rollout.fragment_steps to {2 * turns} or more, or {otherwise}"
        )


def _check_hindsight(hierarchy: HierarchyConfig, number: int, buffer: HindsightReplay, n_step: int) -> None:
    level, below = hierarchy.levels[number], hierarchy.levels[number + 1 :]
    where = f"policies.{level.policy}.algorithm.replay_buffer"
    told = (hierarchy.reward_of(number), level.threshold, True)
    if buffer.reward == "sparse" and (buffer.reward, buffer.threshold, buffer.terminates) != told:
        raise ValueError(
            f"{where} has reward=sparse, threshold={buffer.threshold} and terminates={str(buffer.terminates).lower()}, "
            f"and the level of {level.policy!r} reward={told[0]}, threshold={told[1]}, and ends when its goal is "
            f"achieved; set the same values on both, and terminates: true"
        )
    if buffer.hindsight_actions and (not below or n_step > 1):
        raise ValueError(
            f"{where}.hindsight_actions=true with algorithm.n_step={n_step}: it needs a level "
            f"below and n_step=1; leave it out, or set n_step=1"
        )
    if buffer.missed_penalty is not None and not (below and hierarchy.test_subgoals):
        raise ValueError(
            f"{where}.missed_penalty={buffer.missed_penalty:g}: goals of {level.policy!r} are never tested; leave it "
            f"out, or set environment.hierarchy.test_subgoals, for example to 0.3 (the bottom level sets no goals)"
        )


def _check_critics(run: ConfigFields, policy_id: str, algorithm: AlgorithmConfig) -> None:
    if (observes := run.policies[policy_id].critic_observes) == "own":
        return
    mixes = isinstance(algorithm, QMIXConfig) and observes == "state"
    if not (mixes or isinstance(algorithm, OnPolicyConfig)) or run.environment.api == "gymnasium":
        raise ValueError(
            f"policies.{policy_id}.critic_observes={observes} with algorithm.name={algorithm.name} and environment.api="
            f"{run.environment.api}: it needs several agents and ppo, appo, impala or a2c, or qmix with "
            f"critic_observes=state; set critic_observes=own"
        )


def _check_no_core(run: ConfigFields, other: str, why: str) -> None:
    for policy_id, policy in sorted(run.policies.items()):
        if policy.core != "none":
            raise ValueError(f"policies.{policy_id}.core={policy.core} with {other}: {why}; set core=none")
