"""APPO of Sample Factory, in the peer's own virtual environment. Settings: `arguments`, those of its command line,
`seed`, and `folder`, where it keeps its experiment.
"""

from __future__ import annotations

from typing import Any

from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.misc import EPISODIC
    from sample_factory.train import make_runner
    from sf_examples.train_gym_env import parse_custom_args, register_custom_components

    class Telling(AlgoObserver):  # type: ignore[misc]
        """Tells after each training iteration, what the learner has counted."""

        episodes = 0

        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            returns = runner.policy_avg_stats.get("reward", [()])[0]
            tell(runner.env_steps.get(0, 0), self.episodes, sum(returns) / len(returns) if returns else None)

        def ended(self, runner: Any, message: dict[str, Any], policy_id: int) -> None:
            self.episodes += getattr(message[EPISODIC]["reward"], "size", 1)  # an array with batched sampling

    register_custom_components()
    arguments = [
        "--algo=APPO", "--env=CartPole-v1", f"--train_dir={settings['folder']}", "--experiment=contest",
        "--device=cpu", f"--stats_avg={WINDOW_EPISODES}", f"--seed={settings['seed']}", *settings["arguments"],
    ]  # fmt: skip
    _, runner = make_runner(parse_custom_args(arguments))
    telling = Telling()
    runner.register_observer(telling)
    runner.policy_msg_handlers[EPISODIC].append(telling.ended)
    runner.init()
    runner.run()


if __name__ == "__main__":
    train(*given())
