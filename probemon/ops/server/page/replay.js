// A run played again, token by token; saved as a file, and read from one.

import { $ } from "./elements.js";
import { pathsOf } from "./hierarchy.js";
import { readPack } from "./digest.js";
import { merge, newState, recordOf } from "./state.js";

const FORMAT = "probemon-run-2";
const COUNTS = ["n_active", "n_dropped", "n_excluded", "n_shed"];

export function drawReplay(app, view) {
  const empty = view === null || !view.choice.tokens.length;
  const range = $("replay-range");
  $("replay").hidden = empty;
  if (empty) return;
  const { choice, upto } = view;
  const playing = app.replay?.timer != null;
  $("replay-play").textContent = playing ? "Pause" : "Replay";
  range.max = String(choice.tokens.length - 1);
  if (document.activeElement !== range || playing || app.replay === null) range.value = String(upto);
  $("replay-where").textContent = `${upto + 1} of ${choice.tokens.length}`;
  range.setAttribute("aria-valuetext", `token ${upto + 1} of ${choice.tokens.length}`);
}

function stop(app) {
  clearInterval(app.replay?.timer);
  if (app.replay) app.replay.timer = null;
}

/** Show the answer up to token `upto`; its last token ends the replay. */
function show(app, upto) {
  const view = app.view();
  if (view === null) return;
  if (upto >= view.choice.tokens.length - 1) {
    stop(app);
    app.replay = null;
  } else app.replay = { timer: null, ...app.replay, upto };
  app.draw();
}

function play(app) {
  if (app.replay?.timer != null) {
    stop(app);
    app.draw();
    return;
  }
  const view = app.view();
  if (view === null) return;
  app.pin(null);
  app.replay = {
    upto: app.replay?.upto ?? 0,
    timer: setInterval(() => show(app, app.replay.upto + 1), 1000 / Number($("replay-speed").value)),
  };
  app.draw();
}

/** What a file of a run holds, as {pack, record}. Raises an Error that says what is wrong with it. */
export function readSaved(text) {
  let saved;
  try {
    saved = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  if (saved?.format !== FORMAT) throw new Error(`it is not a saved run ("format" is not "${FORMAT}")`);
  const { pack, run } = saved;
  const n = pack?.concepts?.length;
  const isIndex = (c) => Number.isInteger(c) && c >= 0 && c < n;
  if (
    !(n >= 0) ||
    !pack.concepts.every(
      (concept, i) =>
        typeof concept.id === "string" &&
        typeof concept.name === "string" &&
        Array.isArray(concept.parents) &&
        concept.parents.every((p) => isIndex(p) && p < i),
    )
  )
    throw new Error("its pack is damaged");
  const isToken = (t) =>
    Number.isInteger(t?.position) &&
    typeof t.text === "string" &&
    Array.isArray(t.fired) &&
    t.fired.every(isIndex) &&
    t.strengths?.length === t.fired.length &&
    t.strengths.every((strength) => strength === null || Number.isFinite(strength)) &&
    Array.isArray(t.top) &&
    t.top.every((told) => isIndex(told?.[0])) &&
    COUNTS.every((name) => Number.isInteger(t[name]) && t[name] >= 0);
  if (
    typeof run?.request !== "string" ||
    !Array.isArray(run.choices) ||
    !run.choices.every(
      (choice) =>
        typeof choice?.text === "string" &&
        typeof (choice.reasoning ?? "") === "string" &&
        Array.isArray(choice.tokens) &&
        choice.tokens.every(isToken) &&
        Array.isArray(choice.events),
    )
  )
    throw new Error("its run is damaged");
  if (
    run.messages !== null &&
    !(Array.isArray(run.messages) && run.messages.every((message) => typeof message?.role === "string"))
  )
    throw new Error("its messages are damaged");
  return { pack, record: run };
}

function save(app) {
  const { run, pack } = app.view();
  const { model, pack: name, alert_set, concepts } = pack;
  const url = URL.createObjectURL(
    new Blob(
      [JSON.stringify({ format: FORMAT, pack: { model, pack: name, alert_set, concepts }, run: recordOf(run) })],
      { type: "application/json" },
    ),
  );
  const link = document.createElement("a");
  link.href = url;
  link.download = `${run.id.replace(/[^\w.-]/g, "-")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function open(app, file) {
  try {
    const { pack, record } = readSaved(await file.text());
    const id = `saved:${record.request.replace(/^(saved:)+/, "")}`;
    const run = merge(newState(), { ...record, request: id });
    run.ended = true;
    run.pack = readPack(pack, pathsOf);
    app.state.runs.set(id, run);
    app.follow = false;
    app.go({ answer: id });
  } catch (error) {
    app.complain(`${file.name} cannot be opened: ${error.message}.`);
  }
}

export function controlReplay(app) {
  $("replay-play").addEventListener("click", () => play(app));
  $("replay-range").addEventListener("input", (event) => {
    stop(app);
    show(app, Number(event.target.value));
  });
  $("replay-speed").addEventListener("change", () => {
    if (app.replay?.timer != null) {
      stop(app);
      play(app);
    }
  });
  $("replay-save").addEventListener("click", () => save(app));
  $("replay-open").addEventListener("click", () => $("replay-file").click());
  $("replay-file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) open(app, file);
    event.target.value = "";
  });
  return {
    stop: () => {
      stop(app);
      app.replay = null;
    },
  };
}
