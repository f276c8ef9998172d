// What is known of the server's requests: events and records go in, runs come out. Nothing here touches the page, the
// clock or the network.
//
//   const state = newState();
//   meet(state, boot);                      // of which server what follows is; true where it is another than before
//   apply(state, "token", data);            // the id of the run that changed, or null
//   merge(state, record);                   // a whole record of a run: what events have told already is not doubled
//
// A run: {id, created, kind, key, messages, prompt, options, n, choices, error, whole}; `key`: the name of who asked,
// `listed`: what the server's list says of how it ended. A choice: {text, reasoning, finish, tokens, events, summary,
// version}. Tokens name concepts by their numbers in a pack: in that of the run, which it has where it is of a file or of
// a server before this one (`before`), else in that of the state.
// Tokens lie by position; a token that is told twice replaces itself, so that events after a reconnect, or beside a
// record, do no harm.

export function newState() {
  return { pack: null, boot: null, nDropped: 0, runs: new Map() };
}

export const newChoice = () => ({
  text: "",
  reasoning: "",
  finish: null,
  tokens: [],
  events: [],
  summary: null,
  holes: false,
  version: 0,
});

/** Hear of which server (`boot`) what follows is; return whether it is another than before, whose pack is not known. */
export function meet(state, boot) {
  const other = state.boot !== null && state.boot !== boot;
  if (other) leaveServer(state);
  state.boot = boot;
  return other;
}

/** Runs keep the pack that they were scored with; those of which no more than the beginning is known go. */
function leaveServer(state) {
  for (const [id, run] of state.runs) {
    if (run.pack) continue;
    if (state.pack === null || !run.whole) state.runs.delete(id);
    else Object.assign(run, { pack: state.pack, before: true, ended: true });
  }
  state.pack = null;
}

function runOf(state, id) {
  if (!state.runs.has(id)) {
    state.runs.set(id, {
      id,
      created: 0,
      kind: "chat",
      key: null,
      messages: null,
      prompt: null,
      options: {},
      n: 1,
      choices: [],
      error: null,
      whole: false,
      excerpt: "",
      listed: null,
      ended: false,
    });
  }
  return state.runs.get(id);
}

export function choiceOf(run, i) {
  while (run.choices.length <= i) run.choices.push(newChoice());
  return run.choices[i];
}

/** Whether more may come of a run. A request that nobody reads any more ends with all that it has not begun. */
export function isRunning(run) {
  if (run.error !== null || run.ended || run.choices.some(({ finish }) => finish === "cancelled" || finish === "error"))
    return false;
  return run.choices.length < run.n || run.choices.some(({ finish }) => finish === null);
}

/**
 * How many tokens of an answer did not reach this page: positions that are left out between those that did, or what the
 * answer's end counts besides.
 */
export function nMissing({ tokens, summary }) {
  let n = 0;
  for (let i = 1; i < tokens.length; i++) n += tokens[i].position - tokens[i - 1].position - 1;
  const told = (summary?.coverage?.tokens ?? 0) - (summary?.n_withheld ?? 0);
  return Math.max(n, told - tokens.length);
}

/** Where a token belongs among those of its choice; the newest is most often the last. */
function placeOf(tokens, position) {
  let low = 0;
  let high = tokens.length;
  if (high && tokens[high - 1].position < position) return high;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].position < position) low = middle + 1;
    else high = middle;
  }
  return low;
}

const nCharacters = (text) => {
  let n = text.length;
  for (let i = 0; i < text.length; i++) if ((text.charCodeAt(i) & 0xfc00) === 0xd800) n--;
  return n;
};

/** Whether the place of a token is in the reasoning, not in the reply. */
export const isReasoning = ({ part }) => part === "reasoning";

function addToken(choice, token) {
  if (token.phase !== "generated") return;
  const at = placeOf(choice.tokens, token.position);
  const known = choice.tokens[at]?.position === token.position;
  choice.tokens.splice(at, known ? 1 : 0, token);
  if (!known && choice.finish === null && token.start !== null) {
    // The text grows by the tokens; what is missing of it shows as such until the whole text comes with the end.
    const name = isReasoning(token) ? "reasoning" : "text";
    const have = nCharacters(choice[name]);
    if (token.start > have) {
      choice[name] += "…".repeat(token.start - have);
      choice.holes = true;
    }
    if (token.start >= have && token.end > token.start) choice[name] += token.text;
  }
  choice.version++;
}

const sameEvent = (a, b) =>
  a.position === b.position &&
  a.concept === b.concept &&
  a.action === b.action &&
  a.threshold === b.threshold &&
  a.for_tokens === b.for_tokens &&
  a.aggregate === b.aggregate;

function addEvent(choice, event) {
  if (choice.events.some((known) => sameEvent(known, event))) return;
  choice.events.push(event);
  choice.events.sort((a, b) => a.position - b.position);
  choice.version++;
}

function endChoice(choice, { finish_reason, text, reasoning, summary }) {
  choice.finish = finish_reason ?? choice.finish;
  if (typeof text === "string") choice.text = text;
  if (typeof reasoning === "string") choice.reasoning = reasoning;
  choice.summary = summary ?? choice.summary;
  choice.version++;
}

/** A prompt is a text or a list of ids; a list of these is several. */
const nPrompts = (prompt) =>
  Array.isArray(prompt) && prompt.length && typeof prompt[0] !== "number" ? prompt.length : 1;

/** Take in one event of the stream; return the id of the run that it changed, or null. */
export function apply(state, name, data) {
  if (name === "gap") {
    state.nDropped += data.n_dropped;
    return null;
  }
  if (!["begin", "token", "rule", "end", "error"].includes(name)) return null;
  const run = runOf(state, data.request);
  if (name === "begin") {
    Object.assign(run, {
      created: data.created,
      kind: data.kind,
      key: data.key ?? null,
      messages: data.messages ?? null,
      prompt: data.prompt ?? null,
      options: data.options ?? {},
      whole: true,
      ended: false,
    });
    run.n = nPrompts(run.prompt) * (run.options.n ?? 1);
  } else if (name === "error") run.error = data.message;
  else {
    const choice = choiceOf(run, data.choice);
    if (name === "token") addToken(choice, data);
    else if (name === "rule") addEvent(choice, data);
    else endChoice(choice, data);
  }
  return run.id;
}

/**
 * Take in what an answer's own request got of it, {text, reasoning, finish_reason, summary}: it stands where events did
 * not bring the end.
 */
export function fill(state, id, told) {
  const choice = choiceOf(runOf(state, id), 0);
  if (choice.finish !== null) return;
  const whole = ![null, "cancelled"].includes(told.finish_reason) || choice.holes;
  const more = (name) => (whole || told[name].length > choice[name].length ? told[name] : choice[name]);
  endChoice(choice, { ...told, text: more("text"), reasoning: more("reasoning") });
}

/** The messages that a question after an answer goes on from; one that failed or has no text is left out, replaced. */
export function historyOf(run, i) {
  const choice = run.choices[i];
  const failed = run.error !== null || choice?.finish === "error" || (choice?.finish === "cancelled" && !choice.text);
  if (failed) return run.messages.slice(0, -1);
  return [...run.messages, { role: "assistant", content: choice?.text ?? "" }];
}

/** Take in a run's record, as /v1/probemon/requests/{id} gives it. */
export function merge(state, record) {
  const run = runOf(state, record.request);
  apply(state, "begin", record);
  if (record.error) run.error = record.error;
  record.choices.forEach((told, i) => {
    const choice = choiceOf(run, i);
    for (const token of told.tokens ?? []) addToken(choice, token);
    for (const event of told.events ?? []) addEvent(choice, event);
    if (told.finish_reason) endChoice(choice, told);
    else {
      for (const name of ["text", "reasoning"])
        if (nCharacters(told[name] ?? "") > nCharacters(choice[name]) || choice.holes) choice[name] = told[name] ?? "";
      choice.holes = false;
    }
    choice.version++;
  });
  return run;
}

/**
 * Take in the list of runs, of which little more than the names is known. Of those that were `known` before the list was
 * asked for and are not on it the server knows nothing any more, so nothing more comes of them.
 */
export function mergeList(state, list, known = []) {
  const listed = new Set(list.map(({ request }) => request));
  for (const id of known) {
    const run = state.runs.get(id);
    if (run && !run.pack && !listed.has(id)) run.ended = true;
  }
  for (const { request, created, kind, key, beginning, running, ...listed } of list) {
    const run = runOf(state, request);
    Object.assign(run, { created, kind, key: key ?? null, excerpt: beginning, listed });
    if (!run.whole) run.ended = !running;
  }
}

/** Runs, the newest first. */
export const newestFirst = (state) =>
  [...state.runs.values()].sort((a, b) => b.created - a.created || (a.id < b.id ? 1 : -1));

/** A run as a record that can be saved and read again. */
export function recordOf(run) {
  return {
    request: run.id,
    created: run.created,
    kind: run.kind,
    ...(run.key && { key: run.key }),
    messages: run.messages,
    prompt: run.prompt,
    options: run.options,
    error: run.error,
    choices: run.choices.map(({ text, reasoning, finish, tokens, events, summary }) => ({
      text,
      ...(reasoning && { reasoning }),
      finish_reason: finish,
      tokens,
      events,
      summary,
    })),
  };
}

/** The known answer that message `at` of a chat repeats: {run, i}, or null. */
export function answerOf(state, messages, at) {
  const before = JSON.stringify(messages.slice(0, at));
  for (const run of state.runs.values()) {
    if (run.messages === null || run.messages.length !== at || JSON.stringify(run.messages) !== before) continue;
    const i = run.choices.findIndex((choice) => choice.text === messages[at].content);
    if (i >= 0) return { run, i };
  }
  return null;
}
