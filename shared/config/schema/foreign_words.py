"""Words of Stable-Baselines3, RLlib, CleanRL, Sample Factory and ML-Agents, and the fields that they mean here."""

_FIELDS = {
    "n_steps num_steps rollout_fragment_length recurrence": (
        "rollout.fragment_steps? It counts the steps of each environment; an update learns from "
        "rollout.fragments_per_update fragments of environment.num_envs environments each. N-step returns are "
        "algorithm.n_step"
    ),
    "batch_size sgd_minibatch_size mini_batch_size": (
        "algorithm.minibatch_size? An update's batch is rollout.fragments_per_update × rollout.fragment_steps × "
        "environment.num_envs"
    ),
    "train_batch_size train_batch_size_per_learner": (
        "rollout.fragments_per_update? Set it to the batch / (rollout.fragment_steps × environment.num_envs); with a "
        "replay buffer the batch is algorithm.minibatch_size"
    ),
    "num_minibatches n_minibatches num_batches_per_epoch": (
        "algorithm.minibatch_size? It is the update's batch / the number of minibatches"
    ),
    "lr learning_rate_init policy_lr pi_lr actor_lr actor_learning_rate": "algorithm.learning_rate?",
    "q_lr critic_lr vf_lr": "algorithm.critic_learning_rate? It is a field of algorithms with a replay buffer",
    "anneal_lr lr_schedule lr_decay": (
        "algorithm.learning_rate? A schedule is {kind: linear, start: 3e-4, end: 0, over: 100000 env_steps}"
    ),
    "callback callbacks": "metrics.writers? stagecoach.train takes callbacks=[Class]",
    "total_timesteps total_frames total_steps total_env_steps timesteps_total n_timesteps timesteps num_timesteps "
    "train_for_env_steps num_env_steps num_env_steps_sampled_lifetime num_frames env_steps": (
        "stop_at.env_steps? stagecoach.train takes env_steps"
    ),
    "training_iteration training_iterations num_iterations n_iterations iterations": "stop_at.updates?",
    "episode_reward_mean episode_return_mean reward_threshold": "stop_at.mean_return?",
    "num_env_runners num_workers num_rollout_workers n_workers num_actors n_jobs": (
        "rollout.workers? Each worker has environment.num_envs environments"
    ),
    "n_envs num_envs": (
        "environment.num_envs? It counts the environments of each worker: rollout.workers × environment.num_envs in all"
    ),
    "num_envs_per_worker num_envs_per_env_runner": "environment.num_envs?",
    "ent_coef entropy_coeff entropy_coef exploration_loss_coeff": (
        "algorithm.entropy_coefficient? SAC's is algorithm.initial_temperature, and algorithm.learn_temperature is "
        "'auto'"
    ),
    "initial_alpha alpha init_temperature": "algorithm.initial_temperature?",
    "autotune": "algorithm.learn_temperature?",
    "vf_coef vf_loss_coeff value_loss_coeff value_coef": "algorithm.value_coefficient?",
    "clip_param clip_coef ppo_clip_ratio clip_ratio": "algorithm.clip_range?",
    "clip_range_vf vf_clip_param clip_vloss ppo_clip_value": "algorithm.clip_range_value?",
    "lambda lambda_ gae_lambda lambd": "algorithm.gae_lambda? V-trace's (impala, appo) is algorithm.vtrace_lambda",
    "num_sgd_iter n_epochs update_epochs num_epochs num_epoch": "algorithm.epochs?",
    "norm_adv normalize_advantage": "algorithm.normalize_advantages?",
    "kl_target": "algorithm.target_kl?",
    "grad_clip clip_grad": "algorithm.max_grad_norm?",
    "discount discount_factor": "algorithm.gamma?",
    "adam_eps adam_beta1 optimizer optim": "algorithm.adam_epsilon? The optimizer is Adam, with algorithm.weight_decay",
    "buffer_size replay_buffer_config buffer_capacity replay_size": (
        "algorithm.replay_buffer? Its size is algorithm.replay_buffer.capacity, in transitions"
    ),
    "prioritized_replay prioritized_replay_alpha": (
        "algorithm.replay_buffer? Priorities are {kind: prioritized, alpha: 0.6}"
    ),
    "learning_starts num_steps_sampled_before_learning_starts start_steps warmup_steps": (
        "heatup? Give it a unit: heatup: 1000 env_steps"
    ),
    "tau polyak": "algorithm.tau? It is a field of algorithms with a target network",
    "target_update_interval target_network_update_freq target_network_frequency target_update_freq": (
        "algorithm.target_update_steps? It counts gradient steps: the interval × algorithm.gradient_steps_per_env_step "
        "(or those of one train_freq, if these are more: Stable-Baselines3 moves its target only between them)"
    ),
    "train_freq train_frequency gradient_steps training_intensity utd_ratio": (
        "algorithm.gradient_steps_per_env_step? It is gradient steps / env steps: 0.25 is a train_freq of 4"
    ),
    "policy_frequency": "algorithm.policy_delay?",
    "target_policy_noise policy_noise": "algorithm.target_noise?",
    "exploration_fraction exploration_initial_eps exploration_final_eps exploration_config start_e end_e epsilon "
    "epsilon_timesteps": (
        "algorithm.exploration? ε-greedy is {kind: epsilon_greedy, epsilon: {kind: linear, start: 1, end: 0.05, over: "
        "10000 env_steps}}, where `over` is exploration_fraction × stop_at.env_steps"
    ),
    "action_noise exploration_noise": "algorithm.exploration? Noise is {kind: gaussian} or {kind: ou}",
    "num_atoms n_atoms": "algorithm.atoms? They belong to algorithm.head: c51",
    "n_quantiles": "algorithm.quantiles? They belong to algorithm.head: qr, and to tqc",
    "top_quantiles_to_drop_per_net": "algorithm.dropped_quantiles?",
    "double_q": "algorithm.double?",
    "algo algorithm_name trainer_type agent": "algorithm.name?",
    "net_arch fcnet_hiddens mlp_layers encoder_mlp_layers hidden_units layers hidden_sizes": (
        "policies.default.hidden_sizes?"
    ),
    "policy_kwargs model model_config network network_settings": (
        "policies.default? fcnet_hiddens and net_arch are policies.default.hidden_sizes, fcnet_activation and "
        "activation_fn are policies.default.activation, use_lstm is policies.default.core: lstm, a class of your own "
        "is policies.default.network"
    ),
    "activation_fn fcnet_activation nonlinearity activation": "policies.default.activation?",
    "conv_filters encoder_conv_architecture": "policies.default.cnn?",
    "use_lstm use_rnn lstm gru rnn_type core": "policies.default.core? It is lstm or gru",
    "lstm_cell_size lstm_hidden_size rnn_size": "policies.default.core_size?",
    "vf_share_layers share_features_extractor actor_critic_share_weights": "policies.default.share_encoder?",
    "norm_obs normalize_input observation_filter normalize normalize_observations": (
        "policies.default.normalize_observations?"
    ),
    "norm_reward normalize_returns normalize_rewards": "policies.default.normalize_rewards?",
    "clip_reward clip_rewards": "policies.default.reward_clip? Give both bounds, as in [-1, 1]",
    "policy": (
        "policies? It holds networks by policy id; MlpPolicy or CnnPolicy follows from the spaces, "
        "policies.default.hidden_sizes sets its layers"
    ),
    "multiagent multi_agent policy_mapping_fn": "agents and policies? See docs/guides/policies.md",
    "policies_to_train": "policies.default.trainable? Set it to false for each policy that only acts",
    "rl_module_spec rl_module rl_module_specs custom_model": (
        "policies.default.network? It names a class that derives from a policy (docs/how-to/own-network.md)"
    ),
    "learner_class custom_loss": "algorithm.name? It may name a class of yours (docs/how-to/own-loss.md)",
    "env_runners": (
        "rollout? It has workers (num_env_runners) and fragment_steps; environment.num_envs are those of each worker"
    ),
    "learners": "trainer? It has ranks (num_learners) and device",
    "training": "algorithm?",
    "connectors env_to_module_connector module_to_env_connector learner_connector": (
        "environment.wrappers? See docs/guides/filters.md"
    ),
    "env env_id env_name gym_id env_class": "environment.id?",
    "env_config env_kwargs": (
        "environment.kwargs? stagecoach.train takes env_kwargs. RLlib's env_config is one argument of the environment: "
        "{config: {…}}"
    ),
    "horizon time_limit": "environment.max_episode_steps?",
    "frame_stack frame_skip n_stack env_frameskip env_framestack": (
        "environment.wrappers? For example {path: gymnasium.wrappers:FrameStackObservation, kwargs: {stack_size: 4}}"
    ),
    "batch_mode": "rollout.complete_episodes?",
    "num_cpus_per_worker num_cpus_per_env_runner": "rollout.num_cpus?",
    "num_gpus_per_worker num_gpus_per_env_runner": "rollout.num_gpus?",
    "device cuda num_gpus num_gpus_per_learner": "trainer.device? That of the workers is rollout.device",
    "num_learners num_learner_workers": "trainer.ranks?",
    "eval_freq evaluation_interval eval_every": (
        "evaluation.every? Give it a unit: 10000 env_steps; by default each checkpoint is evaluated"
    ),
    "n_eval_episodes evaluation_duration num_eval_episodes eval_episodes": "evaluation.episodes?",
    "save_freq checkpoint_freq checkpoint_frequency checkpoint_at_end": (
        "checkpoint.every? Give it a unit: 10000 env_steps; the last checkpoint is always written"
    ),
    "save_every_sec": "checkpoint.every_seconds?",
    "num_to_keep": "checkpoint.keep_last?",
    "tensorboard_log track wandb_project_name with_wandb logger logger_config": (
        "metrics.writers? By default metrics are written as CSV and for TensorBoard, below runs_dir"
    ),
    "log_interval summary_freq": "metrics.every? Give it a unit: 10 updates",
    "log_dir train_dir save_path storage_path local_dir results_dir output_dir": "runs_dir?",
    "best_model_save_path": "runs_dir? The best checkpoint is kept in the run's folder: run.policy('best')",
    "restore load load_path pretrained": "initialize_from?",
    "features_extractor_class features_extractor_kwargs": (
        "policies.default.network? It names a class derived from stagecoach.ActorCritic (docs/how-to/own-network.md)"
    ),
    "wrapper_class env_wrapper": "environment.wrappers?",
    "vec_env_cls": "environment.vectorization? It is sync, async or native; each of rollout.workers is a process",
    "vec_normalize vecnormalize": (
        "policies.default.normalize_observations? Rewards are policies.default.normalize_rewards"
    ),
    "random_seed random_state": "seed?",
    "evaluation_num_env_runners evaluation_num_workers evaluation_parallel_to_training": (
        "evaluation.num_envs? One process plays these during the training"
    ),
    "evaluation_config": "evaluation?",
    "time_total_s": "stop_at.hours?",
}
"""Words → the field that is probably meant, with what differs."""
_NEEDLESS = {
    "verbose log_level debug progress_bar": (
        "leave it out: `stagecoach train` shows the run live, `stagecoach status RUN` in detail"
    ),
    "framework": "leave it out: PyTorch is the only one",
    "use_gae use_critic": "leave it out: PPO always estimates advantages by GAE, with a critic",
    "kl_coeff use_kl_loss": "leave it out: PPO has no KL penalty; algorithm.target_kl bounds an update's divergence",
    "restart_failed_env_runners ignore_env_runner_failures": "leave it out: workers that die are always replaced",
    "normalize_actions clip_actions": "leave it out: actions are always clipped to the bounds of a Box",
    "torch_deterministic deterministic": "leave it out: updates are deterministic on a CPU",
    "eval_env": "leave it out: the evaluator makes its own from environment",
    "monitor_dir tb_log_name": "leave it out: returns and lengths are always recorded, in the run's folder",
    "resume reset_num_timesteps": "leave it out: `stagecoach resume RUN`, or Run.resume(RUN), continues a run",
    "optimize_memory_usage clip_obs": "leave it out: this is not configurable",
    "use_sde sde_sample_freq": "leave it out: state-dependent exploration is not available",
    "capture_video record_video": "leave it out: `stagecoach evaluate RUN --video DIR` records a trained policy",
    "exp_name experiment experiment_name run_name run_id": (
        "leave it out: a run is named when it starts, by `--run-id NAME` or run_id=NAME"
    ),
    "self_play save_steps team_change swap_steps play_against_latest_model_ratio initial_elo behaviors hyperparameters "
    "time_horizon keep_checkpoints max_steps": "ML-Agents' words are translated in docs/coming-from/ml-agents.md",
}
"""Words that have no field → the reason, or where they are translated."""

HINTS = {word: f"did you mean {hint}" for words, hint in _FIELDS.items() for word in words.split()} | {
    word: hint for words, hint in _NEEDLESS.items() for word in words.split()
}
"""Word → hint of an error message."""

ALGORITHMS = {
    "a3c": "a2c, which is A3C in lockstep",
    "apex": "dqn or rainbow, with several rollout.workers",
    "apexdqn": "dqn or rainbow, with several rollout.workers",
    "c51": "dqn with head: c51",
    "ddqn": "dqn, which is double DQN by default",
    "duelingdqn": "dqn with dueling: true",
    "gail": "ppo with reward_signals: {gail: …}",
    "her": "sac, td3 or dqn with replay_buffer: {kind: hindsight}",
    "hac": "environment.hierarchy (docs/guides/hierarchy.md)",
    "icm": "ppo with reward_signals: {icm: …}",
    "ippo": "ppo",
    "maddpg": "qmix or vdn, or ppo with policies.default.critic_observes: team",
    "mappo": "ppo with policies.default.critic_observes: team",
    "marwil": "bc or iql",
    "maskableppo": "ppo, which masks illegal actions by itself",
    "poca": "ppo with policies.default.critic_observes: team",
    "qrdqn": "dqn with head: qr",
    "recurrentppo": "ppo with policies.default.core: lstm",
    "reinforce": "a2c",
    "rnd": "ppo with reward_signals: {rnd: …}",
    "trpo": "ppo with target_kl",
}
"""Names of other algorithms → what is nearest here."""
