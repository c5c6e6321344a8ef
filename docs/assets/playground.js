// The playground page: reads policy.safetensors, computes the policy's network, and plays CartPole-v1 and tic-tac-toe.
// A classic script, not a module, since browsers refuse modules to a page that is opened as a file.

const ILLEGAL = -1e9; // the logit of an illegal choice, as in shared/policies/masks.py
const ACTIVATIONS = {
  tanh: Math.tanh,
  relu: (x) => Math.max(x, 0),
  elu: (x) => (x > 0 ? x : Math.expm1(x)),
  silu: (x) => x / (1 + Math.exp(-x)),
};

/** Arrays by name and Stagecoach's header of a safetensors file: 8 bytes of length, JSON, then the numbers. */
function parseSafetensors(buffer) {
  const view = new DataView(buffer);
  const start = 8 + Number(view.getBigUint64(0, true));
  const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  const text = metadata.stagecoach; // 16 digits of a hash, a space, the header
  const arrays = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    if (dtype === "F32") arrays[name] = { shape, data: new Float32Array(buffer.slice(start + from, start + to)) };
  }
  return { arrays, header: JSON.parse(text.slice(text.indexOf(" ") + 1)) };
}

/** The network of an actor-critic with vector observations and one discrete action. */
class Policy {
  constructor(buffer) {
    let file;
    try {
      file = parseSafetensors(buffer);
    } catch {
      throw new Error("this is no policy.safetensors of Stagecoach");
    }
    const { arrays, header } = file;
    const { config, spaces } = header;
    const [action, ...others] = spaces.action.leaves;
    const seen = spaces.observation.leaves.filter((leaf) => !leaf.mask);
    const readable = header.format === 1 && header.kind === "actor_critic" && !config.layer_norm && !config.transform;
    if (!readable) throw new Error(`cannot play a policy of kind ${header.kind} with this network; expected a plain MLP`);
    if (action.kind !== "discrete" || others.length || seen.length !== 1 || seen[0].kind !== "box") {
      throw new Error("expected one vector of observations and one discrete action");
    }
    this.arrays = arrays;
    this.version = header.version;
    this.hidden = config.hidden_sizes;
    this.inputs = seen[0].shape.reduce((product, side) => product * side, 1);
    this.actions = action.nvec[0];
    this.activation = ACTIVATIONS[config.activation];
    this.actor = this.layers("actor");
    this.critic = config.share_encoder ? this.actor : this.layers("critic");
  }

  /** Names of the linear layers of an encoder, in their order. */
  layers(encoder) {
    const index = (name) => Number(name.split(".")[2]);
    const names = Object.keys(this.arrays).filter((name) => name.startsWith(`${encoder}.mlp.`) && name.endsWith(".weight"));
    return names.map((name) => name.slice(0, -".weight".length)).sort((a, b) => index(a) - index(b));
  }

  /** Wx + b; sums are exact to double precision, results are float32. */
  linear(name, input) {
    const { data: weights } = this.arrays[`${name}.weight`];
    const { data: biases } = this.arrays[`${name}.bias`];
    return biases.map((bias, row) => {
      let sum = bias;
      for (let column = 0; column < input.length; column++) sum += weights[row * input.length + column] * input[column];
      return sum;
    });
  }

  normalized(observation) {
    const values = Float32Array.from(observation);
    const part = (name) => this.arrays[`normalizer.moments.0.${name}`]?.data;
    const [shift, scale, bound] = ["shift", "scale", "bound"].map(part);
    if (!shift) return values;
    return values.map((value, i) => {
      const moved = Math.fround(Math.fround(value - shift[i]) * scale[i]);
      return Math.min(Math.max(moved, -bound[0]), bound[0]);
    });
  }

  output(layers, head, observation) {
    let values = this.normalized(observation);
    for (const layer of layers) values = this.linear(layer, values).map(this.activation);
    return this.linear(head, values);
  }

  /** `mask` has a number above 0 for each legal choice. */
  logits(observation, mask = null) {
    const outputs = this.output(this.actor, "head", observation);
    return mask?.some((legal) => legal > 0) ? outputs.map((logit, i) => (mask[i] > 0 ? logit : ILLEGAL)) : outputs;
  }

  probabilities(observation, mask = null) {
    const logits = this.logits(observation, mask);
    const most = Math.max(...logits);
    const weights = logits.map((logit) => Math.exp(logit - most));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return weights.map((weight) => weight / sum);
  }

  /** The most probable action, as evaluations act. */
  act(observation, mask = null) {
    const logits = this.logits(observation, mask);
    return logits.indexOf(Math.max(...logits));
  }

  value(observation) {
    return this.output(this.critic, "value_head", observation)[0];
  }
}

/** CartPole-v1 with Gymnasium's equations of motion and limits. */
class CartPole {
  static MOST_X = 2.4;
  static MOST_ANGLE = (12 * 2 * Math.PI) / 360;
  static MOST_STEPS = 500;

  constructor(random = Math.random) {
    this.state = Array.from({ length: 4 }, () => random() * 0.1 - 0.05);
    this.steps = 0;
  }

  step(action) {
    const [x, speed, angle, turn] = this.state;
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    const push = ((action === 1 ? 10 : -10) + 0.05 * turn * turn * sin) / 1.1;
    const turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 * cos * cos) / 1.1));
    const speeding = push - (0.05 * turning * cos) / 1.1;
    this.state = [x + 0.02 * speed, speed + 0.02 * speeding, angle + 0.02 * turn, turn + 0.02 * turning];
    this.steps += 1;
  }

  get fallen() {
    return Math.abs(this.state[0]) > CartPole.MOST_X || Math.abs(this.state[2]) > CartPole.MOST_ANGLE;
  }

  get over() {
    return this.fallen || this.steps >= CartPole.MOST_STEPS;
  }
}

/** Tic-tac-toe as PettingZoo's classic/tictactoe-v3 shows it to its players 0 and 1. */
class TicTacToe {
  static LINES = ["012", "345", "678", "036", "147", "258", "048", "246"].map((line) => [...line].map(Number));

  constructor() {
    this.squares = Array(9).fill(null);
    this.player = 0;
  }

  /** 3 × 3 squares, each with two numbers: the player's own mark, and the opponent's. */
  get observation() {
    return this.squares.flatMap((mark) => [Number(mark === this.player), Number(mark === 1 - this.player)]);
  }

  get mask() {
    return this.squares.map((mark) => Number(mark === null));
  }

  move(square) {
    if (this.over || this.squares[square] !== null) throw new Error(`illegal move ${square}`);
    this.squares[square] = this.player;
    this.player = 1 - this.player;
  }

  get line() {
    const marks = this.squares;
    return TicTacToe.LINES.find(([a, b, c]) => marks[a] !== null && marks[a] === marks[b] && marks[a] === marks[c]);
  }

  get winner() {
    return this.line ? this.squares[this.line[0]] : null;
  }

  get over() {
    return this.winner !== null || !this.squares.includes(null);
  }
}

const decoded = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
const policies = Object.fromEntries(
  Object.entries(globalThis.playgroundPolicies).map(([name, text]) => [name, new Policy(decoded(text))]),
);

/** `pushed`: the side of a push to show, or 0. */
function drawCartPole(canvas, game, pushed) {
  const scale = devicePixelRatio;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * scale)) [canvas.width, canvas.height] = [width * scale, height * scale].map(Math.round);
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const unit = width / 5.4; // the track is 4.8 wide, and the cart leaves it by half
  const [x, , angle] = game.state;
  const [center, ground] = [width / 2 + x * unit, height - 34];
  const tip = [center + Math.sin(angle) * unit, ground - 14 - Math.cos(angle) * unit];
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const line = (color, thickness, ...points) => {
    pen.strokeStyle = color;
    pen.lineWidth = thickness;
    pen.lineCap = "round";
    pen.beginPath();
    for (const point of points) pen.lineTo(...point);
    pen.stroke();
  };
  const at = ([x, y]) => [tip[0] + pushed * x, tip[1] + y];
  line(style.borderColor, 2, [width / 2 - 2.4 * unit, ground + 14], [width / 2 + 2.4 * unit, ground + 14]);
  for (const end of [-2.4, 2.4]) line(style.borderColor, 2, [width / 2 + end * unit, ground + 4], [width / 2 + end * unit, ground + 24]);
  pen.fillStyle = style.color;
  pen.beginPath();
  pen.roundRect(center - 30, ground - 14, 60, 26, 5);
  pen.fill();
  line(style.caretColor, 9, [center, ground - 14], tip);
  if (pushed) for (const end of [[-46, 0], [-22, -7], [-22, 7]]) line(style.color, 3, at(end), at([-14, 0]));
}

/** CartPole on a canvas; the visitor pushes the pole. */
function showCartPole(root) {
  const part = (name) => root.querySelector(`[data-part=${name}]`);
  const canvas = part("canvas");
  let policy = policies.cartpole;
  let game = new CartPole();
  let paused = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let [last, wait, pushed, side, best] = [0, 0, 0, 0, 0];

  function tell() {
    const [left, right] = policy.probabilities(game.state);
    part("bar").style.width = `${100 * right}%`;
    part("left").textContent = `${Math.round(100 * left)}%`;
    part("right").textContent = `${Math.round(100 * right)}%`;
    part("steps").textContent = game.steps;
    part("value").textContent = policy.value(game.state).toFixed(0);
    part("best").textContent = best;
    part("pause").textContent = paused ? "Play" : "Pause";
  }

  function step() {
    pushed -= 1;
    if (game.over) {
      wait -= 1;
      if (wait <= 0) game = new CartPole();
      return;
    }
    game.step(policy.act(game.state));
    best = Math.max(best, game.steps);
    if (game.over) wait = 50;
  }

  function frame(now) {
    if (!paused) {
      last = Math.max(last, now - 200); // a tab that was hidden does not catch up
      for (; last + 20 <= now; last += 20) step();
    }
    drawCartPole(canvas, game, pushed > 0 ? side : 0);
    tell();
    requestAnimationFrame(frame);
  }

  /** Turns the pole by 0.5 rad/s more to the side −1 or 1. */
  function push(to) {
    if (!game.over) game.state[3] += 0.5 * to;
    [side, pushed] = [to, 12];
  }

  async function read(file) {
    if (!file) return;
    try {
      const found = new Policy(await file.arrayBuffer());
      if (found.inputs !== 4 || found.actions !== 2) {
        throw new Error(`CartPole has 4 observations and 2 actions; this policy has ${found.inputs} and ${found.actions}`);
      }
      [policy, game, best] = [found, new CartPole(), 0];
      part("file").textContent = `${file.name}: version ${found.version}, hidden layers ${found.hidden.join(" × ")}`;
    } catch (error) {
      part("file").textContent = `${file.name}: ${error.message}`;
    }
  }

  part("push-left").addEventListener("click", () => push(-1));
  part("push-right").addEventListener("click", () => push(1));
  part("pause").addEventListener("click", () => (paused = !paused));
  part("choose").addEventListener("change", (event) => read(event.target.files[0]));
  canvas.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    push(to);
  });
  root.addEventListener("dragover", (event) => event.preventDefault());
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    read(event.dataTransfer.files[0]);
  });
  requestAnimationFrame(frame);
}

/** Tic-tac-toe against the visitor, who begins every second game. */
function showTicTacToe(root) {
  const part = (name) => root.querySelector(`[data-part=${name}]`);
  const counts = { won: 0, drawn: 0, lost: 0 };
  let [game, visitor, thought] = [new TicTacToe(), 0, null];

  const squares = Array.from({ length: 9 }, (_, square) => {
    const button = document.createElement("button");
    button.addEventListener("click", () => play(square));
    part("board").append(button);
    return button;
  });

  function answer() {
    if (game.over || game.player === visitor) return;
    thought = policies.tictactoe.probabilities(game.observation, game.mask);
    game.move(policies.tictactoe.act(game.observation, game.mask));
  }

  function play(square) {
    if (game.over || game.squares[square] !== null) return;
    game.move(square);
    answer();
    if (game.over) counts[game.winner === null ? "drawn" : game.winner === visitor ? "won" : "lost"] += 1;
    show();
  }

  function show() {
    const result = game.winner === null ? "A draw." : game.winner === visitor ? "You win." : "The policy wins.";
    part("result").textContent = game.over ? result : `You are ${"×○"[visitor]}. Your move.`;
    part("counts").textContent = `You won ${counts.won}, drew ${counts.drawn}, lost ${counts.lost}.`;
    squares.forEach((button, square) => {
      const mark = game.squares[square];
      const share = thought && thought[square] >= 0.005 ? `${Math.round(100 * thought[square])}%` : "";
      button.textContent = mark === null ? "" : "×○"[mark];
      button.dataset.thought = share;
      button.className = game.line?.includes(square) ? "line" : mark === 1 - visitor ? "policy" : "";
      button.setAttribute("aria-label", `square ${square + 1}: ${mark === null ? "empty" : mark === visitor ? "yours" : "the policy's"}`);
    });
  }

  part("again").addEventListener("click", () => {
    [game, visitor, thought] = [new TicTacToe(), 1 - visitor, null];
    answer();
    show();
  });
  show();
}

globalThis.playground = { Policy, CartPole, policies };
showCartPole(document.getElementById("cartpole-game"));
showTicTacToe(document.getElementById("tictactoe-game"));
