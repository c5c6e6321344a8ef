"""Plays the corridor through the gateway at STAGECOACH_URL, for `stagecoach gateway conformance`."""

import os
import sys

from stagecoach_client import GatewayRefused, Session  # type: ignore[import-not-found]

GOAL, MOST_STEPS = 5, 20


def episode(session: Session) -> None:
    position = steps = 0
    action = session.reset([position, steps])
    while action is not None:
        position, steps = max(0, position + (1 if action else -1)), steps + 1
        terminated = position == GOAL
        truncated = steps == MOST_STEPS and not terminated
        info = {"steps": steps} if terminated or truncated else {}
        action = session.step(0.5 * position, [position, steps], terminated, truncated, info)


def main() -> int:
    url, token, name = (os.environ[f"STAGECOACH_{its}"] for its in ("URL", "TOKEN", "SESSION"))
    session = Session(url, token, name, journal=os.environ.get("STAGECOACH_JOURNAL"))
    try:
        for _ in range(int(os.environ["STAGECOACH_EPISODES"])):
            episode(session)
        left = session.settle(60)
    except GatewayRefused as error:
        print(error, file=sys.stderr)
        return 2
    session.close()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
