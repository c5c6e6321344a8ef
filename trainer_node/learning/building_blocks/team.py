"""What the agents of a policy observe together, for a centralized critic: columns made from those of a fragment."""

import numpy as np

from stagecoach.shared.experience.spaces import Columns, SpaceSpec
from stagecoach.shared.policies.critic import MASK, NUMBER, TEAM


def with_team(columns: Columns, observation: SpaceSpec, agents: int) -> Columns:
    """A fragment's columns, and for each step, after the last one, and for each last observation of an episode: what
    the `agents` of its environment observe then (`[…, A, …]`, its own agent first and then the others in their order),
    which of them are there (`[…, A]`, bool), and its own agent's number (`[…]`).

    Slot = agent's number × N + environment. What an absent agent "observes" is without meaning. Beside a last
    observation, another agent has its own last one if it was truncated, what it observes next if its episode goes on,
    and is absent if it terminated, as it would be at the next step.
    """
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
