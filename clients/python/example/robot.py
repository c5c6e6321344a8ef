"""A robot that works in shifts out of reach, and learns from them at its dock.

python robot.py URL TOKEN [SHIFTS]: its arm has a motor that is too weak to lift it without swinging. On a shift it acts
by the policy that it fetched at the dock, and keeps a journal. Kill it at any time, and start it again.
"""

import math
import random
import sys

from stagecoach_client import Session  # type: ignore[import-not-found]
from stagecoach_policy import Policy  # type: ignore[import-not-found]

STEPS, EPISODES = 200, 3
"""Steps of an episode (10 seconds), and episodes of a shift."""


class Arm:
    """A rod of 1 m and 1 kg, pivoted at one end."""

    def reset(self) -> list[float]:
        self.angle, self.speed = random.uniform(-math.pi, math.pi), random.uniform(-1, 1)
        return self.observation()

    def observation(self) -> list[float]:
        return [math.cos(self.angle), math.sin(self.angle), self.speed]

    def advance(self, torque: float) -> float:
        """Advances by 50 ms; returns the reward, which is 0 at rest above the pivot."""
        away = math.remainder(self.angle, 2 * math.pi)
        reward = -(away**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed += 0.05 * (15 * math.sin(self.angle) + 3 * torque)
        self.speed = min(max(self.speed, -8.0), 8.0)
        self.angle += 0.05 * self.speed
        return reward


def episode(session: Session, arm: Arm) -> float:
    total, action = 0.0, session.reset(arm.reset())
    for step in range(1, STEPS + 1):
        reward = arm.advance(action[0])
        total += reward
        action = session.step(reward, arm.observation(), False, step == STEPS)
    return total


def main(url: str, token: str, shifts: int = 20) -> None:
    session, arm = Session(url, token, "arm", journal="journal.jsonl", policy=Policy), Arm()
    episode(session, arm)  # at the dock, where it gets its first policy
    for shift in range(1, shifts + 1):
        session.leave(3)  # the newest policy, once the trainer has learned from the last shift
        returns = [episode(session, arm) for _ in range(EPISODES)]
        kept = len(session.journal)
        session.join()
        left = session.settle(120)
        mean = sum(returns) / EPISODES
        print(
            f"shift {shift}: policy {session.version}, mean return {mean:.0f}; {kept} messages sent, {left} left",
            flush=True,
        )
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
