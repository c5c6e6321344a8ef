"""A run's archived experience: its fragments, put together to episodes again.

Fragments of one worker's line of episodes that follow each other are laid end to end, slot by slot. What the trainer
dropped was experienced all the same and is part of it; heat-up as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shared.archive import read_experience
from shared.datasets.recording import Episode
from shared.datasets.table import Table, episodes_of
from shared.errors import DatasetError, FragmentError
from shared.fragment import STATE, Fragment, check
from shared.spaces import Array, Columns, EnvironmentDescription, PolicySpaces


def read(location: str, description: EnvironmentDescription, endpoint_url: str | None = None) -> list[Episode]:
    """Its episodes, in the order of the log; raises `DatasetError`, `ArchiveIncomplete` or what the store raises."""
    (policy_id,) = description.policies
    spaces = description.policies[policy_id]
    episodes: list[Episode] = []
    for line in _lines(_fitting(read_experience(location, endpoint_url), location, description), policy_id):
        whole = line[0].header.seq == 0 and line[0].header.life == f"{line[0].header.incarnation}.0"
        columns = [item.columns[policy_id] for item in line]
        for slot in range(columns[0]["reward"].shape[1]):
            episodes += episodes_of(_table(columns, slot, spaces, whole))
    return episodes


def _fitting(fragments: Iterable[Fragment], location: str, description: EnvironmentDescription) -> Iterator[Fragment]:
    seen = set()
    for item in fragments:
        key = item.header.worker_id, item.header.incarnation, item.header.seq
        if key in seen:
            continue  # a worker that had no answer pushed it again
        seen.add(key)
        try:
            for columns in item.columns.values():
                columns.pop(STATE, None)  # what another policy remembered is no experience
                if item.header.wire_version == 2:
                    columns["log_prob"] = np.where(columns["log_prob"] == 0, np.float32(np.nan), columns["log_prob"])
            check(item, item.header.run_id, description)
        except FragmentError as error:
            raise DatasetError(
                f"{location} does not fit the run's environment: {error.detail}; name the archive of a run in the same "
                f"environment, with one agent and the same policy id"
            ) from None
        yield item


def _lines(fragments: Iterable[Fragment], policy_id: str) -> list[list[Fragment]]:
    """Fragments that go on with each other, in the order in which the lines begin."""
    lines: list[list[Fragment]] = []
    running: dict[str, list[Fragment]] = {}
    for item in fragments:
        source = f"{item.header.worker_id}:{item.header.life}"
        line = running.get(source)
        if line is None or not _follows(line[-1].columns[policy_id], item.columns[policy_id]):
            line = []
            lines.append(line)
        running[source] = line
        line.append(item)
    return lines


def _follows(before: Columns, after: Columns) -> bool:
    names = [name.removeprefix("bootstrap_") for name in before if name.startswith("bootstrap_")]
    return all(np.array_equal(before[f"bootstrap_{name}"], after[name][0]) for name in names)


def _table(line: list[Columns], slot: int, spaces: PolicySpaces, whole: bool) -> Table:
    """All steps of one slot; what was masked (a native environment's reset) is left out.

    What was observed after a step that terminated may not be in a fragment.
    """

    def steps(name: str) -> Array:
        return np.concatenate([columns[name][:, slot] for columns in line])

    acted = steps("mask")
    next_known = []
    for columns in line:
        final = columns["final_index"]
        known = ~columns["terminated"][:, slot]
        known[final[final[:, 1] == slot, 0]] = True
        next_known.append(known)
    obs, next_obs = {}, {}
    for name in spaces.observation.column_names("obs"):
        after = []
        for columns in line:
            follows = np.concatenate([columns[name][1:, slot], columns[f"bootstrap_{name}"][None, slot]])
            mine = columns["final_index"][:, 1] == slot
            follows[columns["final_index"][mine, 0]] = columns[f"final_{name}"][mine]
            after.append(follows)
        obs[name], next_obs[name] = steps(name)[acted], np.concatenate(after)[acted]
    names = [*spaces.action.column_names("action"), "reward", "terminated", "truncated", "log_prob"]
    found = {name: steps(name)[acted] for name in names}
    action = {name: found[name] for name in spaces.action.column_names("action")}
    return Table(
        obs, action, found["reward"], found["terminated"], found["truncated"], found["log_prob"], next_obs,
        whole=whole, next_known=np.concatenate(next_known)[acted],
    )  # fmt: skip
