"""A worker's side of a league: seats, opponents, what is recorded of a match, and that a successor goes on in it."""

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
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Greedy, Sampling, act_for
from stagecoach.rollout_worker.league import opponents, stacked
from stagecoach.rollout_worker.league.casting import Casting, _compared
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.league.stacked import Stacked, likeness
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sample, Sampler
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
from tests.support.environments.stage import same

CORES: dict[str, Any] = {"policies": {"default": {"core": "gru", "core_size": 4, "share_encoder": True}}}


PAIRS = {"sides": [["a0", "a1"], ["b0", "b1"]]}


class Season:
    """A worker's sampler in a league of Nim, its store, and the table of who plays whom."""

    def __init__(
        self,
        store: Any,
        shares: dict[str, float],
        fixed: Mapping[str, PlayerRef] = MappingProxyType({}),
        snapshots: int = 2,
        left: Sequence[bytes] = (),
        **sections: Any,
    ) -> None:
        sections = {"environment": NIM | {"num_envs": 3, "kwargs": {"tells": True}}} | sections
        self.config = minimal_config(**sections)
        self.description = describe_environment(self.config)
        algorithm, policies = self.config.algorithm, self.config.policies
        self.policies = build_policies(self.description.policies, policies, algorithm, 0)
        players = dict(fixed)
        for number in range(snapshots):
            data = encode_policy(
                build_policies(self.description.policies, policies, algorithm, number + 1)["default"], number
            )
            sha256 = write_shared_object(store, data)
            players[snapshot_id("default", sha256)] = PlayerRef("policy", sha256, f"number {number}", ("default",))
        known = {"default": shares.get("latest", 0.0)}
        known |= {name: shares.get(name, shares.get("past", 0.0) / max(1, snapshots)) for name in players}
        opponents = tuple((name, share) for name, share in known.items() if share)
        sides, _ = sides_of(self.config.league.sides if self.config.league else (), self.description.agents)
        learner = Learner("default", tuple(range(len(sides))), {"default": opponents})
        self.table = MatchTable(sides, ("default",) * len(sides), {"main": learner}, players)
        self.told: list[str] = []
        self.fetched: list[str] = []

        def load(sha256: str) -> bytes:
            self.fetched.append(sha256)
            return read_shared_object(store, sha256)

        functions = {ref.source for ref in players.values()}
        casting = self.casting = Casting(self.description, 3, self.table, Opponents(load, functions), self.told.append)
        past = action_trace.read(list(left))
        lineage = past.lineage if past else SeedLineage(1, 0, 0, 0)
        vector = make_vector(self.config.environment, self.description)
        self.sampler = Sampler(vector, self.description, lineage, trace=past, directors=Directors(seating=casting))
        self.left = list(left)

    def sample(self, steps: int = 10) -> Sample:
        self.casting.use(self.table)
        sample = self.sampler.sample(self.policies, dict.fromkeys(self.policies, Sampling()), steps)
        trace = self.sampler.traced(sample)
        assert trace is not None
        self.left = [*self.left, action_trace.encode(trace)][-trace.fragments :]
        return sample


@pytest.fixture
def store(tmp_path: Any) -> FileStore:
    return FileStore(tmp_path, "run")


NOT_TOLD = "by comparing the sides' returns, since no agent was told a number in info['outcome']"


def fixed(**sources: str) -> dict[str, PlayerRef]:
    kinds = {"random": "random"}
    return {name: PlayerRef(kinds.get(its, "function"), "", its, ("default",)) for name, its in sources.items()}  # type: ignore[arg-type]


def test_seats_take_turns_and_only_rows_of_current_weights_travel(store: FileStore) -> None:
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


def test_an_outcome_is_what_the_learner_was_paid(store: FileStore) -> None:
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
def test_an_outcome_that_the_game_tells_counts_also_for_who_does_not_act_any_more(
    store: FileStore, environment: dict[str, Any]
) -> None:
    pairs: dict[str, Any] = {"league": PAIRS} if environment["id"].endswith("Pairs") else {}
    environment = {"api": "pettingzoo", "num_envs": 3} | environment
    season = Season(store, {"dice": 1.0}, fixed(dice="random"), 0, environment=environment, **pairs)
    matches = [record.match for record in season.sample(22).episodes]
    expected = (0.0, 1.0) if pairs else (1.0, 0.0)
    assert {match.outcome for match in matches if match} == {expected}
    assert season.told == ["outcomes of matches are judged by the environment's info['outcome']"]


def test_matches_that_are_all_draws_are_told(store: FileStore) -> None:
    pairs = {"api": "pettingzoo", "num_envs": 3, "id": f"{MODULE}:Pairs", "kwargs": {"pays": 0.0}}
    season = Season(store, {"dice": 1.0}, fixed(dice="random"), 0, environment=pairs, league=PAIRS)
    season.sample(400)
    judged, drawn = season.told
    assert judged == f"outcomes of matches are judged {NOT_TOLD}"
    assert drawn.startswith("all of the first 100 matches of a worker are draws") and "tell info['outcome']" in drawn


def test_returns_that_differ_by_rounding_are_a_draw_and_sides_of_unequal_size_are_compared_by_the_mean() -> None:
    assert _compared([0.1 + 0.2, 0.3]) == [0.5, 0.5]
    assert _compared([1.0, 0.3, 0.3]) == [1.0, 0.25, 0.25]


@pytest.mark.parametrize("sections", [{}, CORES], ids=["plain", "core"])
def test_a_successor_goes_on_in_the_same_matches(store: FileStore, sections: dict[str, Any]) -> None:
    shares = {"latest": 0.2, "past": 0.5, "chance": 0.1, "one": 0.2}
    more = fixed(chance="random", one=f"{MODULE}:takes_one")
    worker = Season(store, shares, more, **sections)
    for _ in range(6):
        worker.sample(4)
        first, second = (Season(store, shares, more, left=worker.left, **sections) for _ in range(2))
        ahead = worker.sample(4)
        found = first.sample(4), second.sample(4)
        assert same(found[0], found[1]) and same(ahead, found[0])


def test_what_a_player_remembers_goes_with_its_last_seat(store: FileStore) -> None:
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
        ("takes_too_many", "its action 7 is none of the space"),
        ("takes_half", "ValueError: 0.5 is not a choice of a discrete space"),
        ("cheats", "its action [2] is illegal"),
        ("says_nothing", "it returned None"),
        ("complains", f"ValueError: {'x' * 188}… (812 more characters)"),
    ],
)
def test_a_scripted_player_that_has_no_legal_move_loses_by_forfeit(
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
def test_what_is_wrong_in_an_opponents_seat_is_the_environments_fault_too(
    store: FileStore, player: str, kind: str, says: str
) -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Faulty", "num_envs": 3, "kwargs": {"kind": kind}}
    players = {} if player == "past" else fixed(other=player)
    shares = {"past": 1.0} if player == "past" else {"other": 1.0}
    season = Season(store, shares, players, snapshots=1 if player == "past" else 0, environment=game)
    main = season.table.learners["main"]
    season.table = replace(season.table, learners={"main": replace(main, sides=(0,))})
    with pytest.raises(EnvironmentFailure, match=says):
        season.sample(60)


def test_no_code_is_run_that_the_config_does_not_name(store: FileStore) -> None:
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


def test_a_scripted_player_may_write_into_what_it_observes(store: FileStore) -> None:
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:crosses_out"), snapshots=0)
    matches = [record.match for record in season.sample(60).episodes]
    assert matches and not any(match and match.forfeit for match in matches)


def test_a_scripted_player_forfeits_in_each_of_its_seats(store: FileStore) -> None:
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
def test_a_scripted_player_has_to_keep_to_what_is_a_mask_and_to_nothing_else(
    store: FileStore, player: str, masks: str, kwargs: dict[str, Any], loses: bool
) -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Aimed", "num_envs": 3, "action_mask": masks, "kwargs": kwargs}
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:{player}"), snapshots=0, environment=game)
    matches = [record.match for record in season.sample(60).episodes if record.match]
    assert matches and any(match.forfeit != "" for match in matches) == loses


def test_where_one_has_forfeited_others_play_on_and_are_judged_by_what_they_do(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_best_player_wins_whenever_it_can(store: FileStore) -> None:
    season = Season(store, {"script": 1.0}, fixed(script=f"{MODULE}:best"), snapshots=0)
    matches = [record.match for record in season.sample(200).episodes if record.match]
    as_first = [match.outcome for match in matches if match.players[0] == "script"]
    assert as_first and set(as_first) == {(1.0, 0.0)}, "a pile of seven is won by who begins"


def test_a_player_that_is_missing_or_damaged_is_an_error_and_never_another_one(store: FileStore) -> None:
    season = Season(store, {"past": 1.0}, snapshots=1)
    (ref,) = season.table.players.values()
    store.put(SHARED_OBJECTS + ref.sha256, b"something else")
    with pytest.raises(SharedObjectUnusable, match="was altered"):
        season.sample()
    store.delete(SHARED_OBJECTS + ref.sha256)
    with pytest.raises(SharedObjectUnusable, match="the store does not have"):
        season.sample()


def test_a_player_that_left_in_mid_episode_stays_while_it_has_a_seat_and_else_episodes_begin_anew(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_opponent_forgets_with_each_agent_that_ends(store: FileStore) -> None:
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
def test_networks_that_are_alike_act_as_one_and_each_as_by_itself(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_unlike_acts_by_itself() -> None:
    for policy in (CORES["policies"]["default"], {"hidden_sizes": [300, 300]}, {"layer_norm": True}):
        config = minimal_config(environment=NIM, policies={"default": policy})
        made = build_policies(describe_environment(config).policies, config.policies, config.algorithm, 0)
        assert not likeness(made["default"])


@pytest.mark.parametrize("most", [opponents.MOST_BYTES, 300_000])
def test_a_large_league_costs_a_worker_bounded_memory_and_a_fetch_for_each_player(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
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


def test_a_table_that_changes_in_mid_season_is_drawn_from_at_the_next_episode(store: FileStore) -> None:
    season = Season(store, {"past": 1.0}, snapshots=2)
    season.sample(5)
    learner = replace(season.table.learners["main"], opponents={"default": (("default", 1.0),)})
    season.table = replace(season.table, learners={"main": learner}, players={})
    later = [record.match for _ in range(4) for record in season.sample(20).episodes]
    assert all(match and match.players == ("default", "default") for match in later[3:])


def test_an_outcome_that_is_none_is_told_and_returns_are_compared(store: FileStore) -> None:
    kwargs = {"tells": True, "outcome": 5.0}
    season = Season(store, {"past": 1.0}, environment=NIM | {"num_envs": 3, "kwargs": kwargs})
    records = season.sample(80).episodes
    assert all(record.match and sorted(record.match.outcome) == [0.0, 1.0] for record in records)
    (told,) = season.told
    assert told.endswith("by comparing the sides' returns, since info['outcome'] was 5; expected 0 to 1")


def test_slots_of_opponents_are_zeros_after_the_last_row_too_and_so_fragments_join(store: FileStore) -> None:
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


def test_a_policy_without_agents_of_its_own_is_played_beside_the_others() -> None:
    learners = {"main": {"policy": "main"}, "exploiter": {"policy": "exploiter", "plays": ["main"]}}
    sections: dict[str, Any] = {"policies": {"main": {}, "exploiter": {}}, "league": {"learners": learners}}
    config = minimal_config(environment=NIM | {"num_envs": 2}, agents={"first": "main", "second": "main"}, **sections)
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    assert len(evaluate_policies(config, description, policies, 0, 3)) == 3
