// How much of an answer was checked for concepts, in a line.

import { plural } from "./words.js";
import { toldOf } from "./said.js";
import { nMissing } from "./state.js";

export function coverageOf(view) {
  const { choice, pack, upto } = view;
  const missing = nMissing(choice);
  const tokens = choice.tokens.slice(0, upto + 1);
  if (!tokens.length) return "";
  const seen = tokens.filter((token) => !token.unseen);
  const sum = (name) => seen.reduce((total, token) => total + token[name], 0);
  const perToken = (name) => (sum(name) / Math.max(1, seen.length)).toFixed(0);
  const shed = tokens.filter((token) => token.n_shed).length;
  return [
    ...(missing ? [`${plural(missing, "token")} did not reach this page: nothing is known about them here`] : []),
    `${seen.length} of ${plural(tokens.length, "token")} checked`,
    `${perToken("n_active")} of ${plural(pack.concepts.length, "concept")} scored per token, narrow ones only as needed`,
    ...(sum("n_dropped") ? [`${plural(sum("n_dropped"), "score")} missing: late, or over a limit`] : []),
    ...(shed ? [`concepts left out at ${plural(shed, "token")} to save time`] : []),
    ...(sum("n_excluded") ? [`${perToken("n_excluded")} left out per token by the server's settings`] : []),
    ...(view.run.error && choice.finish === null ? ["the answer failed: later tokens were not checked"] : []),
    ...(toldOf(view) ? [toldOf(view)] : []),
  ].join(" · ");
}
