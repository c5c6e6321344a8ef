"""Worker's side of a league: seats, opponents, records of matches, and resumption by a successor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, Sampling, act_for
from stagecoach.rollout_worker.league import opponents, stacked
from stagecoach.rollout_worker.league.casting import Casting, _compared
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.league.stacked import Stacked, likeness
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.shared.base.errors import EnvironmentFailure, SharedObjectUnusable
from stagecoach.shared.experience.fragment import MatchRecord
from stagecoach.shared.league.table import Learner, MatchTable, PlayerRef, sides_of, snapshot_id
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object, write_shared_object
from stagecoach.trainer_node.learning.building_blocks.team import with_team
from tests.conftest import minimal_config
from tests.support.environments.games import MODULE, NIM
from tests.support.environments.stage import Stage, same

CORES: dict[str, Any] = {"policies": {"default": {"core": "gru", "core_size": 4, "share_encoder": True}}}


PAIRS = {"sides": [["a0", "a1"], ["b0", "b1"]]}


class Season(Stage):
    """A worker's sampler in a league of Nim, its store, and the table of who plays whom."""

    def __init__(
        self, store: Any, shares: dict[str, float], fixed: Mapping[str, PlayerRef] = MappingProxyType({}),
        snapshots: int = 2, left: Sequence[bytes] = (), **sections: Any,
    ) -> None:  # fmt: skip
        self._store, self._shares, self._fixed, self._snapshots = store, shares, fixed, snapshots
        self.told: list[str] = []
        self.fetched: list[str] = []
        environment = {"num_envs": 3} | sections.pop("environment", NIM | {"kwargs": {"tells": True}})
        super().__init__(environment, left=left, **{"policies": {"default": {}}} | sections)

    def direct(self) -> Directors:
        players = dict(self._fixed)
        for number in range(self._snapshots):
            made = build_policies(
                self.description.policies, self.config.policies, self.config.algorithm, number + 1
            )  # fmt: skip
            sha256 = write_shared_object(self._store, encode_policy(made["default"], number))
            players[snapshot_id("default", sha256)] = PlayerRef("policy", sha256, f"number {number}", ("default",))
        each = self._shares.get("past", 0.0) / max(1, self._snapshots)
        known = {"default": self._shares.get("latest", 0.0)}
        known |= {name: self._shares.get(name, each) for name in players}
        opponents = tuple((name, share) for name, share in known.items() if share)
        sides, _ = sides_of(self.config.league.sides if self.config.league else (), self.description.agents)
        learner = Learner("default", tuple(range(len(sides))), {"default": opponents})
        self.table = MatchTable(sides, ("default",) * len(sides), {"main": learner}, players)

        def load(sha256: str) -> bytes:
            self.fetched.append(sha256)
            return read_shared_object(self._store, sha256)

        functions = {ref.source for ref in players.values()}
        self.casting = Casting(self.description, 3, self.table, Opponents(load, functions), self.told.append)
        return Directors(seating=self.casting)

    def sample(self, steps: int = 10, exploration: Exploration | None = None) -> Sample:
        self.casting.use(self.table)
        return super().sample(steps, exploration or Sampling())


@pytest.fixture
def store(tmp_path: Any) -> FileStore:
    return FileStore(tmp_path, "run")


NOT_TOLD = "by comparing the sides' returns, since no agent had a number in info['outcome']"


def fixed(**sources: str) -> dict[str, PlayerRef]:
    kinds = {"random": "random"}
    return {name: PlayerRef(kinds.get(its, "function"), "", its, ("default",)) for name, its in sources.items()}  # type: ignore[arg-type]


def test_seats_alternate_and_only_learner_rows_are_recorded(store: FileStore) -> None:
    season = Season(store, {"latest": 0.5, "past": 0.3, "chance": 0.2}, fixed(chance="random"))
    samples = [season.sample(60) for _ in range(5)]
    matches = [record.match for sample in samples for record in sample.episodes]
    assert all(match is not None and match.players[match.side] == "default" for match in matches)
    sides = Counter(match.side for match in matches if match)
    assert abs(sides[0] - sides[1]) <= 3, "each environment changes sides with each episode"
    met = Counter(match.players[1 - match.side] for match in matches if match)
    assert (
        set(met) == {"default", "chance", *(name for name in season.table.players)} and met["default"] > met["chance"]
    )
    rows = sum(int(sample.columns["default"]["mask"].sum()) for sample in samples)
    share = (1 + met["default"] / len(matches)) / 2
    assert abs(rows / (60 * 3 * len(samples)) - share) < 0.08, (
        "all turns against current weights, and half of the others"
    )
    assert season.told == ["outcomes of matches are judged by the environment's info['outcome']"]


def test_outcome_agrees_with_returns(store: FileStore) -> None:
    for tells in (True, False):
        kwargs = NIM | {"num_envs": 3, "kwargs": {"tells": tells}}
        season = Season(store, {"past": 1.0}, environment=kwargs)
        for record in season.sample(80).episodes:
            assert record.match is not None
            agents = ["first", "second"]
            assert [(record.agent_returns[name] + 1) / 2 for name in agents] == list(record.match.outcome)
        how = "by the environment's info['outcome']" if tells else NOT_TOLD
        assert season.told == [f"outcomes of matches are judged {how}"]


@pytest.mark.parametrize("environment", [
    {"id": f"{MODULE}:Nim", "kwargs": {"tells": True, "pile": 1}},
    {"id": f"{MODULE}:Pairs", "kwargs": {"falls": True}},
], ids=["before its first turn", "fallen"])  # fmt: skip
def test_outcome_counts_for_agents_that_no_longer_act(store: FileStore, environment: dict[str, Any]) -> None:
    pairs: dict[str, Any] = {"league": PAIRS} if environment["id"].endswith("Pairs") else {}
    environment = {"api": "pettingzoo", "num_envs": 3} | environment
    season = Season(store, {"dice": 1.0}, fixed(dice="random"), 0, environment=environment, **pairs)
    matches = [record.match for record in season.sample(22).episodes]
    expected = (0.0, 1.0) if pairs else (1.0, 0.0)
    assert {match.outcome for match in matches if match} == {expected}
    assert season.told == ["outcomes of matches are judged by the environment's info['outcome']"]


def test_matches_that_are_all_draws_are_reported(store: FileStore) -> None:
    pairs = {"api": "pettingzoo", "num_envs": 3, "id": f"{MODULE}:Pairs", "kwargs": {"pays": 0.0}}
    season = Season(store, {"dice": 1.0}, fixed(dice="random"), 0, environment=pairs, league=PAIRS)
    season.sample(400)
    judged, drawn = season.told
    assert judged == f"outcomes of matches are judged {NOT_TOLD}"
    assert drawn.startswith("all of the first 100 matches of a worker are draws") and "set info['outcome']" in drawn


def test_compared_returns_ignore_rounding() -> None:
    assert _compared([0.1 + 0.2, 0.3]) == [0.5, 0.5]
    assert _compared([1.0, 0.3, 0.3]) == [1.0, 0.25, 0.25]


@pytest.mark.parametrize("sections", [{}, CORES], ids=["plain", "core"])
def test_successor_resumes_matches(store: FileStore, sections: dict[str, Any]) -> None:
    shares = {"latest": 0.2, "past": 0.5, "chance": 0.1, "one": 0.2}
    more = fixed(chance="random", one=f"{MODULE}:takes_one")
    worker = Season(store, shares, more, **sections)
    for _ in range(6):
        worker.sample(4)
        first, second = (Season(store, shares, more, left=worker.left, **sections) for _ in range(2))
        ahead = worker.sample(4)
        found = first.sample(4), second.sample(4)
        assert same(found[0], found[1]) and same(ahead, found[0])


def test_opponent_state_is_dropped_with_its_last_seat(store: FileStore) -> None:
    season = Season(store, {"past": 1.0}, snapshots=12, **CORES)
    met = set()
    for _ in range(12):
        season.sample(7)
        trace = action_trace.read(season.left)
        assert trace is not None
        states = {name for name in trace.states if "@" in name}
        met |= states
        assert len(states) <= 3, "of three environments, each with one opponent"
        assert sum(len(trace.states[name]) for name in states) <= 3, "of no slot but its own"
    assert len(met) > 3


@pytest.mark.parametrize(
    ("player", "says"),
    [
        ("raises", "ValueError: no move comes to mind"),
        ("takes_too_many", "its action 7 is outside its space"),
        ("takes_half", "ValueError: 0.5 is not a choice of a discrete space"),
        ("cheats", "its action [2] is illegal"),
        ("says_nothing", "it returned None"),
        ("complains", f"ValueError: {'x' * 188}… (812 more characters)"),
    ],
)
def test_scripted_player_forfeits_on_invalid_action(
    store: FileStore, caplog: pytest.LogCaptureFixture, player: str, says: str
) -> None:
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:{player}"), snapshots=0)
    records = [record for record in season.sample(60).episodes if record.match and record.match.forfeit]
    assert records and all(record.match and record.match.outcome[record.match.side] == 1.0 for record in records)
    assert all(record.match and record.match.forfeit == f"script: {says}" for record in records)
    assert f"a match is lost by forfeit, script: {says}" in caplog.text
    assert caplog.text.count("lost by forfeit") == len(records).bit_length() > 2, "the 1st, 2nd, 4th, 8th … of them"


@pytest.mark.parametrize("player", ["random", f"{MODULE}:takes_first", "past"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nan", "an observation .default/obs.seen. that cannot be learned from: it holds NaN"),
        ("reward", r"rewards that cannot be learned from: in an episode they add up to \{'ann': .*, 'bob': nan\}"),
        ("stuck", "gave policy default an action_mask without a legal action"),
        ("short", r"an observation.seen of policy default has the shape \(1,\); expected \(3,\)"),
        ("scalar", r"an observation.seen of policy default has the shape \(\); expected \(3,\)"),
        ("short mask", r"an observation.action_mask of policy default has the shape \(1,\); expected \(3,\)"),
    ],
)
def test_environment_failure_is_reported_in_opponents_seat(store: FileStore, player: str, kind: str, says: str) -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Faulty", "num_envs": 3, "kwargs": {"kind": kind}}
    players = {} if player == "past" else fixed(other=player)
    shares = {"past": 1.0} if player == "past" else {"other": 1.0}
    season = Season(store, shares, players, snapshots=1 if player == "past" else 0, environment=game)
    main = season.table.learners["main"]
    season.table = replace(season.table, learners={"main": replace(main, sides=(0,))})
    with pytest.raises(EnvironmentFailure, match=says):
        season.sample(60)


def test_scripted_player_runs_only_if_config_names_it(store: FileStore) -> None:
    """As somebody with a worker's password would have it, by the policy board or by a worker's action trace."""
    scripted, other = PlayerRef("function", "", "tests.support.environments.games:takes_one", ("default",)), "this:that"
    stage = Season(store, {"one": 1.0}, {"one": scripted}, snapshots=0)
    stage.sample()
    trace = action_trace.read(stage.left)
    assert trace is not None and trace.fits(stage.description, 3) and stage.casting.accepts(trace.directed["seating"])
    for functions in (set[str](), {other}):
        allowed = Opponents(lambda sha256: b"", functions)
        refusing = Casting(stage.description, 3, stage.table, allowed, stage.told.append)
        assert not refusing.accepts(trace.directed["seating"])
    wrong: list[Any] = [{"refs": {"one": {"kind": "function"}, "two": 3}}, {}, 3, {"refs": [1]}]
    for match in wrong:
        assert not stage.casting.accepts([match] * 3)
    met, policy = Opponents(lambda sha256: b""), stage.policies["default"]
    with pytest.raises(SharedObjectUnusable, match=r"'this:that', which this run's league.fixed does not have"):
        met.get(replace(scripted, source=other), "default", stage.description.policies["default"], policy)
    league = {"fixed": {"one": {"source": scripted.source, "kind": "function"}, "two": "random", "three": other}}
    config = minimal_config(environment=NIM, league=league).league
    assert config is not None and config.functions == {scripted.source}, "three is not known yet"


def test_scripted_player_may_change_its_observation(store: FileStore) -> None:
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:crosses_out"), snapshots=0)
    matches = [record.match for record in season.sample(60).episodes]
    assert matches and not any(match and match.forfeit for match in matches)


def test_scripted_player_forfeits_in_each_of_its_seats(store: FileStore) -> None:
    three = {"api": "pettingzoo", "id": f"{MODULE}:AllAtOnce", "num_envs": 3}
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:raises"), snapshots=0, environment=three)
    matches = [record.match for record in season.sample(60).episodes if record.match and record.match.forfeit]
    assert matches and all(sorted(match.outcome) == [0.0, 0.0, 1.0] for match in matches)
    assert all(match.outcome[match.side] == 1.0 for match in matches)


@pytest.mark.parametrize(
    ("player", "masks", "kwargs", "loses"),
    [
        ("aims", "auto", {}, False),
        ("aims_astray", "auto", {}, True),
        ("aims_astray", "off", {}, False),
        ("aims_astray", "auto", {"entry": "action_mask_before", "size": 2}, False),
    ],
)
def test_scripted_player_obeys_only_action_masks(
    store: FileStore, player: str, masks: str, kwargs: dict[str, Any], loses: bool
) -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Aimed", "num_envs": 3, "action_mask": masks, "kwargs": kwargs}
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:{player}"), snapshots=0, environment=game)
    matches = [record.match for record in season.sample(60).episodes if record.match]
    assert matches and any(match.forfeit != "" for match in matches) == loses


def test_others_are_judged_by_play_after_a_forfeit(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, matches = Counter[str](), list[MatchRecord]()

    def counting(observation: Any, random: np.random.Generator) -> int:
        calls[other] += 1
        return 2

    monkeypatch.setattr("tests.support.environments.games.takes_one", counting)
    three = {"api": "pettingzoo", "id": f"{MODULE}:AllAtOnce", "num_envs": 3}
    for other in ("takes_one", "raises"):
        players = fixed(good=f"{MODULE}:takes_one", other=f"{MODULE}:{other}")
        season = Season(store, {"good": 0.5, "other": 0.5}, players, snapshots=0, environment=three)
        matches = [record.match for record in season.sample(120).episodes if record.match]
    assert 0 < calls["raises"] < calls["takes_one"], "both were called there"
    met = [(match, {*match.players}) for match in matches if match.forfeit]
    mixed = [match for match, players in met if len(players) == 3]
    assert mixed and all(match.outcome[match.players.index("other")] == 0.0 for match in mixed)
    assert any(len({*match.outcome}) == 3 for match in mixed), "one of the two that were left has won"
    assert all(match.outcome[match.side] > 0 for match, _ in met)
    players = fixed(one=f"{MODULE}:raises", two=f"{MODULE}:takes_too_many")
    season = Season(store, {"one": 0.5, "two": 0.5}, players, snapshots=0, environment=three)
    lost = [record.match.forfeit.splitlines() for record in season.sample(120).episodes if record.match]
    assert {tuple(sorted(line.partition(": ")[0] for line in lines)) for lines in lost} >= {("one", "two")}


def test_missing_or_damaged_player_raises(store: FileStore) -> None:
    season = Season(store, {"past": 1.0}, snapshots=1)
    (ref,) = season.table.players.values()
    store.put(SHARED_OBJECTS + ref.sha256, b"something else")
    with pytest.raises(SharedObjectUnusable, match="was altered"):
        season.sample()
    store.delete(SHARED_OBJECTS + ref.sha256)
    with pytest.raises(SharedObjectUnusable, match="the store does not have"):
        season.sample()


def test_player_that_left_keeps_its_seat_in_memory(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "MOST_BYTES", 1)
    long = NIM | {"num_envs": 3, "kwargs": {"pile": 200}}
    season = Season(store, {"past": 1.0}, snapshots=9, environment=long)
    season.sample(20)
    assert len(season.fetched) == len(set(season.fetched)) > 1, "all have a seat, and are fetched once"
    for ref in season.table.players.values():
        store.delete(SHARED_OBJECTS + ref.sha256)
    season.table = replace(season.table, players={})
    season.sample(20)
    successor = Season(store, {"past": 1.0}, snapshots=0, environment=long, left=season.left)
    with pytest.raises(EnvironmentFailure, match="has left the league in mid-episode, and cannot be loaded any more"):
        successor.sample()


def test_opponent_state_resets_when_agent_ends(store: FileStore) -> None:
    coming = {"api": "pettingzoo", "id": f"{MODULE}:AllAtOnce", "num_envs": 3}
    season = Season(store, {"past": 1.0}, environment=coming, **CORES)
    remembered = 0
    for _ in range(40):
        season.sample(1)
        sampler: Any = season.sampler
        for state in sampler._seating.states.values():
            remembered += int(state.any())
            assert not state[sampler._acts["default"] == 0].any()
    assert remembered > 20


@pytest.mark.parametrize(
    "sections",
    [
        {"policies": {"default": {"share_encoder": True}}},
        {"environment": NIM | {"id": f"{MODULE}:AllAtOnce", "kwargs": {"boxes": True}}},
        {"algorithm": {"name": "dqn", "dueling": True}, "environment": NIM},
    ],
    ids=["choices", "boxes", "values"],
)
@torch.inference_mode()
def test_stacked_networks_act_as_each_alone(sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = minimal_config(**{"environment": NIM} | sections)
    spaces, generator = describe_environment(config).policies, torch.Generator().manual_seed(3)
    made = [build_policies(spaces, config.policies, config.algorithm, seed)["default"] for seed in range(3)]
    seen = {
        leaf.column("obs"): torch.randint(0, 2, (12, *leaf.shape), generator=generator)
        for leaf in spaces["default"].observation.leaves
    }
    for number, policy in enumerate(made):
        if policy.normalizer is not None:
            policy.normalizer.update({name: tensor + number for name, tensor in seen.items()})
        for parameter in policy.parameters():
            parameter.data += torch.rand(parameter.shape, generator=generator) / 5
    assert len({likeness(policy) for policy in made}) == 1 and likeness(made[0])
    weights = [dict([*policy.named_parameters(), *policy.named_buffers()]) for policy in made]
    rows = [np.array(its) for its in ([5], [0, 9, 3, 7], [2, 1])]
    columns = {name: tensor.numpy() for name, tensor in seen.items()}
    every: list[torch.Tensor] = []

    def greedily(_: Any, *asked: Any) -> Any:
        actions, params = act_for(Greedy(), *asked)
        every.append(params)
        return actions, params

    monkeypatch.setattr(stacked, "act_for", greedily)
    found = Stacked(made[1]).act(weights, rows, columns, generator)
    each = [act_for(Greedy(), policy, columns, its, generator) for policy, its in zip(made, rows, strict=True)]
    for name, array in found.items():
        assert np.allclose(array, np.concatenate([actions[name] for actions, _ in each]), atol=1e-5)
    assert torch.allclose(every[0][[0, 4, 5, 6, 7, 8, 9]], torch.cat([params for _, params in each]), atol=1e-5)
    assert not torch.allclose(each[0][1], each[1][1][:1], atol=1e-2)


def test_likeness_is_empty_for_other_networks() -> None:
    for policy in (CORES["policies"]["default"], {"hidden_sizes": [300, 300]}, {"layer_norm": True}):
        config = minimal_config(environment=NIM, policies={"default": policy})
        made = build_policies(describe_environment(config).policies, config.policies, config.algorithm, 0)
        assert not likeness(made["default"])


@pytest.mark.parametrize("most", [opponents.MOST_BYTES, 300_000])
def test_large_league_uses_bounded_memory(store: FileStore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(opponents, "MOST_BYTES", most)
    season = Season(store, {"past": 1.0}, snapshots=60)
    for _ in range(12):
        season.sample(60)
    casting: Any = season.sampler._seating
    held, fetched = casting._opponents._held, season.fetched
    assert set(fetched) <= {ref.sha256 for ref in season.table.players.values()}
    assert sum(size for _, size in held.values()) <= most
    if most == 64 << 20:
        assert len(fetched) == len(set(fetched)) == len(held), "each is fetched once"
    else:
        assert 2 < len(held) < len(set(fetched))


def test_new_table_applies_from_next_episode(store: FileStore) -> None:
    season = Season(store, {"past": 1.0}, snapshots=2)
    season.sample(5)
    learner = replace(season.table.learners["main"], opponents={"default": (("default", 1.0),)})
    season.table = replace(season.table, learners={"main": learner}, players={})
    later = [record.match for _ in range(4) for record in season.sample(20).episodes]
    assert all(match and match.players == ("default", "default") for match in later[3:])


def test_invalid_outcome_is_reported_and_returns_decide(store: FileStore) -> None:
    kwargs = {"tells": True, "outcome": 5.0}
    season = Season(store, {"past": 1.0}, environment=NIM | {"num_envs": 3, "kwargs": kwargs})
    records = season.sample(80).episodes
    assert all(record.match and sorted(record.match.outcome) == [0.0, 1.0] for record in records)
    (told,) = season.told
    assert told.endswith("by comparing the sides' returns, since info['outcome'] was 5; expected 0 to 1")


def test_opponent_slots_are_zeros_after_last_row(store: FileStore) -> None:
    pairs = {"api": "pettingzoo", "id": f"{MODULE}:Pairs", "num_envs": 3}
    season = Season(store, {"dice": 1.0}, fixed(dice="random"), 0, environment=pairs, league=PAIRS)
    first, second = (season.sample(5).columns["default"] for _ in range(2))
    ours = second["mask"][0]
    assert ours.any() and not ours.all()
    assert not first["bootstrap_obs"][~ours].any() and first["bootstrap_obs"][ours].all()
    assert np.array_equal(first["bootstrap_obs"], second["obs"][0])
    team = with_team(first, season.description.policies["default"].observation, agents=4)
    acting = first["mask"][-1] & ~first["terminated"][-1]
    assert np.array_equal(team["bootstrap_team_mask"][acting], team["team_mask"][-1][acting])


def test_policy_without_agents_is_evaluated() -> None:
    learners = {"main": {"policy": "main"}, "exploiter": {"policy": "exploiter", "plays": ["main"]}}
    sections: dict[str, Any] = {"policies": {"main": {}, "exploiter": {}}, "league": {"learners": learners}}
    config = minimal_config(environment=NIM | {"num_envs": 2}, agents={"first": "main", "second": "main"}, **sections)
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    assert len(evaluate_policies(config, description, policies, 0, 3)) == 3
