"""Sections of a run's config other than the algorithm's, with units and the reasons for defaults."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.config.algorithms.registry import AlgorithmField
from stagecoach.shared.config.environments.environment import BY_PATH, EnvironmentConfig, WrapperConfig
from stagecoach.shared.config.environments.parameters import SamplerField
from stagecoach.shared.config.league import LeagueConfig, LearnerConfig
from stagecoach.shared.config.recorded import DatasetConfig, DemonstrationsConfig
from stagecoach.shared.config.rollout import HeatupConfig, HeatupField, RolloutConfig
from stagecoach.shared.config.schema.section import Section, Width
from stagecoach.shared.config.services import GatewayConfig, RayConfig, RedisConfig, StoreConfig
from stagecoach.shared.experience.counters import AT_LEAST_ONE, Duration, DurationField

ConvolutionLayer = tuple[Width, Width, Width]
"""Channels, kernel and stride."""


class PolicyConfig(Section):
    """Network of one policy id."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the MLP; two of 64 are the reference for classic control."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Activation function; tanh is the usual choice for PPO on vectors."""
    layer_norm: bool = False
    """Normalizes each hidden layer's outputs before the activation, also in critics (Ba et al. 2016)."""
    cnn: (
        Literal["auto", "nature", "small", "residual"] | Annotated[tuple[ConvolutionLayer, ...], Field(min_length=1)]
    ) = "auto"
    """Convolutions for image observations. `nature` (Mnih et al. 2015) needs at least 36×36 pixels, `small` 5×5; `auto`
    is `nature` where it fits, else `small`. `residual` (IMPALA's, Espeholt et al. 2018) takes any size: slower, and
    often better. Or custom layers, `[[channels, kernel, stride], …]`, followed by one of 256 units: `[[128, 4, 1]]`
    sees each line of four on a board."""
    share_encoder: bool = False
    """Shares one encoder between actor and critic (usual for images, where it halves the cost)."""
    critic_observes: Literal["own", "team", "state"] = "own"
    """Input of an on-policy critic: its agent's observation (`own`), those of all agents of the policy at the same step
    (`team`), or also the environment's state, which agents of several policies share (`state`;
    docs/guides/centralized-critic.md). With `state`, QMIX mixes by the environment's state. Only learning uses it."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    normalize_observations: bool = False
    """Normalizes observations by running mean and variance, which the trainer learns and publishes with the policy."""
    normalize_rewards: bool = False
    """Divides rewards by the running standard deviation of the discounted return before learning."""
    reward_ewma: float | None = Field(None, gt=0, le=1)
    """Subtracts the exponentially weighted moving average of the rewards before learning; this is its step per fragment
    (0.01 in Coach). For tasks without an end or of a fixed length: where the policy controls the length of an episode,
    it changes which policy is best."""
    reward_scale: float = 1.0
    """Factor of all rewards, applied first."""
    reward_clip: tuple[float, float] | None = None
    """Bounds of the scaled rewards, for example `[-1, 1]` as usual for Atari. Metrics report unclipped rewards."""
    transform: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """`module:function` that transforms each fragment's columns `[T, S, …]` (shared/experience/fragment.py) before they
    are learned from or stored. It must depend on nothing else, since a resume calls it again."""
    clip_observations: float = Field(10.0, gt=0)
    """Bound of a normalized observation, in standard deviations."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent layer after the encoder, for algorithms that learn whole sequences (docs/algorithms/ppo.md)."""
    core_size: Width = 64
    """Units of the recurrent layer."""

    @property
    def state_size(self) -> int:
        """Size of the hidden state per slot; an LSTM's is outputs and cells."""
        return self.core_size * {"none": 0, "gru": 1, "lstm": 2}[self.core]

    @model_validator(mode="after")
    def _what_fits_together(self) -> Self:
        if self.critic_observes != "own" and (self.share_encoder or self.core != "none"):
            raise ValueError(
                f"critic_observes={self.critic_observes} with share_encoder={str(self.share_encoder).lower()} and core="
                f"{self.core}: actor and critic see different things; set share_encoder=false and core=none"
            )
        if self.core != "none" and not self.share_encoder:
            raise ValueError(
                f"core={self.core} with share_encoder=false: actor and critic have one core, and so one encoder before "
                f"it; set share_encoder=true"
            )
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            found = f"reward_clip={list(self.reward_clip)}"
            raise ValueError(f"{found} makes all rewards the same number; give the lower bound first")
        if self.reward_ewma is not None and self.normalize_rewards:
            raise ValueError(
                f"reward_ewma={self.reward_ewma:g} with normalize_rewards=true: two ways to normalize rewards; use one"
            )
        return self

    @property
    def changes_rewards(self) -> bool:
        """Learning sees other rewards than the environment's."""
        return self.reward_scale != 1.0 or self.reward_clip is not None or self.transform is not None


class NetworkConfig(Section):
    """A network of your own (docs/how-to/own-network.md)."""

    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:Class`, a class that derives from the algorithm's policy, such as `stagecoach.ActorCritic`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class."""


class RunPolicyConfig(PolicyConfig):
    """One policy id: its network, and how its learning differs from the run's other policies."""

    network: Annotated[NetworkConfig, BY_PATH] | None = None
    """Network of your own: `module:Class`, or `{path: "module:Class", kwargs: {…}}` (docs/how-to/own-network.md)."""
    algorithm: AlgorithmField | None = None
    """Fields that replace those of the run's `algorithm`. Another `name` starts from that algorithm's defaults;
    defaults of other sections follow the run's `algorithm` (docs/guides/policies.md)."""
    trainable: bool = True
    """Trains the policy. A frozen policy explores as after the end of all schedules, also in warm-up; its observation
    statistics stay as they are."""
    initialize_from: str | None = Field(None, min_length=1)
    """Source of this policy's initial weights, as the run's `initialize_from`. A source with a single policy needs no
    `#POLICY`."""

    @property
    def carried(self) -> PolicyConfig:
        """Returns the fields that travel with the weights."""
        return PolicyConfig.model_validate({name: getattr(self, name) for name in PolicyConfig.model_fields})


class TrainerConfig(Section):
    """Trainer process."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the trainer: `auto` takes a GPU if there is one; `cpu`, `cuda` or `cuda:n`."""
    torch_threads: int = Field(1, ge=1)
    """PyTorch threads of the trainer: fixed, for bit-equal replay. A resume cannot change it."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products (`torch.set_float32_matmul_precision`): below `highest`, some hardware
    rounds their factors. On a CPU, `medium` was a third faster for SAC with layers of 256, a sixth slower with 64. A
    resume cannot change it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of networks in training (autocast); weights, losses, the optimizer and acting stay float32. On a CPU
    without hardware support, `bfloat16` is many times slower (docs/operations/performance.md). A resume cannot
    change it."""
    compile: bool = False
    """Compiles losses and gradients (torch.compile), on CPU and GPU; needs a C++ compiler. The first update takes ten
    seconds to a minute longer, less on later starts. Minibatches of an unusual size, reward signals and additional
    cloning are not compiled. A resume cannot change it, since sums are rounded differently."""
    num_cpus: float = Field(1.0, ge=0)
    """Ray CPUs reserved for the trainer and for each further rank."""
    num_gpus: float = Field(0.0, ge=0)
    """Ray GPUs reserved for each rank; with 0 and `device` other than `cpu`, one if the cluster has as many."""
    resources: dict[str, float] = {}
    """Custom Ray resources of the trainer and of each further rank."""
    ranks: int = Field(1, ge=1, le=1024)
    """Number of data-parallel processes (over nccl with a GPU each, else gloo). Pays off where a gradient step takes
    tens of milliseconds. Each holds the whole replay buffer. A resume cannot change it, since sums depend on it."""
    rank_timeout_seconds: float = Field(60.0, ge=1)
    """Time after which a rank that stalls an update is considered hung."""
    grace_seconds: float = Field(25.0, gt=0)
    """Time for the last checkpoint after SIGTERM; what is not durable then is learned again from the log. Also the
    longest that an interrupted run waits for a Redis or a store that is down. Below the 30 s that Kubernetes and spot
    machines allow."""


class PolicyVersionsConfig(Section):
    """Transport of policy versions to the workers."""

    transport: Literal["redis", "object_store"] = "redis"
    """`redis`: the policy board holds the weights; `object_store`: each version is a checkpoint (large models)."""


class CheckpointConfig(Section):
    """Schedule and retention of checkpoints."""

    every: Annotated[DurationField, AT_LEAST_ONE] = Duration(10, "updates")
    """Interval of checkpoints in the trainer's counters; each checkpoint is evaluated."""
    every_seconds: float | None = Field(None, gt=0)
    """Longest time between checkpoints; does not affect learning."""
    keep_last: int = Field(4, ge=1)
    """Number of newest checkpoints to keep."""
    best_by: str = "all"
    """Score that ranks checkpoints. `all` is the mean return summed over all agents, a policy id that of its agents. In
    a league it is the rating of this policy, or of the first learner (by name, of those without `plays`); with
    `mean_return`, the first learner's return against `league.fixed`, since a rating ignores the size of a win. A resume
    cannot change it, since existing scores are ranked by it."""
    keep_best: int = Field(1, ge=1)
    """Number of best checkpoints to keep, each confirmed by a second evaluation from other starts."""
    keep_every: int | None = Field(None, ge=1)
    """Interval, in policy versions, of checkpoints to keep permanently."""


class ArchiveConfig(Section):
    """Archive of the experience log in the store; `archive: all` is short for `keep`."""

    keep: Literal["off", "all"] = "off"
    """`off`: only the entries that restore the replay buffers of the newest checkpoints; `all`: the whole log, for
    `stagecoach replay` and as a dataset."""
    segment_bytes: int = Field(16 << 20, ge=1 << 10)
    """Approximate size of an archive object; a segment also ends at each checkpoint."""

    @model_validator(mode="before")
    @classmethod
    def _from_one_word(cls, value: object) -> object:
        return {"keep": "off" if value is False else value} if isinstance(value, str | bool) else value  # YAML's off


class EvaluationConfig(Section):
    """Evaluation of checkpoints, which does not affect learning. A candidate for the best is evaluated a second time
    from other starts, and only that score counts."""

    episodes: int = Field(20, ge=0)
    """Episodes per evaluation; 0 disables evaluation."""
    env_steps: int | None = Field(None, ge=1)
    """Environment steps per evaluation, instead of `episodes`: each environment plays its share, and finishes its
    episode. A league's matches are counted in `episodes`."""
    every: Annotated[DurationField, AT_LEAST_ONE] | None = None
    """Interval of evaluations in the trainer's counters, with or without a checkpoint: all of them, in order, late if
    necessary; the newest checkpoint is evaluated when none of these waits. By default only checkpoints are evaluated,
    and the newest first if they arrive too fast."""
    success_threshold: float | None = None
    """Return at which an episode is a success, if the environment does not report success."""
    num_envs: int = Field(4, ge=1)
    """Number of environments of the evaluator."""
    greedy: bool = True
    """Takes the most probable action; `false` samples as in training."""
    seed: int | None = Field(None, ge=0)
    """Seed of all evaluations. By default each has its own starts, which follow from the run's seed and the checkpoint.
    Common starts compare checkpoints better, but favor policies that happen to be good at them."""
    kwargs: dict[str, Any] = {}
    """Environment arguments that replace those of training."""
    parameters: dict[str, SamplerField] = {}
    """Samplers that replace `environment.parameters`, by name; by default the last lesson and uniform levels."""
    wrappers: tuple[Annotated[WrapperConfig, BY_PATH], ...] | None = None
    """Wrappers that replace `environment.wrappers`, for example to evaluate whole games without a wrapper that ends an
    episode with each life. The spaces must be the same. By default those of training."""
    num_cpus: float = Field(0.5, ge=0)
    """Ray CPUs reserved for the evaluator."""
    resources: dict[str, float] = {}
    """Custom Ray resources of the evaluator."""
    deadline_seconds: float = Field(1800.0, gt=0)
    """Time limit of an evaluation, after which it is abandoned and reported."""
    final_wait_seconds: float = Field(120.0, ge=0)
    """Time to wait at the end of a run for the final checkpoint's score and for evaluations due by `every`."""

    @property
    def asked(self) -> Duration:
        """Length of one evaluation."""
        return Duration(self.env_steps, "env_steps") if self.env_steps else Duration(self.episodes, "episodes")

    @property
    def enabled(self) -> bool:
        """The run has an evaluator."""
        return self.episodes > 0


def _return_or_each(value: Any) -> Any:
    if value == {}:
        raise ValueError("expected a number, or one for each of some policies as in {hunter: 10}, found {}")
    for name, number in value.items() if isinstance(value, dict) else [("", value)]:
        if not isinstance(name, str) or type(number) not in (int, float) or not abs(number) <= 1e300:
            raise ValueError(f"expected a number, or one for each policy as in {{hunter: 10}}, found {value!r:.200}")
    return value


class StopConfig(Section):
    """End of the run: the first of these bounds."""

    env_steps: int | None = Field(None, ge=1)
    """Env steps trained on."""
    updates: int | None = Field(None, ge=1)
    """Learning updates."""
    episodes: int | None = Field(None, ge=1)
    """Finished training episodes."""
    hours: float | None = Field(None, gt=0)
    """Wall-clock time since this start of the trainer."""
    mean_return: Annotated[float | dict[str, float], BeforeValidator(_return_or_each)] | None = None
    """Mean return at which the run is solved, reached in `evaluations` consecutive evaluations: summed over all agents,
    or, as `{policy id: return}`, of each of these policies."""
    success_rate: float | None = Field(None, ge=0, le=1)
    """Success rate at which the run is solved, as for `mean_return`; if both are set, both must be reached."""
    evaluations: int = Field(3, ge=1)
    """Number of consecutive evaluations that must reach `mean_return` or `success_rate`, since a single one may be
    lucky."""

    @property
    def by_scores(self) -> bool:
        """Evaluations may end the run."""
        return self.mean_return is not None or self.success_rate is not None

    @property
    def bounded(self) -> bool:
        """The trainer's own progress ends the run, whatever the scores are."""
        return any(bound is not None for bound in (self.env_steps, self.updates, self.episodes, self.hours))


class FoldConfig(Section):
    """A fold of your own (docs/how-to/own-fold.md)."""

    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:Class`, a class that derives from `stagecoach.Fold`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class."""


def _free(name: str) -> str:
    if name in {"state", "memory", "league", "curriculum"}:
        raise ValueError(f"{name!r} is the name of another part of a checkpoint; choose another name")
    return name


FoldName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), AfterValidator(_free)]
"""Names a file of each checkpoint."""


class WriterConfig(Section):
    """A metric writer."""

    path: str = Field(pattern=r"^(\w+|[\w.]+:\w+)$")
    """`csv`, `jsonl`, `tensorboard`; `wandb`, `mlflow`, `trackio` (each an extra of that name); or `module:Class`, a
    `stagecoach.MetricWriter` of your own (docs/how-to/own-writer.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the writer, for example `{project: cartpole}` for wandb."""


class MetricsConfig(Section):
    """Writers of the run's metrics, in addition to its store (docs/how-to/trackers.md)."""

    writers: tuple[Annotated[WriterConfig, BY_PATH], ...] = (WriterConfig(path="csv"), WriterConfig(path="tensorboard"))
    """Files in the run's folder under `metrics/`, and trackers. Exceptions in a writer do not end the run. A plain
    string is a writer without arguments."""
    every: Annotated[DurationField, AT_LEAST_ONE] = Duration(1, "updates")
    """Interval of training metrics in the trainer's counters; losses are means over the updates since the last row."""
    episodes: bool = False
    """Writes a row per training episode: return, length, success, the environment's own numbers."""
    profile: bool = False
    """Records a timeline of each process (acting, environment, pushing, updating, each wait …) into the store when it
    ends; `stagecoach train --profile` sets it and summarizes the times."""
    window_episodes: int = Field(100, ge=1)
    """Number of episodes in `rollout/ep_rew_mean`; they are part of each checkpoint, so a resume cannot change it."""


def _named_folder(folder: object) -> object:
    if folder == "":
        raise ValueError("expected a folder, found ''; name one, or remove the line for `runs`")
    if not str(folder).isprintable():
        raise ValueError(f"expected a folder, found {str(folder)!r}, which has a character that cannot be printed")
    return folder


class ConfigFields(Section):
    """Fields of a config file."""

    seed: int = Field(1, ge=0, lt=2**63)
    """Seed of the run, from which each worker derives its own."""
    runs_dir: Annotated[Path, BeforeValidator(_named_folder)] = Path("runs")
    """Folder of all runs on this machine."""
    environment: EnvironmentConfig
    policies: dict[str, RunPolicyConfig] = {"default": RunPolicyConfig()}
    """Policy id → network. A single agent uses `default`."""
    agents: dict[str, str] = {}
    """Agent, or a pattern such as `adversary_*`, → policy id. Exact names take precedence, then the first matching
    pattern; other agents use the only policy."""
    league: LeagueConfig | None = None
    """League: agents that play current weights, snapshots and fixed players, all rated (docs/guides/league.md)."""
    folds: dict[FoldName, Annotated[FoldConfig, BY_PATH]] = {}
    """Folds of your own by name. Each observes all episodes in log order, and decides environment parameters of later
    episodes, exact over resume and replay (docs/how-to/own-fold.md). A plain string is a class without arguments."""
    algorithm: AlgorithmField = PPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    dataset: DatasetConfig | None = None
    """Recorded experience to train from; the environment is then only used for evaluation."""
    demonstrations: DemonstrationsConfig | None = None
    """Recorded experience to imitate in addition to acting, as `algorithm` configures."""
    policy_versions: PolicyVersionsConfig = PolicyVersionsConfig()
    initialize_from: str | None = Field(None, min_length=1)
    """Source of the initial weights and observation statistics: a run (its promoted checkpoint, else its best),
    `RUN/CHECKPOINT`, or a checkpoint's folder. RUN may be `s3://bucket/prefix/RUN`, accessed like this run's store;
    `#POLICY` selects a policy there, or a snapshot of its league. With the same algorithm, critics, temperature and
    reward statistics are loaded too; counters and optimizers start fresh. An event reports what was loaded."""
    fork_from: str | None = Field(None, min_length=1)
    """Checkpoint whose whole learner this run continues: weights, optimizers, statistics and counters, so that env
    steps count on from there. `RUN/CHECKPOINT` or a checkpoint's folder; `@sha256:…` behind it requires that hash of
    what was learned (`stagecoach checkpoints show`). Other settings than there apply from the first update on. Not with
    a replay buffer or a league."""
    heatup: HeatupField = HeatupConfig()
    """Warm-up at the start; `heatup: 1000 env_steps` sets its `duration`."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    archive: ArchiveConfig = ArchiveConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop_at: StopConfig = StopConfig()
    gateway: GatewayConfig = GatewayConfig()
    redis: RedisConfig = RedisConfig()
    store: StoreConfig = StoreConfig()
    ray: RayConfig = RayConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def transitions_per_update(self) -> int:
        """Transitions per update of one policy id with one agent: K × T × N."""
        return self.rollout.fragments_per_update * self.rollout.fragment_steps * self.environment.num_envs

    @property
    def fragment_rows(self) -> int:
        """T of each fragment: `rollout.fragment_steps`, or the most that whole episodes take."""
        more = (self.environment.max_episode_steps or 1) - 1 if self.rollout.complete_episodes else 0
        return self.rollout.fragment_steps + more

    @property
    def state_sizes(self) -> dict[str, int]:
        """Policy id → size of the hidden state per slot."""
        return {policy_id: policy.state_size for policy_id, policy in self.policies.items()}

    @property
    def league_learners(self) -> dict[str, LearnerConfig]:
        """The league's learners by name: by default every trainable policy, in the seats of its own agents."""
        if self.league is None or self.league.learners:
            return dict(self.league.learners) if self.league else {}
        return {name: LearnerConfig(policy=name) for name, policy in self.policies.items() if policy.trainable}

    def policy_of(self, agent: str) -> str:
        """Returns the policy id of `agent`; raises `KeyError` if nothing maps it."""
        if (entry := self.entry_of(agent)) is not None:
            return self.agents[entry]
        if self.environment.hierarchy is not None and agent in self.policies:
            return agent
        if len(self.policies) == 1:
            return next(iter(self.policies))
        raise KeyError(agent)

    def entry_of(self, agent: str) -> str | None:
        """Returns the entry of `agents` that maps the agent: its name, else the first matching pattern."""
        return agent if agent in self.agents else next((its for its in self.agents if fnmatchcase(agent, its)), None)

    def algorithm_of(self, policy_id: str) -> AlgorithmConfig:
        """Returns the algorithm of a policy; imports a custom algorithm, or raises `ConfigError`."""
        return (self.policies[policy_id].algorithm or self.algorithm).resolved()

    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """Returns the algorithms by policy id."""
        return {policy_id: self.algorithm_of(policy_id) for policy_id in sorted(self.policies)}

    def recorded(self, section: str) -> list[str]:
        """Returns the policies that learn from this section, `dataset` or `demonstrations`, in order."""
        imitating = [name for name in self.trainable if section == "dataset" or self.algorithm_of(name).imitating]
        return imitating or self.trainable

    @property
    def trainable(self) -> list[str]:
        """Policy ids that learn, in order."""
        return sorted(policy_id for policy_id, policy in self.policies.items() if policy.trainable)
