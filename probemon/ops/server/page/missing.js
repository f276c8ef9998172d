// What an address leads to and is not there: a link may be damaged, or of another answer than its writer thought.

import { clip } from "./harmless.js";
import { isRunning } from "./state.js";
import { plural } from "./words.js";

const nChoices = (run) => Math.max(run.n, run.choices.length);

/** Whether the address leads to a choice that the run it leads to does not have, and will not have. */
export function choiceIsMissing(app) {
  const run = app.run();
  return run !== null && run.whole && app.place.choice >= nChoices(run);
}

/** What is not there, in a sentence; "" where all is. While an answer goes on, its tokens may yet come. */
export function whatIsMissing(app, view) {
  const run = app.run();
  const { choice, token, concept } = app.place;
  if (choiceIsMissing(app))
    return `The address leads to answer ${choice + 1} of a request that has ${plural(nChoices(run), "answer")}.`;
  if (view === null) return "";
  if (token !== null && view.pinned === null && !isRunning(run))
    return `The address leads to token ${token}, which is not in this answer.`;
  if (concept !== null && view.concept === null)
    return `The address leads to the concept ${clip(concept, 80)}, which is not in the pack that scored this answer.`;
  return "";
}
