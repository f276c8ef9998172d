// What asks: the message that is typed, one that is edited, the same question again; the settings that go with it.

import { $ } from "./elements.js";
import { ask } from "./api.js";
import { asked } from "./rules.js";
import { apply, choiceOf, fill, historyOf, nMissing } from "./state.js";
import { count } from "./words.js";

const TOP_K = 12;
const SYSTEM = "probemon-system";
const AGAIN = 0.7; // the temperature of another answer, where it was 0 and would be the same
const SEEDS = 2 ** 31;
const NOTICE = 8000; // milliseconds
const LATE = 1000; // milliseconds after which an answer's end comes from its request, not from the events

/** Whether what is asked next goes on with a conversation: only with one of this page. */
const goesOn = (app, run) => run !== null && run.kind === "chat" && app.own.has(run.id);

export function drawComposer(app, run) {
  const busy = app.asking !== null;
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").className = busy ? "stop" : "primary";
  $("new").hidden = run === null;
  $("editing").hidden = app.editing === null;
  $("ask").placeholder = app.editing !== null || !goesOn(app, run) ? "Ask something" : "Ask a follow-up question";
  const most = app.state.pack?.max_tokens;
  if (most && $("max-tokens").max !== String(most)) {
    $("max-tokens").max = String(most);
    $("most-tokens").textContent = `, at most ${count(most)}`;
    fitTokens();
  }
}

/** The server's limit holds for what was typed, too. */
function fitTokens() {
  const field = $("max-tokens");
  if (Number(field.value) > Number(field.max)) field.value = field.max;
}

const numberIn = (id) => ($(id).value.trim() === "" ? null : Number($(id).value));

/** Messages with the system prompt of the settings in place of another. */
function withSystem(messages) {
  const system = $("system").value.trim();
  const others = messages.filter(({ role }) => role !== "system");
  return system ? [{ role: "system", content: system }, ...others] : others;
}

/** Wait until events have told the end of an answer, but not long. */
async function endOf(choice) {
  const until = performance.now() + LATE;
  while (choice.finish === null && performance.now() < until) await new Promise((done) => setTimeout(done, 20));
}

/** Ask for an answer to messages. `typed` comes back into the field if the server does not answer them. */
async function send(app, messages, { typed = "", seed = numberIn("seed") } = {}) {
  if (app.state.pack === null) {
    app.complain("The server has not answered yet: send it again when this page is live.");
    return;
  }
  const all = withSystem(messages);
  const control = new AbortController();
  const body = {
    model: app.state.pack.model,
    messages: all,
    max_tokens: numberIn("max-tokens") || 200,
    temperature: numberIn("temperature") ?? 0,
    ...(seed === null ? {} : { seed }),
    probemon: { top_k: TOP_K, rules: asked(app.rules) },
  };
  app.asking = { id: null, messages: all, control };
  app.editing = null;
  app.complain("");
  app.follow = false; // stay with this conversation
  $("ask").value = "";
  grow();
  app.draw();
  const told = { text: "", reasoning: "", finish_reason: null, summary: null };
  const begun = (id) => {
    app.asking.id = id;
    app.own.add(id);
    const { messages, ...options } = body;
    const created = Math.floor(Date.now() / 1000); // until the server tells it
    if (!app.state.runs.get(id)?.whole)
      apply(app.state, "begin", { request: id, created, kind: "chat", messages, options });
    app.go({ answer: id });
  };
  const run = () => app.state.runs.get(app.asking.id);
  let comesBack = false;
  try {
    await ask(body, control.signal, begun, told);
    if (run()) await endOf(choiceOf(run(), 0));
  } catch (error) {
    const stopped = error.name === "AbortError";
    comesBack = !stopped || app.asking.id === null;
    if (stopped) told.finish_reason = "cancelled";
    else {
      app.complain(error.status ? error.message : `The server did not answer: ${error.message}`);
      if (error.status === 401) app.signIn();
      if (run()) run().error ??= error.message;
    }
  }
  if (run()) {
    fill(app.state, run().id, told);
    if (!control.signal.aborted && nMissing(run().choices[0])) app.load(run().id);
  }
  if (comesBack && !$("ask").value) {
    $("ask").value = typed;
    grow();
  }
  app.asking = null;
  app.draw();
}

/** Send what was typed: after the conversation that is shown, or in place of the message that is edited. */
function sendTyped(app) {
  const typed = $("ask").value.trim();
  const run = app.run();
  if (!typed) return;
  const before =
    app.editing ?? (goesOn(app, run) && run.messages !== null ? historyOf(run, app.place.choice) : []);
  send(app, [...before, { role: "user", content: typed }], { typed });
}

/** Put a message of a conversation back into the field: sent again, it replaces what followed. */
export function edit(app, messages, i) {
  app.editing = messages.slice(0, i);
  $("ask").value = typeof messages[i].content === "string" ? messages[i].content : "";
  grow();
  $("ask").focus();
  app.draw();
}

/** Ask the same question again with another seed. */
function again(app) {
  const run = app.run();
  if (app.asking !== null || run === null || run.messages === null) return;
  const same = !numberIn("temperature");
  if (same) $("temperature").value = String(AGAIN);
  send(app, run.messages, { seed: Math.floor(Math.random() * SEEDS) });
  if (same) app.complain(`At temperature 0 the answer would be the same: it is now ${AGAIN} (see Settings).`, NOTICE);
}

async function copy(app) {
  const view = app.view();
  if (view === null) return;
  try {
    await navigator.clipboard.writeText(view.choice.text);
  } catch {
    // Without https a page has no clipboard: the older way.
    const box = document.createElement("textarea");
    box.value = view.choice.text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    $("copy").focus();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => {
    $("copy").textContent = "Copy";
  }, 2000);
}

function grow() {
  const box = $("ask");
  box.style.height = "auto";
  box.style.height = `${Math.min(160, box.scrollHeight + 2)}px`;
}

export function compose(app) {
  $("system").value = sessionStorage.getItem(SYSTEM) ?? "";
  $("system").addEventListener("input", () => sessionStorage.setItem(SYSTEM, $("system").value));
  $("max-tokens").addEventListener("change", fitTokens);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (app.asking !== null) app.asking.control.abort();
    else sendTyped(app);
  });
  $("ask").addEventListener("input", grow);
  $("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (app.asking === null) sendTyped(app);
    }
  });
  $("editing-end").addEventListener("click", () => {
    app.editing = null;
    $("ask").value = "";
    grow();
    app.draw();
  });
  $("again-answer").addEventListener("click", () => again(app));
  $("copy").addEventListener("click", () => copy(app));
  $("new").addEventListener("click", () => {
    app.follow = false;
    app.editing = null;
    app.go({ answer: null });
    $("ask").focus();
  });
  $("newest").addEventListener("click", () => {
    $("thread").scrollTop = $("thread").scrollHeight;
    app.draw();
  });
  $("thread").addEventListener("scroll", () => app.draw(), { passive: true });
  for (const example of document.querySelectorAll("#examples button"))
    example.addEventListener("click", () =>
      send(app, [{ role: "user", content: example.textContent }], { typed: example.textContent }),
    );
}
