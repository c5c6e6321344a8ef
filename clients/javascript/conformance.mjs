// Plays the corridor for the conformance suite: `stagecoach gateway conformance -- node conformance.mjs`.

import { fileJournal, GatewayRefused, Session } from "./stagecoach_client.mjs";

const { STAGECOACH_URL, STAGECOACH_TOKEN, STAGECOACH_SESSION, STAGECOACH_EPISODES, STAGECOACH_JOURNAL } = process.env;

async function episode(session) {
  let [position, steps] = [0, 0];
  let action = await session.reset([position, steps]);
  while (action !== null) {
    position = Math.max(0, position + (action === 1 ? 1 : -1));
    steps += 1;
    const terminated = position === 5;
    const truncated = !terminated && steps === 20;
    const info = terminated || truncated ? { steps } : {};
    action = await session.step(0.5 * position, [position, steps], { terminated, truncated, info });
  }
}

try {
  const options = STAGECOACH_JOURNAL ? { journal: await fileJournal(STAGECOACH_JOURNAL) } : {};
  const session = new Session(STAGECOACH_URL, STAGECOACH_TOKEN, STAGECOACH_SESSION, options);
  for (let played = 0; played < Number(STAGECOACH_EPISODES); played++) await episode(session);
  const left = await session.settle(60);
  await session.close();
  process.exit(left === 0 ? 0 : 1);
} catch (error) {
  console.error(error instanceof GatewayRefused ? error.code : error);
  process.exit(error instanceof GatewayRefused ? 2 : 1);
}
