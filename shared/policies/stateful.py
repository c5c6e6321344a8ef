"""A policy and the state that it acts from: to whoever only acts, a policy like any other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shared.policies.policy import Policy


class Stateful(Policy):
    """Acts on the observations of the same slots, step after step."""

    def __init__(self, policy: Policy, state: Tensor) -> None:
        nn.Module.__init__(self)  # weights and normaliser are the policy's
        self.spaces, self.config, self.network = policy.spaces, policy.config, policy.network
        self.distribution, self.normaliser = policy.distribution, policy.normaliser
        self._policy = policy
        self.state = state
        """`[S, state_size]`: what it remembers."""

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[S, P]` for `self.distribution`; from now on it remembers these observations."""
        params, self.state = self._policy.step(observations, self.state)
        return params

    def forget(self, over: Tensor) -> None:
        """The episodes of the slots where `over` `[S]` have ended."""
        self.state = self.state.masked_fill(over.unsqueeze(1), 0.0)


def with_states(
    policies: Mapping[str, Policy], slots: Mapping[str, int], states: Mapping[str, Tensor] | None = None
) -> dict[str, Stateful]:
    """Those of the policies that remember something; each goes on from its state, or begins with so many slots."""
    known, found = states or {}, {}
    for policy_id, policy in policies.items():
        if policy.state_size:
            state = known[policy_id] if policy_id in known else policy.initial_state(slots[policy_id])
            found[policy_id] = Stateful(policy, state)
    return found
