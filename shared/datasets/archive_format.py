"""A run's archived experience, put together to episodes again: consecutive fragments of one worker's seed lineage are
laid end to end, slot by slot and policy by policy, heat-up and what the trainer dropped included. An agent's episode,
from its first step to its end, is one of its own."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from stagecoach.shared.base.errors import DatasetError, FragmentError
from stagecoach.shared.datasets.recording import Episode, Table, episodes_of
from stagecoach.shared.experience.fragment import INFO, STATE, Fragment, check
from stagecoach.shared.experience.spaces import STATE as CRITICS
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from stagecoach.shared.storage.log_archive import read_experience


def read(
    location: str, description: EnvironmentDescription, endpoint_url: str | None = None
) -> dict[str, list[Episode]]:
    """Returns each policy's episodes, as logged; raises `DatasetError`, `ArchiveIncomplete` or what the store
    raises."""
    found: dict[str, list[Episode]] = {policy_id: [] for policy_id in description.policies}
    fragments = _checked(read_experience(location, endpoint_url), location, description)
    for line in _lines(fragments, description.in_turns):
        starts_episode = line[0].header.seq == 0 and line[0].header.life == f"{line[0].header.incarnation}.0"
        for policy_id, spaces in description.policies.items():
            columns = [item.columns[policy_id] for item in line]
            for slot in range(columns[0]["reward"].shape[1]):
                found[policy_id] += episodes_of(_table(columns, slot, spaces, starts_episode))
    return found


def _checked(fragments: Iterable[Fragment], location: str, description: EnvironmentDescription) -> Iterator[Fragment]:
    seen = set()
    for item in fragments:
        key = item.header.worker_id, item.header.incarnation, item.header.seq
        if key in seen:
            continue  # a worker that got no answer pushed it again
        seen.add(key)
        versions, wanted = item.header.policy_versions, description.policies.keys() & item.columns.keys()
        if not wanted and item.columns:
            raise DatasetError(
                f"{location} does not fit the run's environment: it has rows of the policies {sorted(versions)}, "
                f"expected {sorted(description.policies)}; name the archive of a run with the same policy ids"
            )
        header = replace(item.header, policy_versions={name: versions[name] for name in sorted(wanted & set(versions))})
        item = Fragment(header, {policy_id: item.columns[policy_id] for policy_id in sorted(wanted)})
        try:
            for columns in item.columns.values():
                columns.pop(STATE, None)  # the hidden state of another policy is no experience
                for name in [name for name in columns if f"obs.{CRITICS}" in name]:
                    del columns[name]
                _adapt_info(columns, description.info_columns)
            check(item, item.header.run_id, description)
        except FragmentError as error:
            raise DatasetError(
                f"{location} does not fit the run's environment: {error.detail}; name the archive of a run in the same "
                f"environment, with the same agents and policy ids"
            ) from None
        yield item


def _adapt_info(columns: Columns, wanted: Sequence[str]) -> None:
    """Drops info columns that this run does not request; adds those that are missing, as NaN."""
    names = [INFO + name for name in wanted]
    for name in [name for name in columns if name.startswith(INFO) and name not in names]:
        del columns[name]
    for name in names:
        columns.setdefault(name, np.full(columns["reward"].shape, np.nan, np.float32))


def _lines(fragments: Iterable[Fragment], in_turns: bool) -> list[list[Fragment]]:
    """Joins fragments that continue each other. In turn-based games each stands alone: a turn whose outcome came after
    its end is missing."""
    lines: list[list[Fragment]] = []
    running: dict[str, list[Fragment]] = {}
    for item in fragments:
        source = f"{item.header.worker_id}:{item.header.life}"
        before = running[source][-1].columns if source in running and not in_turns else {}
        if before and all(_follows(before[policy_id], its) for policy_id, its in item.columns.items()):
            running[source].append(item)
        else:
            running[source] = [item]
            lines.append(running[source])
    return lines


def _follows(before: Columns, after: Columns) -> bool:
    """Returns whether `after` continues `before`: its first row matches, and no running episode is interrupted. Slots
    of other agents may hold anything, or start later."""
    acted, running = after["mask"][0], (before["mask"] & ~(before["terminated"] | before["truncated"]))[-1]
    names = [name.removeprefix("bootstrap_") for name in before if name.startswith("bootstrap_")]
    same = all(np.array_equal(before[f"bootstrap_{name}"][acted], after[name][0][acted]) for name in names)
    return same and not (running & ~acted).any()


def _table(line: list[Columns], slot: int, spaces: PolicySpaces, starts_episode: bool) -> Table:
    """Returns all steps of one slot, except masked steps (a native environment's reset). A fragment may lack the
    observation after a step that terminated."""
    observed, acted_on = spaces.observation.column_names("obs"), spaces.action.column_names("action")
    told = [name for name in line[0] if name.startswith(INFO)]
    parts: dict[str, list[Array]] = defaultdict(list)
    for columns in line:
        acted, mine = columns["mask"][:, slot], columns["final_index"][:, 1] == slot
        final = columns["final_index"][mine, 0]
        known = ~columns["terminated"][:, slot]
        known[final] = True
        parts["next_known"].append(known[acted])
        for name in (*observed, *acted_on, *told, "reward", "terminated", "truncated", "log_prob"):
            parts[name].append(columns[name][acted, slot])
        for name in observed:
            after = np.concatenate([columns[name][1:, slot], columns[f"bootstrap_{name}"][None, slot]])
            after[final] = columns[f"final_{name}"][mine]
            parts[f"next_{name}"].append(after[acted])
    found = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    return Table(
        {name: found[name] for name in observed}, {name: found[name] for name in acted_on},
        found["reward"], found["terminated"], found["truncated"], found["log_prob"],
        {name: found[f"next_{name}"] for name in observed}, starts_episode=starts_episode,
        next_known=found["next_known"], info={name: found[name] for name in told},
    )  # fmt: skip
