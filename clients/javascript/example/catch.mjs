// Catch: a paddle at the bottom catches balls that fall, drift and bounce off the walls. An episode ends with the
// first ball that is missed, or after 20. The game runs without a canvas, too: `draw` is all that a page adds.

export const BALLS = 20;
const PADDLE = 0.12; // half of its width; the field is 1 wide and 1 high
const MOVE = 0.05;
const FALL = 0.05;

export class Catch {
  constructor() {
    this.reset();
  }

  /** Begins an episode; returns its first observation. */
  reset() {
    this.paddle = 0.5;
    this.caught = 0;
    this.#drop();
    return this.#observation();
  }

  /** Moves the paddle: action 0 to the left, 1 not at all, 2 to the right. */
  step(action) {
    this.paddle = Math.min(1 - PADDLE, Math.max(PADDLE, this.paddle + MOVE * (action - 1)));
    this.x += this.drift;
    this.y += FALL;
    if (this.x < 0 || this.x > 1) {
      this.drift = -this.drift;
      this.x += 2 * this.drift;
    }
    const down = this.y >= 1;
    const caught = down && Math.abs(this.x - this.paddle) <= PADDLE;
    const outcome = { reward: caught ? 1 : 0, terminated: down && !caught, truncated: false };
    if (caught) {
      this.caught += 1;
      outcome.truncated = this.caught === BALLS;
      this.#drop();
    }
    return { ...outcome, observation: this.#observation() };
  }

  draw(context, size) {
    context.fillStyle = "#123";
    context.fillRect(0, 0, size, size);
    context.fillStyle = "#fff";
    context.fillRect((this.paddle - PADDLE) * size, 0.97 * size, 2 * PADDLE * size, 0.03 * size);
    context.beginPath();
    context.arc(this.x * size, this.y * size, 0.03 * size, 0, 2 * Math.PI);
    context.fill();
    context.fillText(this.caught, 0.04 * size, 0.1 * size);
  }

  #drop() {
    this.x = Math.random();
    this.y = 0;
    this.drift = 0.06 * (Math.random() - 0.5);
  }

  #observation() {
    return [this.paddle, this.x, this.y, 20 * this.drift];
  }
}

/** Plays until `over` returns true, and calls `ended` with each episode's return; `tick` is awaited before a step. */
export async function play(game, session, { over, ended, tick = () => {} }) {
  while (!over()) {
    let action = await session.reset(game.reset());
    while (action !== null) {
      await tick();
      const { reward, observation, terminated, truncated } = game.step(action);
      action = await session.step(reward, observation, { terminated, truncated });
    }
    ended(game.caught);
  }
}
