// A client of Stagecoach's gateway for browsers and Node: one ES module without dependencies.
//
//     const session = new Session("ws://127.0.0.1:7700/v1/play", token, "game-0");
//     let action = await session.reset(observation);
//     while (action !== null) {
//       const { reward, observation, terminated, truncated } = world.step(action);
//       action = await session.step(reward, observation, { terminated, truncated }); // null at an episode's end
//     }
//
// A session keeps a journal of what the gateway has not acknowledged, and sends it again after a cut: nothing is
// learned twice, and nothing is lost with the connection or the gateway.

const PROTOCOL = 1;
const ATTEMPT_SECONDS = 10; // until a handshake, and then until a welcome
const SILENT_SECONDS = 60; // a connection that says nothing for so long while something is due is replaced
const CLOSE_SECONDS = 2;
const SHORTEST_PAUSE = 0.05;
const LONGEST_PAUSE = 5;

const refusals = new Set(); // addresses that were answered with 401, in Node: its WebSocket does not report that
const channels = globalThis.process?.getBuiltinModule?.("node:diagnostics_channel");
channels?.subscribe("undici:request:headers", ({ request, response }) => {
  if (response.statusCode === 401) refusals.add(request.origin + request.path);
});

/** The gateway refuses a message or the token; trying again does not help. `code` is the protocol's error. */
export class GatewayRefused extends Error {
  name = "GatewayRefused";

  constructor(code, message) {
    super(`${code}: ${message}`);
    this.code = code;
  }
}

/** The gateway could not be reached for `patienceSeconds`; the journal still has what it lacks. */
export class GatewayAway extends Error {
  name = "GatewayAway";
}

/** One environment's life. Promises resolve when the gateway has answered, through cuts and restarts of it. */
export class Session {
  /** The first message that is not in the run's log yet. */
  acknowledged = 0;
  /** Policy version of the last action. */
  version = -1;
  /** The run's spaces, once connected. */
  spaces = null;
  #address;
  #name;
  #options;
  #messages = []; // not acknowledged, oldest first
  #next = 0;
  #joined = false; // has been welcomed, so that its numbers are certain
  #socket = null;
  #opened = false;
  #welcomed = false;
  #refused = null;
  #reason = "";
  #pause = 0;
  #complained = false;
  #changed;
  #wake;

  /**
   * Reads the journal; connects with the first message.
   *
   * - `name`: 1 to 64 letters, digits, ".", "_" or "-"; unique among the client's environments.
   * - `journal`: keeps messages beyond this program's life, see `fileJournal` and `storageJournal`.
   * - `spaces`: {observation, action}, compared with the run's.
   * - `WebSocket`: a class like the browser's; needed in a Node without one.
   */
  constructor(url, token, name = "0", options = {}) {
    const defaults = { journal: MEMORY, spaces: null, patienceSeconds: 3600, WebSocket: globalThis.WebSocket };
    this.#options = { ...defaults, ...options };
    if (!this.#options.WebSocket)
      throw new TypeError("no WebSocket here: run node --experimental-websocket, or pass the class of the package ws");
    const address = new URL(url);
    address.searchParams.set("token", token); // browsers cannot set headers
    this.#address = address.href;
    this.#name = name;
    this.#notify();
    this.#load();
  }

  /** Begins an episode; resolves to its first action. */
  reset(observation) {
    return this.#exchange({ type: "reset", observation }, false);
  }

  /** Sends the outcome of the last action; resolves to the next action, or null at the end of an episode. */
  step(reward, observation, { terminated = false, truncated = false, info = {} } = {}) {
    return this.#exchange({ type: "step", reward, observation, terminated, truncated, info }, terminated || truncated);
  }

  /** Waits until all is acknowledged, at most so long; resolves to the number of messages still in the journal. */
  async settle(seconds) {
    const until = Date.now() + 1000 * seconds;
    while (this.#messages.length > 0 && Date.now() < until) await this.#progress(until);
    return this.#messages.length;
  }

  /** Says bye, which frees the session's slot once all of it is learned. The session cannot be used afterwards. */
  async close() {
    this.#refused ??= new GatewayRefused("closed", "this session has been closed");
    if (this.#welcomed) {
      this.#socket.send('{"type": "bye"}');
      const until = Date.now() + 1000 * CLOSE_SECONDS;
      while (this.#socket && Date.now() < until) await this.#event(until);
    }
    this.#drop();
  }

  async #exchange(fields, ends) {
    if (!this.#joined) await this.#connect();
    if (this.#refused) throw this.#refused;
    const text = JSON.stringify({ ...fields, seq: this.#next }, plain);
    const message = JSON.parse(text); // a copy: the caller may reuse its arrays
    this.#next += 1;
    this.#messages.push(message);
    this.#options.journal.append(`${text}\n`);
    if (this.#welcomed) this.#socket.send(text); // otherwise it is sent after the welcome
    if (ends) return null;
    while (!("version" in message)) await this.#progress();
    return message.action;
  }

  /** Connects, or waits for the gateway's next message. */
  async #progress(until = Number.POSITIVE_INFINITY) {
    if (!this.#welcomed && !this.#refused) await this.#connect(until);
    else if (!this.#refused && !(await this.#event(Math.min(until, Date.now() + 1000 * SILENT_SECONDS))))
      if (Date.now() < until) this.#drop();
    if (this.#refused) throw this.#refused;
  }

  /** Tries to connect until it succeeds, `until` or the patience is over, or the gateway refuses. */
  async #connect(until = Number.POSITIVE_INFINITY) {
    const patient = Date.now() + 1000 * this.#options.patienceSeconds;
    while (!this.#welcomed && !this.#refused && Date.now() < until) {
      if (Date.now() > patient) throw new GatewayAway(this.#reason || "the gateway cannot be reached");
      const pause = 1000 * this.#pause * (0.5 + Math.random() / 2);
      if (pause) await new Promise((resolve) => setTimeout(resolve, Math.min(pause, until - Date.now())));
      this.#pause = Math.min(Math.max(2 * this.#pause, SHORTEST_PAUSE), LONGEST_PAUSE);
      if (this.#pause === LONGEST_PAUSE && !this.#complained) console.warn("the gateway is away; trying again");
      this.#complained ||= this.#pause === LONGEST_PAUSE;
      await this.#attempt(until);
    }
    if (this.#refused) throw this.#refused;
  }

  async #attempt(end) {
    const limit = () => Math.min(end, Date.now() + 1000 * ATTEMPT_SECONDS);
    let until = limit();
    const socket = new this.#options.WebSocket(this.#address);
    this.#socket = socket;
    this.#opened = false;
    const oldest = this.#messages[0]?.seq ?? (this.#joined ? this.#next : null);
    const hello = { type: "hello", protocol: PROTOCOL, session: this.#name, journal_from: oldest };
    if (this.#options.spaces) hello.spaces = this.#options.spaces;
    socket.onopen = () => {
      this.#opened = true;
      until = limit();
      socket.send(JSON.stringify(hello));
      this.#notify();
    };
    socket.onmessage = ({ data }) => {
      try {
        this.#handle(JSON.parse(data));
      } catch (error) {
        this.#refused = error; // such as a full disk, of the journal; the next call throws it
        this.#drop();
      }
      this.#notify();
    };
    socket.onclose = ({ code }) => {
      if (code === 1009) this.#refused = new GatewayRefused("too_long", "a message is longer than the gateway allows");
      this.#drop();
    };
    socket.onerror = ({ message }) => {
      this.#reason = message ?? ""; // a browser gives none
      this.#drop();
    };
    while (this.#socket && !this.#welcomed && (await this.#event(until)));
    if (this.#welcomed || this.#refused) return;
    this.#drop();
    if (!this.#opened && (await this.#unauthorized()))
      this.#refused = new GatewayRefused("unauthorized", "the gateway does not know this token");
  }

  /** Returns whether the token was refused: a WebSocket that fails does not say why, so a page asks by HTTP. */
  async #unauthorized() {
    const address = this.#address.replace("ws", "http");
    if (this.#reason.endsWith(" 401") || refusals.delete(address)) return true;
    if (channels) return false;
    try {
      return (await fetch(address, { signal: AbortSignal.timeout(1000 * ATTEMPT_SECONDS) })).status === 401;
    } catch {
      return false; // it is away, or does not let pages read its answer
    }
  }

  #handle(message) {
    if (message.type === "welcome") this.#welcome(message);
    else if (message.type === "action") {
      const { seq, action, version } = message;
      const asked = this.#messages.findLast((kept) => kept.seq === seq);
      if (!asked || "version" in asked) return;
      Object.assign(asked, { action, version });
      this.version = version;
      this.#options.journal.append(`${JSON.stringify({ seq, action, version })}\n`);
    } else if (message.type === "acknowledged") this.#forget(message.seq);
    else if (message.type === "error" && !["away", "failed"].includes(message.error)) {
      this.#refused = new GatewayRefused(message.error, message.message);
      this.#drop();
    } else if (message.type === "error" || message.type === "goodbye") {
      this.#reason = message.reason ?? message.message;
      this.#drop();
    }
  }

  #welcome({ from, next, spaces }) {
    this.spaces = spaces;
    this.#pause = SHORTEST_PAUSE;
    this.#forget(from);
    if (this.#joined && next > this.#next) {
      this.#refused = new GatewayRefused("session", `another client has continued the session ${this.#name}`);
      this.#drop();
      return;
    }
    this.#joined = true;
    this.#next = Math.max(this.#next, next); // a journal in memory is empty at first, and one in a file may lack its end
    for (const message of this.#messages) if (message.seq >= next) this.#socket.send(JSON.stringify(message));
    this.#welcomed = true;
  }

  /** Leaves the connection, if there is one. */
  #drop() {
    const socket = this.#socket;
    this.#socket = null;
    this.#welcomed = false;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.onerror = () => {}; // `ws` throws an error without a listener
      socket.close();
    }
    this.#notify();
  }

  /** Waits for a message or the connection's end; resolves to false if there was none until then. */
  async #event(until) {
    let timer;
    const late = new Promise((resolve) => (timer = setTimeout(resolve, until - Date.now(), false)));
    const came = await Promise.race([this.#changed, late]);
    clearTimeout(timer);
    return came;
  }

  #notify() {
    this.#wake?.(true);
    this.#changed = new Promise((resolve) => (this.#wake = resolve));
  }

  /** Reads the journal's lines: messages, and their answers. What follows a line that was cut is left out. */
  #load() {
    const messages = new Map();
    for (const text of this.#options.journal.read().split("\n").filter(Boolean)) {
      try {
        const line = JSON.parse(text);
        messages.set(line.seq, { ...messages.get(line.seq), ...line });
      } catch {
        break;
      }
    }
    this.#messages = [...messages.values()].filter((message) => message.type);
    if (this.#messages.length === 0) return;
    this.#next = this.#messages.at(-1).seq + 1;
    this.acknowledged = this.#messages[0].seq;
    this.#rewrite();
  }

  #forget(before) {
    this.acknowledged = Math.max(this.acknowledged, before);
    const kept = this.#messages.filter((message) => message.seq >= before);
    if (kept.length === this.#messages.length) return;
    this.#messages = kept;
    this.#rewrite();
  }

  #rewrite() {
    this.#options.journal.replace(this.#messages.map((message) => `${JSON.stringify(message)}\n`).join(""));
  }
}

const plain = (_, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);

// A journal is an object with read(), append(text) and replace(text), all synchronous.

const MEMORY = { read: () => "", append() {}, replace() {} };

/** Resolves to a journal in a file, for Node: a program that was killed continues its session. */
export async function fileJournal(path) {
  const { appendFileSync, existsSync, readFileSync, renameSync, writeFileSync } = await import("node:fs");
  return {
    read: () => (existsSync(path) ? readFileSync(path, "utf8") : ""),
    append: (text) => appendFileSync(path, text),
    replace(text) {
      writeFileSync(`${path}.part`, text);
      renameSync(`${path}.part`, path);
    },
  };
}

/** Returns a journal in `localStorage`: a page that was reloaded continues its session. */
export function storageJournal(key, storage = globalThis.localStorage) {
  const read = () => storage.getItem(key) ?? "";
  return {
    read,
    append: (text) => storage.setItem(key, read() + text),
    replace: (text) => storage.setItem(key, text),
  };
}
