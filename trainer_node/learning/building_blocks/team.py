"""Joint observations of a policy's agents for a centralized critic, computed from a fragment's columns."""

import numpy as np

from stagecoach.shared.experience.spaces import Columns, SpaceSpec
from stagecoach.shared.policies.critic import MASK, NUMBER, TEAM


def with_team(columns: Columns, observation: SpaceSpec, agents: int) -> Columns:
    """Adds joint observations of the `agents` to a fragment's columns, for steps, bootstraps and last observations:
    `[…, A, …]`, the slot's own agent first; `[…, A]` (bool) says which agents are present, `[…]` is the own agent's
    number. Slot = agent's number × N + environment. At another agent's last observation, an agent has its own last
    observation if truncated, its next one if it continues, and is absent if terminated. Values of absent agents are
    undefined."""
    mask, (step, slot) = columns["mask"], columns["final_index"].T
    num_envs = mask.shape[1] // agents
    number, environment = np.divmod(np.arange(mask.shape[1]), num_envs)
    order = np.array([[own, *(other for other in range(agents) if other != own)] for own in range(agents)])
    team = order[number] * num_envs + environment[:, np.newaxis]
    after_there = mask & ~(columns["terminated"] | columns["truncated"])
    last_there = after_there[-1].copy()
    after_there[step, slot] = ~columns["terminated"][step, slot]
    at_ends = step[:, np.newaxis], team[slot]
    made = {NUMBER: np.broadcast_to(number, mask.shape).copy(), "bootstrap_" + NUMBER: number}
    made["final_" + NUMBER] = number[slot]
    for name in observation.column_names("obs"):
        after = np.concatenate([columns[name][1:], columns["bootstrap_" + name][np.newaxis]])
        last_there |= after[-1].reshape(len(number), -1).any(axis=1)  # who begins just then: an absent one has zeros
        after[step, slot] = columns["final_" + name]
        made[TEAM + name] = columns[name][:, team]
        made["bootstrap_" + TEAM + name] = columns["bootstrap_" + name][team]
        made["final_" + TEAM + name] = after[at_ends]
    made |= {MASK: mask[:, team], "bootstrap_" + MASK: last_there[team], "final_" + MASK: after_there[at_ends]}
    return columns | made
