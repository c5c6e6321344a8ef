"""A run's config and its sections beside the algorithm's: every field with its unit and the reason for its default."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.config.algorithms.registry import AlgorithmField
from stagecoach.shared.config.environments.environment import BY_PATH, EnvironmentConfig, WrapperConfig
from stagecoach.shared.config.environments.parameters import SamplerField
from stagecoach.shared.config.league import LeagueConfig, LearnerConfig
from stagecoach.shared.config.recorded import DatasetConfig, DemonstrationsConfig
from stagecoach.shared.config.rollout import HeatupConfig, HeatupField, RolloutConfig
from stagecoach.shared.config.schema.section import Section, Width
from stagecoach.shared.config.services import RayConfig, RedisConfig, StoreConfig
from stagecoach.shared.experience.counters import AT_LEAST_ONE, Duration, DurationField

ConvolutionLayer = tuple[Width, Width, Width]
"""Channels, kernel and stride."""


class PolicyConfig(Section):
    """The network of one policy id."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the MLP; two of 64 is the field's reference for classic control."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity; tanh is the usual choice for PPO on vectors."""
    layer_norm: bool = False
    """Normalize each hidden layer's outputs before the activation, in critics too (Ba et al. 2016)."""
    cnn: (
        Literal["auto", "nature", "small", "residual"] | Annotated[tuple[ConvolutionLayer, ...], Field(min_length=1)]
    ) = "auto"
    """Convolutions for image observations: `nature` (Mnih et al. 2015) needs at least 36×36 pixels, `small` 5×5; `auto`
    is `nature` where it fits and `small` below. `residual` (IMPALA's, Espeholt et al. 2018) takes any size: slower, and
    often better. Or layers of your own, `[[channels, kernel, stride], …]`, with one of 256 units behind them:
    `[[128, 4, 1]]` sees each line of four on a board."""
    share_encoder: bool = False
    """Whether actor and critic share one encoder (usual for images, where it halves the cost)."""
    critic_observes: Literal["own", "team", "state"] = "own"
    """What the critic of an on-policy algorithm sees: what its agent does, what all agents of the policy in that
    environment do at the same step, or also the environment's state, which agents of several policies share
    (docs/CENTRALIZED_CRITIC.md). With `state`, QMIX mixes by the environment's state. Only learning needs it, acting
    does not."""
    log_std_init: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    normalize_observations: bool = False
    """Running mean and variance, learned by the trainer and published inside the policy version."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return before learning from them."""
    reward_ewma: float | None = Field(None, gt=0, le=1)
    """Subtract the rewards' exponentially weighted moving average from them before learning: with each fragment it goes
    this share of its way to the fragment's average (0.01 in Coach). For tasks without an end or of a fixed length:
    where the length of an episode is up to the policy, it changes what is best."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else learns of them."""
    reward_clip: tuple[float, float] | None = None
    """Then they are clipped to these bounds, for example `[-1, 1]` as usual for Atari. Figures show them unclipped."""
    transform: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """`module:function`, called with each fragment's columns `[T, S, …]` (shared/experience/fragment.py) before they
    are learned from or stored; returns them changed. It must depend on nothing else, since a resume calls it again."""
    clip_observations: float = Field(10.0, gt=0)
    """Bound of a normalized observation, in standard deviations."""
    core: Literal["none", "lstm", "gru"] = "none"
    """A recurrent layer behind the encoder, for algorithms that learn whole sequences (docs/algorithms/ppo.md)."""
    core_size: Width = 64
    """Units of the core."""

    @property
    def state_size(self) -> int:
        """Numbers in its hidden state, per slot; an LSTM's are its outputs and its cells."""
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
            raise ValueError(
                f"reward_clip={list(self.reward_clip)} makes all rewards the same number; give the lower bound first"
            )
        if self.reward_ewma is not None and self.normalize_rewards:
            raise ValueError(
                f"reward_ewma={self.reward_ewma:g} with normalize_rewards=true: two ways to normalize rewards; use one"
            )
        return self

    @property
    def changes_rewards(self) -> bool:
        """Whether what is learned from has other rewards than the environment gave."""
        return self.reward_scale != 1.0 or self.reward_clip is not None or self.transform is not None


class RunPolicyConfig(PolicyConfig):
    """One policy id: its network, and how it is learned where that differs from the run's other policies."""

    algorithm: AlgorithmField | None = None
    """Fields in place of those of the run's `algorithm`; another `name` stands alone, with that algorithm's defaults.
    Defaults of other sections are those of the run's `algorithm`. docs/POLICIES.md."""
    trainable: bool = True
    """Whether it learns. One that does not acts as its algorithm explores when all schedules have ended, also in
    warm-up; its observation statistics stay as they are."""
    initialize_from: str | None = Field(None, min_length=1)
    """As the run's `initialize_from`, for this policy alone; where the source has a single policy, it is that one."""

    @property
    def network(self) -> PolicyConfig:
        """What travels with the weights."""
        return PolicyConfig.model_validate({name: getattr(self, name) for name in PolicyConfig.model_fields})


class TrainerConfig(Section):
    """The trainer process."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` takes a GPU if there is one; `cpu`, `cuda` or `cuda:n`."""
    torch_threads: int = Field(1, ge=1)
    """PyTorch threads of the trainer: fixed, because bit-equal replay needs it. A resume cannot change it."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Of float32 matrix products (`torch.set_float32_matmul_precision`): below `highest`, some hardware rounds their
    factors. SAC on a CPU took a third less time with `medium` and layers of 256, a sixth more with 64. A resume cannot
    change it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of networks while they learn (autocast); weights, losses, the optimizer and acting stay float32. On a CPU without
    units for it, `bfloat16` is many times slower (docs/PERFORMANCE.md). A resume cannot change it."""
    compile: bool = False
    """Losses and their gradients as machine code (torch.compile), on CPU and GPU; needs a C++ compiler. Its first
    update takes ten seconds to a minute longer, less from the second start on. Minibatches of another size than a full
    update's, reward signals and cloning beside rewards are not compiled. Sums round otherwise: no resume changes it."""
    num_cpus: float = Field(1.0, ge=0)
    """Ray CPUs reserved for the trainer, and for each further rank."""
    num_gpus: float = Field(0.0, ge=0)
    """Ray GPUs reserved for each rank; with 0 and `device` not `cpu`, one where the cluster has as many."""
    resources: dict[str, float] = {}
    """Custom Ray resources that the trainer asks for, and each further rank."""
    ranks: int = Field(1, ge=1, le=1024)
    """Processes that learn together, each from its part of every minibatch (over nccl with a GPU each, else gloo). Pays
    off where a gradient step takes tens of milliseconds. Each holds all of a replay buffer: of n ranks on one machine,
    n times the memory. A resume cannot change it: sums depend on it."""
    rank_timeout_seconds: float = Field(60.0, ge=1)
    """A rank that keeps the others waiting for longer than this within an update is taken for hung."""
    grace_seconds: float = Field(25.0, gt=0)
    """How long a trainer that gets SIGTERM has for its last checkpoint; then it leaves without, and what is not durable
    is read from the log again. So long a run that is asked to end waits for a Redis or a store that is away. Less than
    the 30 s that Kubernetes and spot machines give before they end a process."""


class PolicyVersionsConfig(Section):
    """How a policy version reaches the workers."""

    transport: Literal["redis", "object_store"] = "redis"
    """`redis`: the policy board holds the weights; `object_store`: each version is a checkpoint (large models)."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every: Annotated[DurationField, AT_LEAST_ONE] = Duration(10, "updates")
    """A checkpoint each time the trainer's counters pass a multiple of this; each is evaluated."""
    every_seconds: float | None = Field(None, gt=0)
    """Also one when this much time has passed since the last; changes nothing that is learned."""
    keep_last: int = Field(4, ge=1)
    """The newest k are kept."""
    best_by: str = "all"
    """Whose mean return ranks checkpoints: `all` is the sum over all agents, a policy id that of its agents. Of a game
    that one side wins from the other neither says much: in a league it is the rating, that of this policy, or of the
    first learner (by name, of those without `plays`); with `mean_return` what the first learner gains in evaluations
    against `league.fixed`, since a rating counts wins, however small. A resume cannot change it: the scores that exist
    are ranked by it."""
    keep_best: int = Field(1, ge=1)
    """The best b by evaluation, each confirmed by a second one from other starts, are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Every m-th checkpoint (by policy version) is kept for good."""


class ArchiveConfig(Section):
    """The experience log's entries, kept in the store after they have left Redis; `archive: all` is short."""

    keep: Literal["off", "all"] = "off"
    """`off`: only the entries that restore the replay buffers of the newest checkpoints; `all`: the whole log, for
    `stagecoach replay` and as a dataset."""
    segment_bytes: int = Field(16 << 20, ge=1 << 10)
    """Fragments are stored in objects of about this size; a segment also ends where a checkpoint does."""

    @model_validator(mode="before")
    @classmethod
    def _from_one_word(cls, value: object) -> object:
        return {"keep": "off" if value is False else value} if isinstance(value, str | bool) else value  # YAML's off


class EvaluationConfig(Section):
    """The evaluator plays checkpoints greedily; what it finds never changes what is learned. One that may be the best
    is played a second time, from other starts: only that evaluation counts for the best."""

    episodes: int = Field(20, ge=0)
    """Episodes per evaluation; 0: nothing is evaluated, and no evaluator is started."""
    env_steps: int | None = Field(None, ge=1)
    """Measure an evaluation in steps instead: each environment copy plays its share of these, and finishes its current
    episode. `episodes` is then ignored. A league's matches are counted in `episodes`."""
    every: Annotated[DurationField, AT_LEAST_ONE] | None = None
    """Evaluate the policy each time the trainer's counters pass a multiple of this, whether a checkpoint is kept there
    or not: all of them, in order, late if need be. The newest checkpoint is evaluated when none of these waits. By
    default only checkpoints are, and the newest where they come faster than they can be played."""
    success_threshold: float | None = None
    """An evaluated episode that returns at least this is a success, where the environment itself does not tell."""
    num_envs: int = Field(4, ge=1)
    """Environment copies that play them."""
    greedy: bool = True
    """The most probable action; `false` samples as in training."""
    seed: int | None = Field(None, ge=0)
    """By default each evaluation has starts of its own, which follow from the run's seed and the checkpoint. With a
    number all checkpoints meet the same ones: they compare better, but a policy may be good at just these."""
    kwargs: dict[str, Any] = {}
    """Environment arguments that replace those of training."""
    parameters: dict[str, SamplerField] = {}
    """What is drawn instead of `environment.parameters`, by name; by default the last lesson, and each level alike."""
    wrappers: tuple[Annotated[WrapperConfig, BY_PATH], ...] | None = None
    """Wrappers in place of `environment.wrappers`, for example without one that makes an episode of each life: what is
    evaluated are whole games. The spaces have to be the same. By default those of training."""
    num_cpus: float = Field(0.5, ge=0)
    """Ray CPUs reserved for the evaluator."""
    resources: dict[str, float] = {}
    """Custom Ray resources that the evaluator asks for."""
    deadline_seconds: float = Field(1800.0, gt=0)
    """An evaluation that takes longer than this (an episode that never ends) is given up and reported."""
    final_wait_seconds: float = Field(120.0, ge=0)
    """How long the end of a run waits for the final checkpoint's score, and for those that `every` made due."""

    @property
    def asked(self) -> Duration:
        """How much one evaluation plays."""
        return Duration(self.env_steps, "env_steps") if self.env_steps else Duration(self.episodes, "episodes")

    @property
    def enabled(self) -> bool:
        """Whether the run has an evaluator."""
        return self.episodes > 0


def _return_or_each(value: Any) -> Any:
    if value == {}:
        raise ValueError("expected a number, or one for each of some policies as in {hunter: 10}, found {}")
    for name, number in value.items() if isinstance(value, dict) else [("", value)]:
        if not isinstance(name, str) or type(number) not in (int, float) or not abs(number) <= 1e300:
            raise ValueError(f"expected a number, or one for each policy as in {{hunter: 10}}, found {value!r:.200}")
    return value


class StopConfig(Section):
    """The run ends when the first of these is reached."""

    env_steps: int | None = Field(None, ge=1)
    """Env steps trained on."""
    updates: int | None = Field(None, ge=1)
    """Learning updates."""
    episodes: int | None = Field(None, ge=1)
    """Finished training episodes."""
    hours: float | None = Field(None, gt=0)
    """Wall clock since this start of the trainer."""
    mean_return: Annotated[float | dict[str, float], BeforeValidator(_return_or_each)] | None = None
    """Solved when the mean return of `evaluations` evaluated checkpoints in a row is at least this, of each of them. Of
    all agents together, or, as `{policy id: return}`, of each of these policies."""
    success_rate: float | None = Field(None, ge=0, le=1)
    """Solved when the success rate of `evaluations` evaluations in a row is at least this, as for `mean_return`; with
    both, both have to be reached."""
    evaluations: int = Field(3, ge=1)
    """How many evaluations in a row have to reach `mean_return` or `success_rate`: a single one may be lucky, and the
    next may fall."""

    @property
    def by_scores(self) -> bool:
        """Whether evaluations may end the run."""
        return self.mean_return is not None or self.success_rate is not None

    @property
    def bounded(self) -> bool:
        """Whether the trainer itself comes to an end, whatever the scores are."""
        return any(bound is not None for bound in (self.env_steps, self.updates, self.episodes, self.hours))


class WriterConfig(Section):
    """A writer of metrics."""

    path: str = Field(pattern=r"^(\w+|[\w.]+:\w+)$")
    """`csv`, `jsonl`, `tensorboard`; `wandb`, `mlflow`, `trackio` (each an extra of that name); or `module:Class`, a
    `stagecoach.MetricWriter` of your own (docs/METRICS.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the writer, for example `{project: cartpole}` for wandb."""


class MetricsConfig(Section):
    """Where the run's metrics are written, beside its store, where they always are (docs/METRICS.md)."""

    writers: tuple[Annotated[WriterConfig, BY_PATH], ...] = (WriterConfig(path="csv"), WriterConfig(path="tensorboard"))
    """Files in the run's folder under `metrics/`, and trackers. What a writer raises ends nothing. A plain string is a
    writer without arguments."""
    every: Annotated[DurationField, AT_LEAST_ONE] = Duration(1, "updates")
    """A row of training metrics each time the trainer's counters pass a multiple of this; losses are means over the
    updates since the last row."""
    episodes: bool = False
    """Also a row for each training episode: return, length, success, the environment's own numbers."""
    profile: bool = False
    """Each process keeps a timeline of what it does (acting, environment, pushing, updating, each wait …) and writes it
    into the store when it ends; `stagecoach train --profile` sets it, and shows where the time went."""
    window_episodes: int = Field(100, ge=1)
    """Episodes behind `rollout/ep_rew_mean`; they are part of each checkpoint, so a resume cannot change it."""


def _named_folder(folder: object) -> object:
    if folder == "":
        raise ValueError("expected a folder, found ''; name one, or remove the line for `runs`")
    return folder


class ConfigFields(Section):
    """The fields of a config file; together they determine a run."""

    seed: int = Field(1, ge=0, lt=2**63)
    """The run's seed; each worker derives its own from it, its number and its incarnation."""
    runs_dir: Annotated[Path, BeforeValidator(_named_folder)] = Path("runs")
    """Folder of all runs on this machine."""
    environment: EnvironmentConfig
    policies: dict[str, RunPolicyConfig] = {"default": RunPolicyConfig()}
    """Policy id → network. A single agent uses `default`."""
    agents: dict[str, str] = {}
    """Agent, or a pattern such as `adversary_*`, → policy id. An exact name comes first, then the first pattern that
    fits; an agent not named here uses the only policy."""
    league: LeagueConfig | None = None
    """Agents that play each other: against current weights, snapshots and fixed players, all rated (docs/LEAGUE.md)."""
    algorithm: AlgorithmField = PPOConfig()
    rollout: RolloutConfig = RolloutConfig()
    dataset: DatasetConfig | None = None
    """Train from recorded experience; the environment is then only evaluated in."""
    demonstrations: DemonstrationsConfig | None = None
    """Recorded experience to imitate, beside what is acted; `algorithm` says how."""
    policy_versions: PolicyVersionsConfig = PolicyVersionsConfig()
    initialize_from: str | None = Field(None, min_length=1)
    """Begin with the weights and observation statistics of another run's policies: a run (what is promoted there, else
    its best), `RUN/CHECKPOINT`, or a checkpoint's folder; RUN may be `s3://bucket/prefix/RUN`, reached as this run's
    store is; `#POLICY` behind it names one there, or a snapshot of its
    league. Where the same algorithm learned it, critics, temperature and reward statistics are taken, too; counters
    and optimizers begin anew. An event says so. The source is only read."""
    heatup: HeatupField = HeatupConfig()
    """Warm-up at the start; `heatup: 1000 env_steps` is short for its `duration`."""
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    archive: ArchiveConfig = ArchiveConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop_at: StopConfig = StopConfig()
    redis: RedisConfig = RedisConfig()
    store: StoreConfig = StoreConfig()
    ray: RayConfig = RayConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def transitions_per_update(self) -> int:
        """Of one policy id with one agent: K × T × N."""
        return self.rollout.fragments_per_update * self.rollout.fragment_steps * self.environment.num_envs

    @property
    def fragment_rows(self) -> int:
        """T of each fragment: `rollout.fragment_steps`, or as many as whole episodes can take."""
        more = (self.environment.max_episode_steps or 1) - 1 if self.rollout.complete_episodes else 0
        return self.rollout.fragment_steps + more

    @property
    def state_sizes(self) -> dict[str, int]:
        """Policy id → how many numbers the policy remembers from step to step, per slot."""
        return {policy_id: policy.state_size for policy_id, policy in self.policies.items()}

    @property
    def league_learners(self) -> dict[str, LearnerConfig]:
        """The league's learners by name: by default every trainable policy, in the seats of its own agents."""
        if self.league is None or self.league.learners:
            return dict(self.league.learners) if self.league else {}
        trainable = (name for name, policy in self.policies.items() if getattr(policy, "trainable", True))
        return {name: LearnerConfig(policy=name) for name in trainable}

    def policy_of(self, agent: str) -> str:
        """The policy id that `agent` acts with; raises `KeyError` when nothing maps it."""
        if (entry := self.entry_of(agent)) is not None:
            return self.agents[entry]
        if self.environment.hierarchy is not None and agent in self.policies:
            return agent
        if len(self.policies) == 1:
            return next(iter(self.policies))
        raise KeyError(agent)

    def entry_of(self, agent: str) -> str | None:
        """The entry of `agents` that maps it: its name, else the first pattern that fits."""
        return agent if agent in self.agents else next((its for its in self.agents if fnmatchcase(agent, its)), None)

    def algorithm_of(self, policy_id: str) -> AlgorithmConfig:
        """The algorithm of a policy; a user's own is imported, which raises `ConfigError` where that cannot be."""
        return (self.policies[policy_id].algorithm or self.algorithm).resolved()

    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """By policy id; users' own bring their kinds of policies with them."""
        return {policy_id: self.algorithm_of(policy_id) for policy_id in sorted(self.policies)}

    def recorded(self, section: str) -> list[str]:
        """The policies that learn from this section, `dataset` or `demonstrations`, in order."""
        imitating = [name for name in self.trainable if section == "dataset" or self.algorithm_of(name).imitating]
        return imitating or self.trainable

    @property
    def trainable(self) -> list[str]:
        """The policy ids that learn, in order."""
        return sorted(policy_id for policy_id, policy in self.policies.items() if policy.trainable)
