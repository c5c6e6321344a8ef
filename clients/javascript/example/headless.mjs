// Plays Catch without a browser: node headless.mjs TOKEN [MINUTES [ADDRESS]]

import { Session } from "../stagecoach_client.mjs";
import { Catch, play } from "./catch.mjs";

const [token, minutes = 5, address = "ws://127.0.0.1:7710/v1/play"] = process.argv.slice(2);
const began = Date.now();
const sessions = Array.from({ length: 8 }, (_, number) => new Session(address, token, `catch-${number}`));
const returns = [];

const over = () => Date.now() - began > 60_000 * minutes;
const ended = (caught) => returns.push(caught);
const report = setInterval(() => {
  const last = returns.slice(-50);
  const mean = last.reduce((sum, caught) => sum + caught, 0) / last.length;
  const seconds = Math.round((Date.now() - began) / 1000);
  const { version } = sessions[0];
  console.log(`${seconds} s: ${mean.toFixed(1)} caught, mean of 50; ${returns.length} episodes; version ${version}`);
}, 10_000);

await Promise.all(sessions.map((session) => play(new Catch(), session, { over, ended })));
clearInterval(report);
await Promise.all(sessions.map((session) => session.settle(30)));
await Promise.all(sessions.map((session) => session.close()));
