"""Description of an environment (agents and spaces as data), and checks of the config's policies against it."""

import contextlib
import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from stagecoach.rollout_worker.environments.action_masks import choices, marked, space_with_mask
from stagecoach.rollout_worker.environments.factory import evaluation_environment, make_environment, parameterized
from stagecoach.rollout_worker.environments.pettingzoo_env import state_space
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable, UnsupportedSpace, headline, place
from stagecoach.shared.config.compatibility import check_minibatches
from stagecoach.shared.config.environments.parameters import evaluated_table, table_at
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.goals import MISSED
from stagecoach.shared.experience.spaces import STATE, EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec

SINGLE_AGENT = "default"


def describe_environment(config: Config) -> EnvironmentDescription:
    """Makes the config's environment, returns its description as `describe` does, and closes it."""
    env = make_environment(config.environment)
    try:
        found = describe(config, env)
        env = _try_parameters(config, env)
        return found
    finally:
        with contextlib.suppress(Exception):  # no longer needed
            env.close()


def _try_parameters(config: Config, env: Any) -> Any:
    """Resets the environment with the parameters of the first and the last lessons; raises `EnvironmentUnusable` if it
    rejects them. Returns the environment, which may have been rebuilt."""
    environment = config.environment
    if not environment.parameters or environment.vectorization == "native" or environment.api == "external":
        return env
    giving = parameterized(environment)
    first = {name: 0 for name, entry in environment.parameters.items() if entry.lessons}
    for table in (table_at(environment.parameters, first), evaluated_table(environment.parameters, {})):
        assert table is not None
        env, options = giving.prepare(env, table.draw(0))
        try:
            env.reset(seed=0, options=options)
        except (Exception, SystemExit) as error:
            with contextlib.suppress(Exception):
                env.close()  # the caller knows only the first one
            raise EnvironmentUnusable(
                f"{environment.id} cannot be reset with environment.parameters {table.draw(0)} "
                f"(parameters_by={environment.parameters_by}): {headline(error)}{place(error)}"
            ) from error
    return env


def describe(config: Config, env: Any) -> EnvironmentDescription:
    """Returns agents, spaces and policies; raises `EnvironmentUnusable`, `UnsupportedSpace` or `ConfigError`."""
    found = _read_spaces(config, env)
    if unknown := [name for name in config.agents if name not in found and not fnmatch.filter(found, name)]:
        raise ConfigError(f"agents names {sorted(unknown)}, but the environment has {sorted(found)}")
    several, levels = config.environment.api == "pettingzoo", config.environment.hierarchy
    agents: dict[str, str] = {}
    policies: dict[str, PolicySpaces] = {}
    for agent in found:
        try:
            policy_id = agents[agent] = config.policy_of(agent)
        except KeyError:
            raise ConfigError(
                f"agent {agent!r} is mapped to no policy; add agents.{agent}: one of {sorted(config.policies)} (agents "
                f"names {list(config.agents)})"
            ) from None
        described = _policy_spaces(config, env, found, agent)
        if policies.setdefault(policy_id, described) != described:
            differ = f"agents of policy {policy_id!r} have different spaces"
            raise ConfigError(f"{differ}; give {agent!r} a policy of its own")
    sides, seats = config.seating(agents)
    policies |= {policy_id: policies[seat] for policy_id, seat in seats.items()}
    if unused := sorted(set(config.policies) - set(policies)):
        raise ConfigError(f"policies {unused} have no agent; the environment's agents are {sorted(found)}")
    external = config.environment.api == "external"  # each slot at its own pace
    in_turns = levels is not None or external or (several and hasattr(env, "agent_iter"))
    _check_turns(config, in_turns)
    info_columns = config.environment.info_columns
    if levels is not None and levels.test_subgoals and MISSED not in info_columns:
        info_columns = (*info_columns, MISSED)
    return EnvironmentDescription(agents, policies, info_columns, in_turns, seats, sides)


def _read_spaces(config: Config, env: Any) -> dict[str, Any]:
    several = config.environment.several_agents
    try:
        if several:
            found = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}
        else:
            found = {SINGLE_AGENT: (env.observation_space, env.action_space)}
    except Exception as error:
        way = "set both in __init__ (PettingZoo: methods that take an agent)"
        if hasattr(env, "observation_spaces"):
            way = "docs/guides/policies.md adapts RLlib's MultiAgentEnv to PettingZoo"
        raise EnvironmentUnusable(
            f"{config.environment.id} has no usable spaces ({type(error).__name__}: {error}); expected an "
            f"observation_space and an action_space; {way}"
        ) from None
    for agent, pair in found.items():
        if not isinstance(agent, str):
            raise EnvironmentUnusable(
                f"{config.environment.id}: possible_agents names an agent {agent!r} ({type(agent).__name__}); expected "
                f"text, which identifies agents and policies; name it such as 'agent_{agent}'"
            )
        for space, name in zip(pair, ("observation_space", "action_space"), strict=True):
            if not isinstance(space, spaces.Space):
                whose = f" of {agent}" if several else ""
                raise EnvironmentUnusable(
                    f"{config.environment.id}: its {name}{whose} is {space!r:.60}; expected a space of "
                    f"gymnasium.spaces, such as Box(-1, 1, (3,)) or Discrete(2); set it in __init__"
                )
    if config.environment.action_mask == "info" and config.environment.api == "pettingzoo":
        return {agent: (space_with_mask(seen, sum(choices(action))), action) for agent, (seen, action) in found.items()}
    return found


def _policy_spaces(config: Config, env: Any, found: Mapping[str, Any], agent: str) -> PolicySpaces:
    levels, (observation, action) = config.environment.hierarchy, found[agent]
    with_options = levels is not None and levels.options is not None  # their mask contains the environment's
    source = "observation" if with_options else config.environment.action_mask
    acted = describe_space(action)
    observed = marked(describe_space(observation), acted, source, agent, boxes=with_options)
    if config.policies[config.policy_of(agent)].critic_observes == "state":
        leaves = list(observed.leaves)
        state = _describe(state_space(env, {name: seen for name, (seen, _) in found.items()}), STATE, leaves)
        observed = SpaceSpec(tuple(leaves), {"tuple": [observed.structure, state]})
    return PolicySpaces(observed, acted)


def check_new(config: Config, description: EnvironmentDescription) -> None:
    """Raises `ConfigError` for settings that would not do what they say. Only new runs are checked: an existing one can
    still be resumed and played."""
    _check_patterns(config, description.agents)
    config.check_stops(description.agents)
    for policy_id, spaces_of in description.policies.items():
        _check_convolutions(f"policies.{policy_id}.cnn", config.policies[policy_id].cnn, spaces_of.observation.own)
    if config.environment.api == "pettingzoo":
        slots = {id_: 1 if description.in_turns else description.slots(id_) for id_ in config.policies}
        check_minibatches(config, slots)
    steps, agents = config.rollout.fragment_steps, len(description.agents)
    alone = config.environment.hierarchy is None and config.dataset is None and config.environment.api != "external"
    if description.in_turns and alone and steps < 2 * agents:  # the last turn of each agent in a fragment is lost
        raise ConfigError(
            f"rollout.fragment_steps={steps} counts the turns of all {agents} agents, and a turn whose outcome comes "
            f"after a fragment's end is not learned from: half of them or more would be lost; set it to {10 * agents} "
            f"or more"
        )


def _check_convolutions(field: str, cnn: object, observation: SpaceSpec) -> None:
    seen = [leaf for leaf in observation.leaves if not leaf.mask]
    if cnn == "auto" or any(leaf.is_image for leaf in seen):
        return
    shown = ", ".join(f"{leaf.path or 'space'} {list(leaf.shape)} of {leaf.dtype}" for leaf in seen)
    raise ConfigError(
        f"{field} would change nothing: convolutions see images alone, arrays of three or four axes of uint8 or bool, "
        f"and observed is {shown}; return such images from the environment, or remove cnn"
    )


def _check_patterns(config: Config, agents: Collection[str]) -> None:
    """Raises `ConfigError` for a pattern whose agents all belong to another entry; `*` may match none."""
    deciding = {config.entry_of(agent) for agent in agents}
    for pattern in (its for its in config.agents if its != "*"):
        fits = [agent for agent in fnmatch.filter(agents, pattern) if agent not in config.agents]
        other = [agent for agent in fits if config.policy_of(agent) != config.agents[pattern]]
        if pattern not in deciding and other:
            raise ConfigError(
                f"agents.{pattern}={config.agents[pattern]} maps no agent: {other[0]!r} is mapped by "
                f"{config.entry_of(other[0])!r}, which comes first; put {pattern!r} before it, or leave it out"
            )


def _check_turns(config: Config, in_turns: bool) -> None:
    together = [name for name, policy in config.policies.items() if policy.critic_observes != "own"]
    if in_turns and (together or {"vdn", "qmix"} & {each.name for each in config.algorithms().values()}):
        raise ConfigError(
            f"{config.environment.id} is played in turns, and a team's critic (critic_observes, vdn, qmix) learns what "
            f"agents do at the same time; use critic_observes=own and another algorithm, or a parallel environment"
        )


def check_evaluation(config: Config, description: EnvironmentDescription) -> None:
    """Makes the evaluation's environment; raises `ConfigError` if the policies cannot act in it."""
    if not config.evaluation.enabled:
        return
    played = describe_environment(config.model_copy(update={"environment": evaluation_environment(config)}))
    if (found := _arrays(played)) != (expected := _arrays(description)):
        raise ConfigError(
            f"the evaluation's environment (evaluation.wrappers, evaluation.kwargs) has other spaces than the one of "
            f"training: {found}, expected {expected}"
        )


def check_recorded(description: EnvironmentDescription, recorded: EnvironmentDescription) -> None:
    """Raises `EnvironmentUnusable` if a run's policies cannot act in the environment as it is now."""
    if (found := _arrays(description)) != (expected := _arrays(recorded)):
        raise EnvironmentUnusable(
            f"the environment has other spaces than the run was started with: {found}, expected {expected}"
        )


def _arrays(description: EnvironmentDescription) -> dict[str, Any]:
    """Returns the arrays that each agent observes and acts with, without the bounds of its observations."""
    arrays = {
        id_: ([(leaf.path, leaf.shape, leaf.dtype, leaf.nvec) for leaf in its.observation.leaves], its.action.leaves)
        for id_, its in description.policies.items()
    }
    return {agent: arrays[policy_id] for agent, policy_id in description.agents.items()}


def describe_space(space: spaces.Space[Any]) -> SpaceSpec:
    """Returns a Gymnasium space as data; raises `UnsupportedSpace` for text, graphs and sequences."""
    leaves: list[Leaf] = []
    structure = _describe(space, "", leaves)
    if not leaves:
        raise UnsupportedSpace(f"{space} holds nothing that could be observed or done")
    if len({leaf.path for leaf in leaves}) != len(leaves):
        paths = sorted(leaf.path for leaf in leaves)
        raise UnsupportedSpace(f"{space} has keys that become the same column name: {paths}")
    return SpaceSpec(tuple(leaves), structure)


def _describe(space: spaces.Space[Any], path: str, leaves: list[Leaf]) -> Any:
    below = f"{path}." if path else ""
    if isinstance(space, spaces.Dict):
        if odd := [key for key in space.spaces if not isinstance(key, str)]:
            raise UnsupportedSpace(f"{space} has the keys {odd}; expected text")
        if text := [key for key, item in space.spaces.items() if isinstance(item, spaces.Text)]:
            others = ", ".join(key for key in space.spaces if key not in text)
            raise UnsupportedSpace(
                f"{below}{text[0]}: Text spaces are not supported; leave it out by a wrapper, environment.wrappers: "
                f"[{{path: 'gymnasium.wrappers:FilterObservation', kwargs: {{filter_keys: [{others}]}}}}]"
            )
        return {"dict": {str(key): _describe(item, f"{below}{key}", leaves) for key, item in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"tuple": [_describe(item, f"{below}{index}", leaves) for index, item in enumerate(space.spaces)]}
    if 0 in (space.shape or ()):
        where = f"{path}: " if path else ""
        raise UnsupportedSpace(f"{where}{space} has no elements; expected at least one, or leave it out")
    leaves.append(_leaf(space, path))
    return len(leaves) - 1


def _leaf(space: spaces.Space[Any], path: str) -> Leaf:
    if isinstance(space, spaces.Box):
        low, high = _bounds(space.low), _bounds(space.high)
        return Leaf(path, "box", tuple(space.shape), str(space.dtype), low=low, high=high)
    if isinstance(space, spaces.Discrete):
        return Leaf(path, "discrete", (), str(space.dtype), nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        nvec = tuple(int(n) for n in space.nvec.flatten())
        start = tuple(int(n) for n in np.broadcast_to(space.start, space.nvec.shape).flatten())
        return Leaf(path, "multi_discrete", tuple(space.nvec.shape), str(space.dtype), nvec=nvec, start=start)
    if isinstance(space, spaces.MultiBinary):
        shape, size = tuple(int(n) for n in space.shape), int(np.prod(space.shape))
        return Leaf(path, "multi_binary", shape, str(space.dtype), nvec=(2,) * size, start=(0,) * size)
    where = f"{path}: " if path else ""
    raise UnsupportedSpace(
        f"{where}{type(space).__name__} spaces are not supported; expected Box, Discrete, MultiDiscrete, MultiBinary, "
        f"Dict or Tuple"
    )


def _bounds(values: Any) -> tuple[float, ...]:
    flat = np.asarray(values, np.float64).flatten()
    return (float(flat[0]),) if flat.size and (flat == flat[0]).all() else tuple(float(value) for value in flat)
