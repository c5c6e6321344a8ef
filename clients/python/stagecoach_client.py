"""A client of Stagecoach's gateway: one file, for Python 3.9 or newer, that needs `websockets` alone.

    session = Session("ws://127.0.0.1:7700/v1/play", token, "arm")
    action = session.reset(observation)
    while True:
        observation, reward, terminated, truncated = world.step(action)
        action = session.step(reward, observation, terminated, truncated)  # None once the episode has ended

A session keeps a journal of what the gateway has not acknowledged, in memory or in a file, and sends it again after a
cut: nothing is learned twice, and nothing is lost with the connection or the gateway.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import Any
from urllib.request import Request, urlopen

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect

PROTOCOL = 1
_KINDS = {"float": "F", "int": "I", "uint": "U"}
_DTYPES = {f"{kind}{bits}": f"{short}{bits}" for kind, short in _KINDS.items() for bits in (8, 16, 32, 64)}
_DTYPES["bool"] = "BOOL"
_SMALL = 256
"""Arrays of fewer elements travel as JSON."""


class GatewayRefused(Exception):
    """The gateway does not take what the client has sent, or does not know its token: trying again does not help.

    `code` is the error's name in the protocol; `unauthorized` for an unknown token.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class GatewayAway(Exception):
    """The gateway could not be reached for `patience_seconds`; the journal still has what it lacks."""


class Session:
    """One environment's life. Methods block until the gateway has answered, through cuts and restarts of it."""

    def __init__(
        self, url: str, token: str, name: str = "0", *, journal: str | os.PathLike[str] | None = None,
        spaces: dict[str, Any] | None = None, patience_seconds: float = 3600.0, policy: Any = None,
        when_waiting: str = "hold",
    ) -> None:  # fmt: skip
        """Reads the journal, if there is one; connects with the first message.

        Args:
            name: 1 to 64 letters, digits, '.', '_' or '-'; unique among the client's environments.
            journal: File that keeps the journal, so that a program that was killed continues its session.
            spaces: `{"observation": …, "action": …}`, compared with the run's.
            policy: `stagecoach_policy.Policy`, or another class that reads the file's bytes, to act locally: without a
                round trip, and while the gateway cannot be reached.
            when_waiting: `hold` waits while the trainer learns; `act` acts on by `policy`, for games that cannot wait.
                An on-policy algorithm does not learn from these turns.
        """
        self._url, self._token, self._name, self._spaces = url, token, name, spaces
        self._patience, self._reads = patience_seconds, policy
        self._policy: Any = None
        self._acts_on, self._left = when_waiting == "act", False
        self._draw: dict[str, Any] = {}
        self._told: int | None = None
        self._turns: int | None = 0
        self._tried_at, self._complained = 0.0, False
        self._path = None if journal is None else os.fspath(journal)
        self._journal: deque[dict[str, Any]] = deque(self._kept())
        self._rewrite()  # without a last line that was cut
        self._next = self._journal[-1]["seq"] + 1 if self._journal else 0
        self._socket: Any = None
        self._open = ExitStack()
        self.acknowledged = self._journal[0]["seq"] if self._journal else 0
        """The first message that is in no fragment of the run's log yet."""
        self.spaces: dict[str, Any] = {}
        self.version = -1
        """Policy version of the last action."""
        self._fresh, self._welcomed = not self._journal, False

    def reset(self, observation: Any) -> Any:
        """Begins an episode, with `parameters` if the run has any; returns its first action."""
        return self._exchange({"type": "reset", "observation": observation}, False)

    def step(
        self, reward: float, observation: Any, terminated: bool = False, truncated: bool = False,
        info: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Sends what the last action led to; returns the next action, None at the end of an episode."""
        message = {"type": "step", "reward": float(reward), "observation": observation}
        message.update({"terminated": bool(terminated), "truncated": bool(truncated), "info": info or {}})
        return self._exchange(message, terminated or truncated)

    def reset_agents(self, observations: dict[str, Any]) -> dict[str, Any]:
        """Begins an episode of several agents; returns the actions of those that are observed."""
        actions: dict[str, Any] = self._exchange({"type": "reset", "observations": observations}, False)
        return actions

    def step_agents(
        self, rewards: dict[str, float], observations: dict[str, Any], terminated: bool | list[str] = False,
        truncated: bool | list[str] = False, infos: dict[str, dict[str, Any]] | None = None,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Reports the outcome of the last actions; returns the next actions, None at the end of an episode.

        Args:
            rewards: Of the agents that got any since the last message.
            observations: Of the agents that act next, and the last observations of agents that ended.
            terminated: True ends the episode for all, a list ends it for the agents that it names.
            truncated: Likewise; a truncated agent needs its last observation.
        """
        message: dict[str, Any] = {"type": "step", "rewards": rewards, "observations": observations}
        message.update({"terminated": terminated, "truncated": truncated, "infos": infos or {}})
        actions: dict[str, Any] | None = self._exchange(message, terminated is True or truncated is True)
        return actions

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters for the next episode (`environment.parameters` of the run); connects if need be."""
        if not self._welcomed:
            self._connected()
        parameters: dict[str, Any] = self._draw.get("parameters", {})
        return parameters

    def settle(self, seconds: float) -> int:
        """Waits until all is acknowledged, or so long; returns how many messages the journal still has."""
        until = time.monotonic() + seconds
        while len(self._journal) > 0 and time.monotonic() < until:
            try:
                if self._socket is None:
                    self._connected(until)
                self._handle(self._receive(max(0.0, until - time.monotonic())))
            except (TimeoutError, GatewayAway):
                break
            except (ConnectionClosed, OSError) as error:
                self._ended(error)
        return len(self._journal)

    @property
    def journal(self) -> list[dict[str, Any]]:
        """Messages that are not acknowledged."""
        return list(self._journal)

    def leave(self, seconds: float = 0.0) -> None:
        """Disconnects until `join`; acts by the last policy meanwhile, and keeps the journal. Takes newer versions
        before, until none comes for so long."""
        self._listen(seconds)
        if self._policy is None:
            raise ValueError("no policy to act by yet: give policy, and take a step while the gateway is there")
        self._left, self._socket = True, None
        self._open.close()

    def join(self) -> None:
        """Connects again, and sends the journal."""
        self._left = False
        self._connected()

    def close(self) -> None:
        """Says bye; the session's slot goes to another one once all of it is learned."""
        if self._socket is not None:
            try:
                self._socket.send(json.dumps({"type": "bye"}))
            except (ConnectionClosed, OSError):
                pass
            self._socket = None
        self._open.close()

    def _exchange(self, message: dict[str, Any], ends: bool) -> Any:
        if not self._welcomed:  # the numbers of a session continue where the gateway is
            self._connected()
        message = {**message, "seq": self._next}
        if message["type"] == "reset" and self._draw:
            message["episode"] = self._draw["episode"]
        self._next += 1
        message = copy.deepcopy(message)  # the caller may use its arrays again
        self._listen()
        away, hold = self._socket is None, self._turns == 0 and not self._acts_on
        chosen = self._choose(message) if self._policy is not None and not ends and (away or not hold) else None
        self._append(message)
        sent = False
        while True:
            try:
                if self._socket is None and (chosen is not None or (ends and self._policy is not None)):
                    if not self._left and time.monotonic() - self._tried_at > 1.0:
                        self._tried_at = time.monotonic()
                        self._connect()
                    return chosen
                if self._socket is None:
                    self._connected()  # which sends the journal
                elif not sent:
                    self._socket.send(_encoded(message))
                sent = True
                if ends or chosen is not None:
                    return chosen
                while "version" not in message:
                    self._handle(self._receive(None))
                return message.get("actions", message.get("action"))
            except (WebSocketException, OSError) as error:
                self._ended(error)
                if self._policy is not None and not (ends or sent) and "version" not in message:
                    chosen = self._choose(message)
                    self._note({key: message[key] for key in ("seq", "action", "version")})

    def _choose(self, message: dict[str, Any]) -> Any:
        """Acts locally, as long as the gateway waits for turns, or while it is away."""
        sent, applied = self._policy.act(message["observation"], self._exploration)
        message.update({"action": sent, "version": self._policy.version})
        self.version = self._policy.version
        if self._turns:
            self._turns -= 1
        return applied

    def _listen(self, seconds: float = 0.0) -> None:
        """Handles messages until none comes for so long; fetches a new version of the policy to act locally."""
        if self._reads is None:
            return
        try:
            while self._socket is not None:
                self._handle(self._receive(seconds))
        except TimeoutError:
            pass
        except (ConnectionClosed, OSError) as error:
            self._ended(error)
        if self._socket is not None and self._told not in (None, self._policy and self._policy.version):
            scheme, _, place = self._url.partition("://")
            url = f"http{scheme[2:]}://{place.rpartition('/')[0]}/policy/{self._policy_id}"
            try:
                with urlopen(Request(url, headers={"Authorization": f"Bearer {self._token}"}), timeout=10) as response:
                    self._policy = self._reads(response.read())
            except OSError:
                self._socket = None

    def _ended(self, error: Exception) -> None:
        """Handles messages that came before the end of the connection; raises `GatewayRefused` if one is final."""
        last, self._socket = self._socket, None
        if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code == 1009:
            raise GatewayRefused("too_long", "a message is longer than the gateway allows")
        with suppress(ConnectionClosed, OSError):
            while last is not None:
                self._handle(json.loads(last.recv(timeout=0)))

    def _connected(self, until: float = math.inf) -> None:
        """Connects, and sends all that the gateway lacks; tries again until then, or `patience_seconds` are over."""
        until, pause = min(until, time.monotonic() + self._patience), 0.05
        while True:
            try:
                self._connect()
                return
            except (WebSocketException, OSError) as error:
                reason: Any = error
            self._socket = None
            if time.monotonic() > until:
                raise GatewayAway(f"{self._url} is away: {reason}")
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 5.0)
            if pause == 5.0 and not self._complained:
                print(f"the gateway at {self._url} is away ({reason}); trying again", file=sys.stderr, flush=True)
            self._complained |= pause == 5.0

    def _connect(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        self._open.close()  # the connection before, if there was one
        try:
            opening = connect(self._url, additional_headers=headers, open_timeout=10, close_timeout=2, max_size=None)
        except InvalidStatus as error:
            if error.response.status_code in (401, 403):
                raise GatewayRefused("unauthorized", "the gateway does not know this token") from None
            raise
        self._socket = self._open.enter_context(opening)
        hello: dict[str, Any] = {"type": "hello", "protocol": PROTOCOL, "session": self._name, "spaces": self._spaces}
        hello["acting"] = "remote" if self._reads is None else "local"
        hello["journal_from"] = None if self._fresh else (self._journal[0]["seq"] if self._journal else self._next)
        self._socket.send(json.dumps(hello))
        until = time.monotonic() + 10.0
        while (welcome := self._receive(max(0.0, until - time.monotonic())))["type"] != "welcome":
            self._handle(welcome)
        self.spaces = welcome["spaces"]
        self._draw = welcome if "episode" in welcome else {}
        self._policy_id = next(iter(welcome.get("agents", {}).values()), "")
        self._fresh, self._welcomed, self._next = False, True, max(self._next, welcome["next"])
        self._forget(welcome["from"])
        for message in self._journal:
            if message["seq"] >= welcome["next"]:
                self._socket.send(_encoded(message))

    def _receive(self, seconds: float | None) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=seconds))
        return message

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "action":
            for kept in reversed(self._journal):
                if kept["seq"] == message["seq"] and "version" not in kept:  # the first answer counts
                    answer = {key: message[key] for key in ("action", "actions", "version") if key in message}
                    kept.update(answer)
                    self.version = message["version"]
                    self._note({"seq": kept["seq"]} | answer)
        elif kind == "draw":
            self._draw = message
        elif kind == "hold":
            self._turns = 0
        elif kind == "policy":
            self._told, self._turns = message["version"], message["turns"]
            self._exploration = message["exploration"][self._policy_id]
        elif kind == "acknowledged":
            self._forget(message["seq"])
        elif kind == "error" and message["error"] not in ("away", "failed"):
            raise GatewayRefused(message["error"], message["message"])
        elif kind in ("goodbye", "error"):
            self._socket = None
            raise ConnectionError(str(message.get("reason") or message.get("message")))

    # The journal

    def _append(self, message: dict[str, Any]) -> None:
        self._journal.append(message)
        self._note(message)

    def _note(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=_listed) + "\n")

    def _forget(self, before: int) -> None:
        forgotten = False
        while self._journal and self._journal[0]["seq"] < before:
            self._journal.popleft()
            forgotten = True
        self.acknowledged = max(self.acknowledged, before)
        if forgotten:
            self._rewrite()

    def _rewrite(self) -> None:
        if self._path is not None:
            part = f"{self._path}.part"
            with open(part, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(message, default=_listed) + "\n" for message in self._journal)
            os.replace(part, self._path)

    def _kept(self) -> Any:
        """Messages in the file, each with its answer from a later line; a torn last line is ignored."""
        messages: dict[int, dict[str, Any]] = {}
        if self._path is not None and os.path.exists(self._path):
            with open(self._path, encoding="utf-8") as file:
                for text in file:
                    try:
                        line = json.loads(text)
                    except ValueError:
                        break
                    messages.setdefault(line["seq"], {}).update(line)
        return [messages[seq] for seq in sorted(messages)]


def play(env: Any, session: Session, episodes: int, seed: int | None = None) -> list[float]:
    """Plays a Gymnasium environment through a session; returns the episodes' returns."""
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if seed is None else seed + episode, options=session.parameters or None)
        action, total = session.reset(_plain(observation)), 0.0
        while action is not None:
            observation, reward, terminated, truncated, info = env.step(_of_space(env.action_space, action))
            total += float(reward)
            action = session.step(float(reward), _plain(observation), bool(terminated), bool(truncated), _numbers(info))
        returns.append(total)
    return returns


def play_parallel(env: Any, session: Session, episodes: int, seed: int | None = None) -> list[dict[str, float]]:
    """Plays a parallel environment of PettingZoo through a session; returns the agents' returns of each episode."""
    returns = []
    for episode in range(episodes):
        observations, _ = env.reset(seed=None if seed is None else seed + episode)
        total = dict.fromkeys(env.possible_agents, 0.0)
        actions: dict[str, Any] | None = session.reset_agents(
            {agent: _plain(observations[agent]) for agent in env.agents}
        )
        while actions is not None:
            acted = {agent: _of_space(env.action_space(agent), action) for agent, action in actions.items()}
            observations, rewards, terminated, truncated, infos = env.step(acted)
            cut = [agent for agent in acted if truncated.get(agent) and not terminated.get(agent)]
            died = [agent for agent in acted if terminated.get(agent) or agent not in {*env.agents, *cut}]
            for agent, reward in rewards.items():
                total[agent] += float(reward)
            actions = session.step_agents(
                {agent: float(reward) for agent, reward in rewards.items()},
                {agent: _plain(observations[agent]) for agent in {*env.agents, *cut}},
                died if env.agents else died or True, cut if env.agents else True,
                {agent: _numbers(info) for agent, info in infos.items()},
            )  # fmt: skip
        returns.append(total)
    return returns


def play_turns(env: Any, session: Session, episodes: int, seed: int | None = None) -> list[dict[str, float]]:
    """Plays a game in turns of PettingZoo (AEC) through a session; returns the agents' returns of each episode."""
    returns = []
    for episode in range(episodes):
        env.reset(seed=None if seed is None else seed + episode)
        total, waiting = dict.fromkeys(env.possible_agents, 0.0), set[str]()
        _, seen, _, _, _ = _next_turn(env, waiting, total)
        actions: dict[str, Any] | None = session.reset_agents(seen)
        while actions is not None:
            ((agent, action),) = actions.items()
            env.step(_of_space(env.action_space(agent), action))
            waiting.add(agent)
            actions = session.step_agents(*_next_turn(env, waiting, total))
        returns.append(total)
    return returns


def _next_turn(env: Any, waiting: set[str], total: dict[str, float]) -> tuple[Any, Any, Any, Any, Any]:
    """Advances to the next agent that acts; returns rewards, observations, terminated and truncated agents, infos."""
    rewards: dict[str, float] = {}
    seen: dict[str, Any] = {}
    infos: dict[str, Any] = {}
    died: list[str] = []
    cut: list[str] = []
    while env.agents:
        agent = env.agent_selection
        observation, reward, terminated, truncated, info = env.last()
        if agent in waiting or terminated or truncated:
            infos[agent] = _numbers(info)
        rewards[agent] = rewards.get(agent, 0.0) + float(reward)
        total[agent] += float(reward)
        waiting.discard(agent)
        if not (terminated or truncated):
            seen[agent] = _plain(observation)
            break
        (died if terminated else cut).append(agent)
        if not terminated:
            seen[agent] = _plain(observation)
        env.step(None)
    gone = waiting - set(env.agents)  # without a further turn
    waiting -= gone
    died += sorted(gone)
    return rewards, seen, died if env.agents else died or True, cut if env.agents else True, infos


def _encoded(message: dict[str, Any]) -> str | bytes:
    """Returns a message as JSON, or, if it has NumPy arrays, as safetensors with the JSON in its metadata."""
    arrays: list[Any] = []

    def name(array: Any) -> dict[str, str]:
        arrays.append(array)
        return {"tensor": str(len(arrays) - 1)}

    text, offset = json.dumps(message, default=name), 0
    if not arrays:
        return text
    header: dict[str, Any] = {"__metadata__": {"message": text}}
    for number, array in enumerate(arrays):
        place = [offset, offset := offset + array.nbytes]
        header[str(number)] = {"dtype": _DTYPES[str(array.dtype)], "shape": list(array.shape), "data_offsets": place}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(array.tobytes() for array in arrays)


def _listed(array: Any) -> Any:
    return array.tolist()


def _numbers(info: dict[str, Any]) -> dict[str, float]:
    plain = ((str(name), _plain(value)) for name, value in info.items())
    return {name: value for name, value in plain if isinstance(value, (bool, int, float)) and math.isfinite(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(its) for name, its in value.items()}
    if isinstance(value, tuple):
        return [_plain(its) for its in value]
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "size", 0) < _SMALL else value


def _of_space(space: Any, action: Any) -> Any:
    """Returns an action as its space has it: arrays, tuples and whole numbers."""
    return space.from_jsonable([action])[0] if isinstance(action, (list, dict)) else action
