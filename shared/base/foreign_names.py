"""Names of Stable-Baselines3's and RLlib's Python interfaces, and what is used here instead."""

_NAMES = {
    "predict": (
        "act(observation) returns the action alone, and act_batch(observations) those of a batch; greedy=False is "
        "deterministic=False"
    ),
    "learn fit": "stagecoach.train('CartPole-v1', algorithm='ppo', env_steps=20_000) trains",
    "save": "checkpoints are kept in the run's folder; run.export('DIR') copies one",
    "load": "stagecoach.load_policy('runs/RUN') loads a trained policy",
    "evaluate_policy": "run.evaluate(episodes=20).scores plays a policy; stagecoach.Run.attach('RUN') is a former run",
    "make_vec_env DummyVecEnv SubprocVecEnv VecEnv": (
        "name the environment: stagecoach.train('CartPole-v1', workers=2, **{'environment.num_envs': 8})"
    ),
    "VecNormalize": "set policies.default.normalize_observations and normalize_rewards",
    "VecFrameStack": "name a wrapper of Gymnasium's in environment.wrappers",
    "Monitor": "returns and lengths are always recorded",
    "EvalCallback": "evaluation is on by default (evaluation.every); run.policy('best') is the best policy",
    "CheckpointCallback": "checkpoints are on by default (checkpoint.every)",
    "StopTrainingOnRewardThreshold": "set stop_at.mean_return",
    "BaseCallback": "derive from stagecoach.Callback",
    "check_env": "`stagecoach check MODULE:CLASS` checks an environment",
    "register_env": "give the class or function itself: stagecoach.train(MyEnv, env_kwargs={'config': {…}})",
    "environment env_runners training learners rl_module build build_algo": (
        "stagecoach.train('CartPole-v1', algorithm='ppo', workers=2) trains (docs/coming-from/rllib.md)"
    ),
    "train": "a run trains by itself: `for event in run` yields evaluations, run.last_metrics()[1] the last update",
    "restore from_checkpoint restore_from_path": "stagecoach.Run.resume('RUN') continues a run",
    "compute_single_action get_policy get_module": "run.policy('best').act(observation) acts",
    "DDPG": "train('Pendulum-v1', algorithm='ddpg')",
}

FOREIGN_NAMES = {name: hint for names, hint in _NAMES.items() for name in names.split()}
"""Name → what to use, for the message of an `AttributeError`."""


def missing(what: str, name: str) -> AttributeError:
    """Returns the error of an object without this attribute."""
    return AttributeError(f"{what} has no {name!r}{f'; {FOREIGN_NAMES[name]}' if name in FOREIGN_NAMES else ''}")
